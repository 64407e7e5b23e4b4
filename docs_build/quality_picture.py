"""README's picture of quality against cost, from the records: `python -m docs_build.quality_picture`.

Across: the time of an attention, forward and backward, as a share of exact attention's, on heads of models that were
trained so at that length. Up, on the left: how much higher the held-out loss is, under exact attention, than after
exact training from the same weights; on the right: how many needles fewer are found.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter

from docs_build.needle_records import (
    read_mean_over_trainings,
    read_needles_compared,
    read_needles_over_trainings,
)
from docs_build.records import BLOCK_DIAGONAL, DEFAULT, GPU, MOBA, RECORDS, read_comparison
from docs_build.style import BLUE, GREEN, GREY, ORANGE, RED, save
from muse_attention.by_name import full_name
from muse_attention.config import MuSeConfig
from muse_attention.evaluation.comparison.seeds import seeds_of
from muse_attention.evaluation.means import Mean
from muse_attention.pretraining.schedule import EXACT
from muse_attention.sizes import format_size

PICTURE = "quality.svg"
PAPERS_METHOD = "MuSe, the paper's method"
TOLERANCE = "MuSe, tolerance"
_COLOURS = {DEFAULT: GREEN, TOLERANCE: GREEN, PAPERS_METHOD: BLUE, MOBA: ORANGE, BLOCK_DIAGONAL: RED}
_LINEAR_UP_TO = 0.5
"""Percent: a logarithm begins here, for zero has none."""
_LINEAR_UP_TO_POINTS = 2
"""Percentage points of needles: the same."""
_NEEDLES_AT = 16 * 1024
_WIDTH_OF_LINES = 1.2


class Measured(NamedTuple):
    """Records of one length, and how they are drawn."""

    times: tuple[str, ...]
    """in speed; where two have an attention, its cost is their mean"""
    comparisons: tuple[str, ...]
    """in pretraining; seeds of an attention may be in several"""
    marker: str


MEASURED = (
    Measured(
        ("cuda-far-heads", "cuda-far-heads-tolerances"), ("16k", "16k-paper", "16k-baselines", "16k-tolerances"), "o"
    ),
    Measured(("cuda-far-heads-32k",), ("32k", "32k-moba"), "D"),
)


class Looked(NamedTuple):
    """Models of 1.3M parameters that were trained with an attention to look needles up."""

    name: str
    attention: str
    over_trainings: tuple[tuple[str, str], ...]
    """folders in needles/16k with a record of several trainings, and what the models are called there"""
    single: str | None = None
    """what they are called in the records of single trainings, of an earlier try"""
    is_longer: bool = False
    """whether they had three times the updates"""


_SETTINGS = "caution=2.0,clustering=lloyd,cap_factor=none"
LOOKED = (
    Looked(DEFAULT, "muse", (("tolerances", "default"), ("key-clusters", "default")), single="muse"),
    Looked("the same, 3 times the updates", "muse", (("more-updates", "default"),), is_longer=True),
    Looked("tolerance 0.03", f"muse:Q32K32R8T0.03B2k,{_SETTINGS}", (("tolerances", "tolerance-0.03"),)),
    Looked("tolerance 0.01", f"muse:Q32K32R32T0.01B2k,{_SETTINGS}", (("tolerances", "tolerance-0.01"),)),
    Looked("128 key clusters, 0.03", f"muse:Q32K128R8T0.03B2k,{_SETTINGS}", (("key-clusters", "k128-t0.03"),)),
    Looked("128 key clusters, 0.01", f"muse:Q32K128R32T0.01B2k,{_SETTINGS}", (("key-clusters", "k128-t0.01"),)),
    Looked(PAPERS_METHOD, "muse:paper", (), single="paper"),
)
_SINGLE = tuple(f"tiny/seed-{seed}" for seed in (2, 5, 6, 7))
"""Those that could look up before."""
_TIMES_OF_LOOKED = "cuda-tiny-heads"


class Point(NamedTuple):
    """Models that were trained with an attention."""

    method: str
    name: str
    cost: float
    """of the attention, as a share of exact attention's time"""
    gap: Mean
    """to exact training: percent of its loss, or percentage points of needles"""
    trainings: int
    is_longer: bool = False


