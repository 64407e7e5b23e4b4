"""Two pictures of quality against cost, from the records: `python -m docs_build.quality_picture`.

Each row is an attention that models were trained with. On the left, in the first: how much higher the loss is, under
exact attention, than after exact training from the same weights, the median over held-out windows. In the second: how
many fewer needles are found, by try, for tries begin with short models of their own, and only within one can attentions
be compared. On the right: the time of the attention, forward and backward, as a share of exact attention's, on heads of
models that were trained so at that length. A cautious configuration comes first, then the present default, then that of
0.3.0 with the baselines that were trained beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from docs_build.needle_records import read_difference, read_mean_over_trainings
from docs_build.records import (
    BLOCK_DIAGONAL,
    CAUTIOUS,
    DEFAULT,
    DEFAULTS_OF_0_3,
    GPU,
    MOBA,
    RECORDS,
    TO_THE_LETTER,
    classify,
)
from docs_build.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, WIDTH, save
from docs_build.trained_pairs import read_pairs
from muse_attention.registry import full_name
from muse_attention.sizes import format_size
from muse_lab.benchmark.results import BenchmarkResults
from muse_lab.records.means import Mean

LOSSES, NEEDLES = "quality.svg", "quality-needles.svg"
EARLIER = "MuSe, default of 0.3.0"
COLOURS = {DEFAULT: GREEN, CAUTIOUS: PURPLE, EARLIER: GREY, TO_THE_LETTER: BLUE, MOBA: ORANGE, BLOCK_DIAGONAL: RED}
_LINEAR_UP_TO = 0.5
"""Percent: a logarithm begins here, for zero has none."""
_LINEAR_UP_TO_POINTS = 2
"""Percentage points of needles: the same."""


class Measured(NamedTuple):
    """Records of one length."""

    times: tuple[str, ...]
    """in speed; where two have an attention, its cost is their mean"""
    comparisons: tuple[str, ...]
    """in pretraining; seeds of an attention may be in several"""


MEASURED = (
    Measured(("cuda-far64k-costs",), ("far-64k-caution",)),
    Measured(("cuda-far32k128-costs",), ("far-32k-heads-of-128-caution",)),
    Measured(("cuda-far64k-heads",), ("far-64k",)),
    Measured(("cuda-far32k-heads",), ("far-32k",)),
    Measured(("cuda-far32k128-heads",), ("far-32k-heads-of-128",)),
    Measured(("cuda-far-heads",), ("16k", "16k-paper", "16k-baselines")),
    Measured(("cuda-far-heads-32k",), ("32k-moba",)),
)


class NeedleModels(NamedTuple):
    """Models of 1.3M parameters that were trained with an attention to look needles up."""

    label: str
    attention: str
    called: str
    """in the record"""
    record: str | None = None
    """if it is another than that of the try"""


class Try(NamedTuple):
    """Trainings from the same short models."""

    name: str
    records: tuple[str, ...]
    """in needles/16k: one over trainings, or one for each training"""
    models: tuple[NeedleModels, ...]


_SETTINGS = "caution=2.0,clustering=lloyd,cap_factor=none"
_NEEDLES_AT = 16 * 1024
_TIMES_OF_NEEDLE_MODELS = "cuda-tiny-heads"
TRIES = (
    Try(
        "first try",
        tuple(f"tiny/seed-{seed}" for seed in (2, 5, 6, 7)),  # those that could look up before
        (NeedleModels("default", "muse", "muse"), NeedleModels("the paper's method", "muse:paper", "paper")),
    ),
    Try(
        "second try",
        ("tolerances",),
        (
            NeedleModels("default", "muse", "default"),
            NeedleModels("tolerance 0.03", f"muse:Q32K32R8T0.03B2k,{_SETTINGS}", "tolerance-0.03"),
            NeedleModels("tolerance 0.01", f"muse:Q32K32R32T0.01B2k,{_SETTINGS}", "tolerance-0.01"),
        ),
    ),
    Try(
        "third try",
        ("key-clusters",),
        (
            NeedleModels("default", "muse", "default"),
            NeedleModels("128 key clusters, tolerance 0.03", f"muse:Q32K128R8T0.03B2k,{_SETTINGS}", "k128-t0.03"),
            NeedleModels("128 key clusters, tolerance 0.01", f"muse:Q32K128R32T0.01B2k,{_SETTINGS}", "k128-t0.01"),
            NeedleModels("default, 3 times the updates", "muse", "default", record="more-updates"),
        ),
    ),
)


class Point(NamedTuple):
    """Models that were trained with an attention."""

    name: str
    colour: str
    cost: float
    """of the attention, as a share of exact attention's time"""
    gap: Mean
    """to exact training: percent of its loss, or percentage points of needles"""
    trainings: int


