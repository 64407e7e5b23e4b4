"""How every picture of the documentation looks, and how it is saved."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

IMAGES = Path(__file__).parent.parent / "docs" / "images"
WIDTH = 5.2
"""Inches. A phone of 390 pixels then shows letters of 10 points as 9 pixels or more, so panels are stacked."""
BLUE, ORANGE, GREEN, GREY, RED, PURPLE = "#0072b2", "#d55e00", "#009e73", "#777777", "#c02942", "#8a5aa8"

pyplot.rcParams.update(
    {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "muse-attention",  # the same picture has the same bytes
        "svg.fonttype": "path",
        "figure.facecolor": "white",
        "axes.facecolor": "none",
        "savefig.facecolor": "white",
    }
)

_DARK = """ <style>
  @media (prefers-color-scheme: dark) {
   #patch_1 { display: none }
   #figure_1 { filter: invert(1) hue-rotate(180deg) }
  }
 </style>
"""
"""On a dark page there is no paper (matplotlib's first patch), and light and dark change places. Where images do not
know the colours of the page (Safari), the paper stays white."""


def save(figure: Any, name: str) -> Path:
    """Write the SVG file docs/images/NAME and close the figure."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None}, bbox_inches="tight", dpi=110)
    pyplot.close(figure)
    start = ' <g id="figure_1">\n'
    before, after = drawn.getvalue().split(start)
    IMAGES.mkdir(parents=True, exist_ok=True)
    path = IMAGES / name
    path.write_text(before + _DARK + start + after)
    return path