def read_trained(measured: Measured) -> list[Point]:
    """By cost. A ValueError where a record has another attention than those that are drawn, or no time of it."""
    costs = _read_costs(measured.times)
    gaps: dict[str, list[float]] = {}
    length = 0
    for record in measured.comparisons:
        results, path = read_comparison(record)
        length = results.settings.length
        for group in seeds_of(results):
            found = [gap for gap in group.differences(results, is_percent=True) if gap is not None]
            if group.attention not in costs and group.attention != EXACT:
                raise ValueError(f"{path} has {group.attention}, which {' and '.join(measured.times)} have not")
            gaps.setdefault(group.attention, []).extend(found)
    points = []
    for attention, found in gaps.items():
        if attention == EXACT:
            continue
        if len(found) < 2:
            raise ValueError(f"one seed of {attention} in {measured.comparisons}, and an error over seeds is drawn")
        method = _method(attention, length)
        name = f"{method}{_sizes(attention, method)}, {format_size(length)}"
        points.append(Point(method, name, costs[attention], Mean.of(found), len(found)))
    return sorted(points, key=lambda point: point.cost)


def read_looked() -> list[Point]:
    """By cost."""
    costs = _read_costs((_TIMES_OF_LOOKED,))
    points = []
    for one in LOOKED:
        gap, trainings = _read_needles(one)
        method = one.name if one.name in _COLOURS else TOLERANCE
        cost = costs[full_name(one.attention, _NEEDLES_AT)]
        points.append(Point(method, one.name, cost, gap, trainings, one.is_longer))
    return sorted(points, key=lambda point: point.cost)


def describe() -> str:
    """What the picture shows, for those who do not see it."""
    losses = "; ".join(
        f"{one.name}: {one.cost:.2f} of the time, {_percent(one.gap)}, {one.trainings} seeds"
        for measured in MEASURED
        for one in read_trained(measured)
    )
    needles = "; ".join(
        f"{one.name}: {one.cost:.2f} of the time, {_points(one.gap)} points, {one.trainings} trainings"
        for one in read_looked()
    )
    return (
        "Quality after training against the time of the attention, both relative to exact attention. "
        f"Held-out loss of 23M models: {losses}. Needles found by 1.3M models at {format_size(_NEEDLES_AT)}: {needles}"
    )


def draw() -> Path:
    figure, (losses, needles) = pyplot.subplots(2, 1, figsize=(8.6, 8.4))
    _draw_losses(losses)
    _draw_needles(needles)
    figure.tight_layout(h_pad=2.0)
    return save(figure, PICTURE)


_PLACES = {
    "MuSe, default, 16k": (-2, 24, "left"),
    "MuSe, tolerance 0.3, 16k": (0, 24, "right"),
    "MuSe, tolerance 0.03, 16k": (-4, -32, "left"),
    "MuSe, default, 32k": (0, -38, "center"),
    f"{MOBA} L256B256R8, 32k": (-9, -4, "right"),
    DEFAULT: (-10, -12, "right"),
    "the same, 3 times the updates": (-10, -4, "right"),
    "tolerance 0.03": (10, -12, "left"),
    "tolerance 0.01": (9, -12, "left"),
    "128 key clusters, 0.03": (9, 10, "left"),
    "128 key clusters, 0.01": (9, -20, "left"),
}
"""Of labels, from their points, where to the right and a little above is not the place."""


def _draw_losses(axes: pyplot.Axes) -> None:
    _draw_exact(axes)
    for measured in MEASURED:
        points = read_trained(measured)
        for one in points:
            _draw_point(axes, one, measured.marker, f"{one.name}\n{_percent(one.gap)}, {one.trainings} seeds")
        _join(axes, (one for one in points if one.method in (DEFAULT, TOLERANCE)))
    axes.set_yscale("symlog", linthresh=_LINEAR_UP_TO)
    axes.set_yticks([0, 0.25, 0.5, 1, 2, 5, 10, 20])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda percent, _: f"{percent:+g}%" if percent else "0"))
    axes.set_xlim(0, 1.75)
    axes.set_ylim(-0.45, 50)
    axes.set_ylabel("held-out loss against exact training")
    axes.set_title(f"23M models at 16k and 32k, {GPU}; read with exact attention", fontsize=10, loc="left")


