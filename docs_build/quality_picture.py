"""README's picture of quality against cost, from the records: `python -m docs_build.quality_picture`.

Across: the time of an attention, forward and backward, as a share of exact attention's, on heads of a model that was
trained with the recipe `far` at that length. Up: how much higher the held-out loss is, under exact attention, than
after exact training from the same weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter

from docs_build.records import BLOCK_DIAGONAL, DEFAULT, GPU, MOBA, RECORDS, read_comparison
from docs_build.style import BLUE, GREEN, GREY, ORANGE, RED, save
from muse_attention.by_name import full_name
from muse_attention.evaluation.comparison.seeds import seeds_differences
from muse_attention.sizes import format_size

PICTURE = "quality.svg"
PAPERS_METHOD = "MuSe, the paper's method"
_COLOURS = {DEFAULT: GREEN, PAPERS_METHOD: BLUE, MOBA: ORANGE, BLOCK_DIAGONAL: RED}
_LINEAR_UP_TO = 0.5
"""Percent: a logarithm begins here, for zero has none."""


class Measured(NamedTuple):
    """Records of one length, and how they are drawn."""

    times: str
    """in speed"""
    comparisons: tuple[str, ...]
    """in pretraining"""
    marker: str
    is_labelled_below: bool


MEASURED = (
    Measured("cuda-far-heads", ("16k", "16k-paper", "16k-baselines"), "o", is_labelled_below=False),
    Measured("cuda-far-heads-32k", ("32k", "32k-moba"), "D", is_labelled_below=True),
)


class Trained(NamedTuple):
    """Models that were trained with an attention."""

    method: str
    attention: str
    length: int
    cost: float
    """of the attention, as a share of exact attention's time"""
    gap: float
    """percent of exact training's loss"""
    standard_error: float
    """over seeds"""
    seeds: int

    @property
    def name(self) -> str:
        sizes = f" {self.attention.partition(':')[2]}" if self.method == MOBA else ""
        return f"{self.method}{sizes}, {format_size(self.length)}"


def read_trained(measured: Measured) -> list[Trained]:
    """By cost. A ValueError where a record has another attention than those that are drawn, or no time of it."""
    times = RECORDS / "speed" / f"{measured.times}.json"
    document = json.loads(times.read_text())
    if document["machine"]["gpu"] != GPU:
        raise ValueError(f"{times}: not of an {GPU}, as the picture says")
    costs = {
        case["attention"]: case["seconds"]["forward_backward_median"] / case["sdpa_seconds"]["forward_backward_median"]
        for case in document["cases"]
    }
    found = []
    for name in measured.comparisons:
        results, path = read_comparison(name)
        length = results.settings.length
        for group, gap in seeds_differences(results):
            if group.attention not in costs:
                raise ValueError(f"{path} has {group.attention}, which {times} has not")
            if gap.standard_error is None:
                raise ValueError(f"{path}: one seed of {group.attention}, and an error over seeds is drawn")
            measures = costs[group.attention], gap.mean, gap.standard_error, len(group.runs)
            found.append(Trained(_method(group.attention, length), group.attention, length, *measures))
    return sorted(found, key=lambda trained: trained.cost)


def describe() -> str:
    """What the picture shows, for those who do not see it."""
    points = "; ".join(
        f"{one.name}: {one.cost:.2f} of the time, {one.gap:+.2f} ± {one.standard_error:.2f}%, {one.seeds} seeds"
        for measured in MEASURED
        for one in read_trained(measured)
    )
    return f"Loss after training against the time of the attention, both relative to exact attention. {points}"


def draw() -> Path:
    figure, axes = pyplot.subplots(figsize=(7.2, 4.0))
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.plot([1], [0], marker="s", markersize=8, color=GREY, linestyle="")
    _label(axes, "exact attention", 1, 0, GREY)
    for measured in MEASURED:
        for one in read_trained(measured):
            colour, text = _COLOURS[one.method], f"{one.name}\n{one.gap:+.2f}%, {one.seeds} seeds"
            axes.errorbar(
                *(one.cost, one.gap), yerr=one.standard_error,
                color=colour, marker=measured.marker, markersize=8, capsize=3,
            )  # fmt: skip
            _label(axes, text, one.cost, one.gap, colour, is_below=measured.is_labelled_below)
    axes.set_yscale("symlog", linthresh=_LINEAR_UP_TO)
    axes.set_yticks([0, 0.25, 0.5, 1, 2, 5, 10, 20])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda percent, _: f"{percent:+g}%" if percent else "0"))
    axes.set_xlim(0, 1.8)
    axes.set_ylim(-0.4, 50)
    axes.set_xlabel("time of the attention, forward + backward, exact attention being 1")
    axes.set_ylabel("held-out loss against exact training")
    axes.set_title(f"23M models, 16k and 32k tokens, {GPU}; read with exact attention", fontsize=10, loc="left")
    return save(figure, PICTURE)


def _label(axes: pyplot.Axes, text: str, x: float, y: float, colour: str, *, is_below: bool = False) -> None:
    """To the right of a point, or below it."""
    place, sides = ((0, -16), {"ha": "center", "va": "top"}) if is_below else ((9, 5), {"ha": "left"})
    axes.annotate(text, (x, y), xytext=place, textcoords="offset points", color=colour, fontsize=9.5, **sides)


def _method(attention: str, length: int) -> str:
    """In words."""
    kinds = {"moba": MOBA, "block_diagonal": BLOCK_DIAGONAL}
    named = {full_name("muse", length): DEFAULT, full_name("muse:paper", length): PAPERS_METHOD}
    return named.get(attention) or kinds[attention.partition(":")[0]]


if __name__ == "__main__":
    print(f"wrote {draw()}: {describe()}")
