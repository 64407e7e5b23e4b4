"""README's picture, from the records: `python -m docs_build.speed_picture`. A newer record redraws it.

On the left, speed-ups on heads of trained models against the length. On the right, what training cost in loss.
Synthetic data flatter the default and are left to the tables of docs/evidence/speed.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter

from docs_build.quality_picture import TrainedDefault, read_trained_defaults
from docs_build.records import (
    DEFAULT,
    GPU,
    PAPER,
    QWEN,
    SMOLLM2,
    TRAINED_WITH,
    Timing,
    read_timings,
    read_timings_of_qwen,
)
from docs_build.style import BLUE, GREEN, GREY, save
from muse_attention.sizes import format_size

PICTURE = "speed-up.svg"
_COLOURS = {DEFAULT: GREEN, PAPER: BLUE}
_LABELS = {
    (DEFAULT, SMOLLM2): "{:.3g}x\ndefault,\nSmolLM2",
    (PAPER, SMOLLM2): "{:.3g}x\nthe paper's sizes,\nSmolLM2",
    (DEFAULT, QWEN): "{:.3g}x, default, Qwen 1.5B",
}
"""By line: what stands to the right of its last point."""


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
        _speeds(DEFAULT, QWEN, of_qwen),
    ]


def describe(speeds: Sequence[Speeds], trained: Sequence[TrainedDefault]) -> str:
    """What the picture shows of the default, for those who do not see it."""
    lines = [line.by_length for line in speeds if line.method == DEFAULT]
    found = ", ".join(
        f"{_range([line[length] for line in lines if length in line])} at {format_size(length)}"
        for length in sorted({length for line in lines for length in line})
    )
    gaps = ", ".join(f"{one.percent} at {format_size(one.length)}" for one in trained)
    return f"Speed-up over cuDNN on heads of real models: {found}. Loss after training with the {TRAINED_WITH}: {gaps}."


def draw(speeds: Sequence[Speeds], trained: Sequence[TrainedDefault]) -> Path:
    """Speed-up of forward and backward against length, exact attention being 1; and losses against exact training."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7.2, 3.4), width_ratios=(8, 5))
    _draw_speeds(left, speeds)
    _draw_losses(right, trained)
    figure.tight_layout(w_pad=2)
    return save(figure, PICTURE)


def _draw_speeds(axes: pyplot.Axes, speeds: Sequence[Speeds]) -> None:
    for line in speeds:
        colour, marker = _COLOURS[line.method], "o" if line.data == SMOLLM2 else "D"
        axes.plot(*zip(*line.by_length.items(), strict=True), marker=marker, linewidth=2.4, color=colour)
        label = _LABELS[line.method, line.data]
        last, speedup = list(line.by_length.items())[-1]
        axes.annotate(
            label.format(speedup),
            *((last, speedup), (10, -5 if "\n" in label else -9)),
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


def _draw_losses(axes: pyplot.Axes, trained: Sequence[TrainedDefault]) -> None:
    for one in trained:
        axes.errorbar(
            *(one.length, one.gap.mean), yerr=one.gap.standard_error, color=GREEN, marker="o", markersize=7, capsize=4
        )
        axes.annotate(
            one.percent.replace(" ", "\n", 1) + f"\n{one.seeds} seeds",
            *((one.length, one.gap.mean + one.gap.standard_error), (0, 8)),
            textcoords="offset points", ha="center", color=GREEN, fontsize=10,
        )  # fmt: skip
    lengths = [one.length for one in trained]
    _label_lengths(axes, lengths)
    axes.set_xlim(lengths[0] / 1.5, lengths[-1] * 1.5)
    axes.axhline(0, color=GREY, linewidth=1.2)
    axes.text(lengths[-1] * 1.45, -0.02, "exact training: 0", color=GREY, ha="right", va="top", fontsize=10)
    axes.set_ylim(-0.1, 0.5)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda percent, _: f"{percent:+.1f}%" if abs(percent) > 0.01 else "0"))
    axes.set_title(f"Held-out loss, 23M models\ntrained: {TRAINED_WITH}", loc="left", fontsize=11)


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
    speeds, trained = read_speeds(), read_trained_defaults()
    print(f"wrote {draw(speeds, trained)}: {describe(speeds, trained)}")