def _draw_needles(axes: pyplot.Axes) -> None:
    _draw_exact(axes)
    for one in read_looked():
        _draw_point(axes, one, "o", f"{one.name}\n{_points(one.gap)}, {one.trainings} trainings")
    axes.set_yscale("symlog", linthresh=_LINEAR_UP_TO_POINTS)
    axes.set_yticks([0, -1, -2, -5, -10, -20, -50, -100])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda points, _: f"{points:+g}" if points else "0"))
    axes.set_xlim(0, 2.3)
    axes.set_ylim(-140, 1.6)
    axes.set_ylabel("needles found, points\nagainst exact training")
    axes.set_title(
        f"1.3M models at {format_size(_NEEDLES_AT)}, {GPU}; read with exact attention", fontsize=10, loc="left"
    )


def _draw_exact(axes: pyplot.Axes) -> None:
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.plot([1], [0], marker="s", markersize=8, color=GREY, linestyle="")
    axes.annotate("exact attention", (1, 0), xytext=(6, 6), textcoords="offset points", color=GREY, fontsize=9)
    axes.set_xlabel("time of the attention, forward + backward, exact attention being 1")


def _draw_point(axes: pyplot.Axes, one: Point, marker: str, label: str) -> None:
    colour = _COLOURS[one.method]
    filled = "white" if one.is_longer else colour
    axes.errorbar(
        *(one.cost, one.gap.mean), yerr=one.gap.standard_error,
        color=colour, marker=marker, markersize=8, markerfacecolor=filled, capsize=3,
    )  # fmt: skip
    across, up, side = _PLACES.get(one.name, (9, 5, "left"))
    axes.annotate(
        label, (one.cost, one.gap.mean), xytext=(across, up), textcoords="offset points", color=colour, fontsize=8.5,
        ha=side,
    )  # fmt: skip


def _join(axes: pyplot.Axes, points: Iterable[Point]) -> None:
    """Tolerances of one method, by a line."""
    line = [(one.cost, one.gap.mean) for one in points]
    axes.plot(*zip(*line, strict=True), color=GREEN, linewidth=_WIDTH_OF_LINES, alpha=0.5)


def _read_costs(records: Iterable[str]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for record in records:
        path = RECORDS / "speed" / f"{record}.json"
        document = json.loads(path.read_text())
        if document["machine"]["gpu"] != GPU:
            raise ValueError(f"{path}: not of an {GPU}, as the picture says")
        for case in document["cases"]:
            own, exact = (case[kind]["forward_backward_median"] for kind in ("seconds", "sdpa_seconds"))
            found.setdefault(case["attention"], []).append(own / exact)
    return {attention: fmean(costs) for attention, costs in found.items()}


def _read_needles(looked: Looked) -> tuple[Mean, int]:
    """The difference to exact training, and over how many trainings.

    A record that is alone says its mean itself, with more digits than its cells have.
    """
    needles = RECORDS / "needles" / "16k"
    tables = [(needles / folder / "needles-over-trainings.md", model) for folder, model in looked.over_trainings]
    found = [gap for path, model in tables for gap in read_needles_over_trainings(path, model)]
    if looked.single is not None:
        found += [read_needles_compared(needles / folder / "needles-compared.md", looked.single) for folder in _SINGLE]
    elif len(tables) == 1:
        return read_mean_over_trainings(*tables[0]), len(found)
    return Mean.of(found), len(found)


def _method(attention: str, length: int) -> str:
    """In words."""
    kinds = {"moba": MOBA, "block_diagonal": BLOCK_DIAGONAL, "muse": TOLERANCE}
    named = {full_name("muse", length): DEFAULT, full_name("muse:paper", length): PAPERS_METHOD}
    return named.get(attention) or kinds[attention.partition(":")[0]]


def _sizes(attention: str, method: str) -> str:
    """What tells two attentions of one method apart."""
    settings = attention.partition(":")[2]
    if method == TOLERANCE:
        return f" {MuSeConfig.parse(settings).tolerance:g}"
    return f" {settings}" if method == MOBA else ""


def _percent(gap: Mean) -> str:
    return f"{gap.mean:+.2f} ± {gap.standard_error:.2f}%"


def _points(gap: Mean) -> str:
    return f"{gap.mean:+.1f} ± {gap.standard_error:.1f}"


if __name__ == "__main__":
    print(f"wrote {draw()}: {describe()}")
