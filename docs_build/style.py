"""How every picture of the documentation looks, and how it is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

IMAGES = Path(__file__).parent.parent / "docs" / "images"
BLUE, ORANGE, GREEN, GREY, RED = "#0072b2", "#d55e00", "#009e73", "#777777", "#c02942"

pyplot.rcParams.update(
    {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "muse-attention",  # the same picture has the same bytes
        "svg.fonttype": "path",
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
    }
)


def save(figure: Any, name: str) -> Path:
    """Write docs/images/NAME and close the figure."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    path = IMAGES / name
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, metadata=metadata, bbox_inches="tight", dpi=110)
    pyplot.close(figure)
    return path