def read_trained(measured: Measured) -> list[Point]:
    """By cost. A ValueError where records do not belong together, or have no time of an attention."""
    found: dict[str, dict[int, float]] = {}
    pairs = [pair for record in measured.comparisons for pair in read_pairs(record)]
    for pair in pairs:
        gaps = found.setdefault(pair.attention, {})
        if pair.seed in gaps:
            raise ValueError(f"{measured.comparisons}: {pair.attention} has the seed {pair.seed} twice")
        gaps[pair.seed] = pair.median
    lengths, head_dims = {pair.length for pair in pairs}, {pair.head_dim for pair in pairs}
    if len(lengths) != 1 or len(head_dims) != 1:
        raise ValueError(f"{measured.comparisons} are of several lengths or head dimensions")
    length, (head_dim,) = lengths.pop(), head_dims
    heads = "" if head_dim == 64 else f", heads of {head_dim}"
    costs = _read_costs(measured.times, found, length)
    points = []
    for attention, by_seed in found.items():
        method = method_of(attention, length)
        sizes = f" {attention.partition(':')[2]}" if method == MOBA else ""
        name = f"{method}{sizes}, {format_size(length)}{heads}"
        points.append(Point(name, COLOURS[method], costs[attention], Mean.of(list(by_seed.values())), len(by_seed)))
    return sorted(points, key=lambda point: point.cost)


def read_needles(one: Try) -> list[Point]:
    """Of all models of a try."""
    names = {models: _recorded_name(models.attention) for models in one.models}
    costs = _read_costs([_TIMES_OF_NEEDLE_MODELS], names.values(), _NEEDLES_AT)
    points = []
    for models, attention in names.items():
        gap, trainings = _read_difference(one, models)
        colour = BLUE if models.attention == "muse:paper" else GREEN
        points.append(Point(models.label, colour, costs[attention], gap, trainings))
    return points


def describe() -> str:
    """What the picture of losses shows of MuSe as it is now, for those who do not see it."""
    points = [point for measured in MEASURED for point in read_trained(measured)]
    found = (
        f"{point.name.partition(', ')[2]}: {point.gap.mean:+.2f}%, {point.cost:.2f}"
        for point in points
        if point.name.startswith((f"{DEFAULT}, ", f"{CAUTIOUS}, "))
    )
    return f"Loss and time against exact: {'; '.join(found)}"


def draw_losses() -> Path:
    points = [point for measured in MEASURED for point in read_trained(measured)]
    rows = [Row(f"{point.name}: {_percent(point.gap)}, {point.trainings} seeds", point) for point in points]
    figure, gaps = _draw(rows, f"23M models, {GPU};\nread with exact attention")
    gaps.set_xscale("symlog", linthresh=_LINEAR_UP_TO)
    gaps.set_xlim(-0.45, 40)
    gaps.set_xticks([0, 0.5, 5])
    gaps.xaxis.set_major_formatter(FuncFormatter(lambda percent, _: f"{percent:+g}%" if percent else "0"))
    gaps.set_xlabel("held-out loss against exact\ntraining, median window")
    return save(figure, LOSSES)


def draw_needles() -> Path:
    rows = []
    for one in TRIES:
        rows.append(Row(one.name))
        for point in read_needles(one):
            rows.append(Row(f"{point.name}: {_points(point.gap)}, {point.trainings} trainings", point))
    title = (
        f"1.3M models at {format_size(_NEEDLES_AT)}, {GPU}; the default\nis that of 0.3.0; read with exact attention"
    )
    figure, gaps = _draw(rows, title)
    gaps.set_xscale("symlog", linthresh=_LINEAR_UP_TO_POINTS)
    gaps.set_xlim(-200, 3)
    gaps.set_xticks([0, -2, -10, -50])
    gaps.xaxis.set_major_formatter(FuncFormatter(lambda points, _: f"{points:+g}" if points else "0"))
    gaps.set_xlabel("needles found, points\nagainst exact training")
    return save(figure, NEEDLES)


