"""README's picture, from the records: `python -m docs_build.speed_picture`. A newer record redraws it.

Above, speed-ups on heads of trained models against the length. Below, held-out loss against seconds of training.
Synthetic data flatter the default and are left to the tables of docs/evidence/speed.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter

from docs_build.extension_runs import Kind, read_compared
from docs_build.records import (
    DEFAULT,
    GPU,
    PAPER,
    QWEN,
    QWEN_SMALL,
    SMOLLM2,
    Timing,
    read_timings,
    read_timings_of_qwen,
)
from docs_build.style import BLUE, GREEN, GREY, WIDTH, save
from muse_attention.sizes import format_size

PICTURE = "speed-up.svg"
_COLOURS = {DEFAULT: GREEN, PAPER: BLUE}
_LABELS = {
    (DEFAULT, SMOLLM2): "{:.3g}x\ndefault,\nSmolLM2",
    (PAPER, SMOLLM2): "{:.3g}x\nthe paper's sizes,\nSmolLM2",
    (DEFAULT, QWEN_SMALL): "{:.3g}x,\nQwen 0.5B",
    (DEFAULT, QWEN): "{:.3g}x, default, Qwen 1.5B",
}
"""By line: what stands beside its last point."""


class Speeds(NamedTuple):
    """A line of the picture."""

    method: str
    data: str
    by_length: dict[int, float]
    """speed-ups over exact attention, lengths ascending"""


def read_speeds() -> list[Speeds]:
    """Of heads of trained models."""
    timings, of_qwen = read_timings(), read_timings_of_qwen()
    return [
        _speeds(DEFAULT, SMOLLM2, timings),
        _speeds(PAPER, SMOLLM2, timings),
        _speeds(DEFAULT, QWEN_SMALL, of_qwen),
        _speeds(DEFAULT, QWEN, of_qwen),
    ]


def describe(speeds: Sequence[Speeds], trained: Sequence[Kind]) -> str:
    """What the picture shows of the default, for those who do not see it."""
    lines = [line.by_length for line in speeds if line.method == DEFAULT]
    found = ", ".join(
        f"{_range([line[length] for line in lines if length in line])} at {format_size(length)}"
        for length in sorted({length for line in lines for length in line})
    )
    exact, muse = trained
    seconds = " s instead of ".join(f"{kind.runs[0].tokens / kind.speed:.0f}" for kind in (muse, exact))
    return (
        f"Speed-up over cuDNN on heads of real models: {found}. Training at 32k, compilation aside: {seconds} s, "
        f"loss {muse.gap}."
    )


def draw(speeds: Sequence[Speeds], trained: Sequence[Kind]) -> Path:
    """Speed-up of forward and backward against length, exact attention being 1; and losses against seconds."""
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(WIDTH, 5.8), height_ratios=(4, 3))
    _draw_speeds(upper, speeds)
    _draw_losses(lower, trained)
    figure.tight_layout(h_pad=2)
    return save(figure, PICTURE)


def _draw_speeds(axes: pyplot.Axes, speeds: Sequence[Speeds]) -> None:
    for line in speeds:
        colour, marker = _COLOURS[line.method], "o" if line.data == SMOLLM2 else "D"
        axes.plot(*zip(*line.by_length.items(), strict=True), marker=marker, linewidth=2.4, color=colour)
        label = _LABELS[line.method, line.data]
        last, speedup = list(line.by_length.items())[-1]
        below, above = (10, 0) if "\n" in label else (6, -13), (-6, 16)
        axes.annotate(
            label.format(speedup),
            *((last, speedup), above if line.data == QWEN_SMALL else below),
            ha="right" if line.data == QWEN_SMALL else "left",
            textcoords="offset points", va="center", color=colour, fontsize=10,
        )  # fmt: skip
    lengths = sorted({length for line in speeds for length in line.by_length})
    _label_lengths(axes, lengths)
    axes.set_xlim(lengths[0] / 1.1, lengths[-1] * 2.3)
    axes.axhline(1, color=GREY, linewidth=1.2)
    axes.text(lengths[-1] * 2.25, 0.92, "exact attention (cuDNN): 1x", color=GREY, ha="right", va="top", fontsize=10)
    axes.set_ylim(0, 5)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda speed, _: f"{speed:g}x"))
    axes.set_title(f"Speed-up, forward + backward\nheads of real models, {GPU}", loc="left", fontsize=11)


def _draw_losses(axes: pyplot.Axes, trained: Sequence[Kind]) -> None:
    """Means over seeds, after each quarter of the updates."""
    for kind, colour in zip(trained, (GREY, GREEN), strict=True):
        quarters = list(zip(*(run.on_the_way[1:] for run in kind.runs), strict=True))
        seconds = [of_seeds[0][0] / kind.speed for of_seeds in quarters]
        losses = [mean(loss for _, loss in of_seeds) for of_seeds in quarters]
        axes.plot(seconds, losses, marker="o", linewidth=2.4, color=colour)
        name, gap = ("default", f", {kind.gap}") if kind.gaps else ("exact", "")
        axes.annotate(
            f"{name}: {seconds[-1]:.0f} s{gap}",
            *((seconds[-1], losses[-1]), (0, -8 if kind.gaps else 10)),
            va="top" if kind.gaps else "bottom",
            textcoords="offset points", ha="center", color=colour, fontsize=10,
        )  # fmt: skip
    axes.set_xlim(0, 78)
    axes.set_ylim(1.24, 1.325)
    axes.set_yticks([1.24, 1.26, 1.28, 1.30, 1.32])
    axes.set_xlabel("seconds of training, compilation aside")
    axes.set_title("Held-out loss, same tokens\nSmolLM2-135M, 8k to 32k", loc="left", fontsize=11)


def _label_lengths(axes: pyplot.Axes, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [format_size(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("tokens in a sequence")


def _speeds(method: str, data: str, timings: Sequence[Timing]) -> Speeds:
    own = [timing for timing in timings if (timing.method, timing.data) == (method, data)]
    if not own or {timing.gpu for timing in own} != {GPU}:
        raise ValueError(f"no record of {method!r} on {data} alone on an {GPU}, as the picture says")
    return Speeds(method, data, {timing.length: timing.speedup for timing in own})


def _range(speedups: Sequence[float]) -> str:
    low, high = (f"{speedup:.3g}" for speedup in (min(speedups), max(speedups)))
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    speeds, trained = read_speeds(), read_compared()[:2]
    print(f"wrote {draw(speeds, trained)}: {describe(speeds, trained)}")
