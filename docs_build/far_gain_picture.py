"""What training with an attention loses of the gain from far context: `python -m docs_build.far_gain_picture`.

Each point is a model. The far gain is the fall of the loss under exact attention from positions 1k to 2k to the last
half of the window; up is how much less it is than after exact training from the same weights. On the right of the first
panel are attentions with a large error on heads of such a model, on the right of the second those that raise the loss
of the trained model's last half most, against exact attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot

from docs_build.quality_picture import COLOURS, MEASURED, Measured, method_of
from docs_build.records import BLOCK_DIAGONAL, GPU, RECORDS
from docs_build.style import GREY, WIDTH, save
from docs_build.trained_pairs import read_pairs
from muse_lab.benchmark.results import BenchmarkResults

PICTURE = "far-gain.svg"
_LEAST = 1e-3
"""Nats: what is less is drawn here."""


class Model(NamedTuple):
    """One that was trained with an attention."""

    method: str
    error: float
    """RSE of the attention"""
    cost: float
    """nats by which the attention raises the loss of the model's last half"""
    lost: float
    """nats of the far gain"""


def read_models() -> list[Model]:
    """All but those of block-diagonal attention, which sees nothing far away and is no approximation."""
    return [model for measured in MEASURED for model in _read(measured) if model.method != BLOCK_DIAGONAL]


def describe(models: Sequence[Model]) -> str:
    """For those who do not see the picture."""
    costs, lost = [model.cost for model in models], [model.lost for model in models]
    return (
        f"Far gain lost by {len(models)} models: it rises with what the attention costs in loss ({min(costs):.3f} to "
        f"{max(costs):.3f} nats), from {min(lost):+.4f} to {max(lost):+.3f} nats, and is not ordered by its error"
    )


def draw(models: Sequence[Model]) -> Path:
    figure, panels = pyplot.subplots(2, 1, figsize=(WIDTH, 7), sharey=True)
    for method in dict.fromkeys(model.method for model in models):
        alike = [model for model in models if model.method == method]
        lost = [max(model.lost, _LEAST) for model in alike]
        for axes, across in zip(panels, ("error", "cost"), strict=True):
            places = [getattr(model, across) for model in alike]
            axes.scatter(places, lost, color=COLOURS[method], label=method, s=28)
    costs = [min(model.cost for model in models), max(model.cost for model in models)]
    panels[1].plot(costs, costs, color=GREY, linewidth=0.8, linestyle="--", label="all of the cost")
    for axes in panels:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylabel("far gain lost (nats)")
    panels[0].set_xlabel("error of the attention (RSE)")
    panels[1].set_xlabel("loss under the attention,\nagainst exact attention (nats), last half")
    panels[1].legend(frameon=False, fontsize=10)
    panels[0].set_title(f"23M models at 16k to 64k, {GPU}", fontsize=10, loc="left")
    figure.tight_layout()
    return save(figure, PICTURE)


def _read(measured: Measured) -> list[Model]:
    errors = {
        case.attention: case.fidelity["relative_squared_error"]
        for record in measured.times
        for case in BenchmarkResults.read(RECORDS / "speed" / f"{record}.json").cases
    }
    return [
        Model(
            method_of(pair.attention, pair.length),
            errors[pair.attention],
            pair.cost_in_last_half,
            pair.exact_far_gain - pair.far_gain,
        )
        for record in measured.comparisons
        for pair in read_pairs(record)
    ]


if __name__ == "__main__":
    found = read_models()
    print(f"wrote {draw(found)}: {describe(found)}")