class Row(NamedTuple):
    label: str
    point: Point | None = None
    """None for a heading"""


def _draw(rows: Sequence[Row], title: str) -> tuple[Figure, pyplot.Axes]:
    """Gaps and times beside each other, a label above each; also the axes of the gaps."""
    figure, (gaps, times) = pyplot.subplots(
        1, 2, figsize=(WIDTH, 1 + 0.45 * len(rows)), sharey=True, width_ratios=(4, 3)
    )
    for at, (label, point) in enumerate(rows):
        colour = point.colour if point else "black"
        gaps.text(0, at - 0.25, label, color=colour, fontsize=10, transform=gaps.get_yaxis_transform())
        if point:
            gaps.errorbar(point.gap.mean, at, xerr=point.gap.standard_error, color=colour, marker="o", capsize=3)
            times.barh(at, point.cost, height=0.3, color=colour, alpha=0.8)
    for axes, exact in ((gaps, 0), (times, 1)):
        axes.axvline(exact, color=GREY, linewidth=0.8, alpha=0.5, zorder=0)
        axes.spines["left"].set_visible(False)
    gaps.set_ylim(len(rows) - 0.6, -0.6)
    gaps.set_yticks([])
    times.set_xticks([0, 0.5, 1])
    times.set_xlabel("time of the attention,\nexact attention being 1")
    gaps.set_title(title, fontsize=10, loc="left")
    return figure, gaps


def _read_costs(records: Sequence[str], wanted: Iterable[str], length: int) -> dict[str, float]:
    """Of attentions at a length; a ValueError if one was not timed."""
    found: dict[str, list[float]] = {}
    for record in records:
        path = RECORDS / "speed" / f"{record}.json"
        results = BenchmarkResults.read(path)
        if results.machine["gpu"] != GPU:
            raise ValueError(f"{path}: not of an {GPU}, as the picture says")
        for case in results.cases:
            if case.shape.length == length:
                found.setdefault(case.attention, []).append(1 / case.speedup_forward_backward)
    if missing := set(wanted) - found.keys():
        raise ValueError(f"{', '.join(records)}: no time of {', '.join(sorted(missing))} at {format_size(length)}")
    return {attention: fmean(costs) for attention, costs in found.items()}


def _read_difference(one: Try, models: NeedleModels) -> tuple[Mean, int]:
    """To exact training, and over how many trainings."""
    needles, length = RECORDS / "needles" / "16k", format_size(_NEEDLES_AT)
    records = one.records if models.record is None else (models.record,)
    if len(records) == 1:
        return read_mean_over_trainings(needles / records[0] / "needles-over-trainings.md", models.called, length)
    paths = [needles / record / "needles-compared.md" for record in records]
    return Mean.of([read_difference(path, models.called, length) for path in paths]), len(paths)


def _recorded_name(attention: str) -> str:
    if attention == "muse":
        return DEFAULTS_OF_0_3[_NEEDLES_AT]
    return full_name(attention, _NEEDLES_AT) if attention == "muse:paper" else attention


def method_of(attention: str, length: int) -> str:
    """In words; a ValueError for what is not drawn."""
    method = EARLIER if attention == DEFAULTS_OF_0_3.get(length) else classify(attention, length)
    if method not in COLOURS:
        raise ValueError(f"{attention} at {format_size(length)} has no name here")
    return method


def _percent(gap: Mean) -> str:
    return f"{gap.mean:+.2f} ± {gap.standard_error:.2f}%"


def _points(gap: Mean) -> str:
    return f"{gap.mean:+.1f} ± {gap.standard_error:.1f}"


if __name__ == "__main__":
    print(f"wrote {draw_losses()}: {describe()}")
    print(f"wrote {draw_needles()}")
