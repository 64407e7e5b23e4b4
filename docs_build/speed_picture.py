"""README's picture of speed, from the records: `python -m docs_build.speed_picture`. A newer record redraws it.

Above, heads of trained models; below, synthetic data, which were measured at more lengths and flatter the default.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter

from docs_build.records import DEFAULT, PAPER, SYNTHETIC, Timing, read_timings
from docs_build.style import BLUE, GREEN, GREY, save
from muse_attention.sizes import format_size

PICTURE = "speed-up.svg"
_SMOLLM2 = "heads of SmolLM2"
_QWEN, _OF_QWEN = "heads of Qwen 1.5B", {"key_heads": 4, "head_dim": 128}
_COLOURS = {DEFAULT: GREEN, PAPER: BLUE}


class Speeds(NamedTuple):
    """A line of the picture."""

    method: str
    data: str
    by_length: dict[int, float]
    """speed-ups over exact attention, lengths ascending; means where several models were timed"""
    gpus: set[str]


def read_speeds() -> list[Speeds]:
    """Of trained models first."""
    timings = read_timings()
    of_qwen = [timing for timing in read_timings(**_OF_QWEN) if timing.data == _QWEN]
    return [
        _speeds(DEFAULT, _SMOLLM2, [timing for timing in timings if timing.data == _SMOLLM2]),
        _speeds(PAPER, _SMOLLM2, [timing for timing in timings if timing.data == _SMOLLM2]),
        _speeds(DEFAULT, _QWEN, of_qwen),
        *(_speeds(method, SYNTHETIC, [timing for timing in timings if timing.data == SYNTHETIC])
          for method in (DEFAULT, PAPER)),
    ]  # fmt: skip


def describe(speeds: Sequence[Speeds]) -> str:
    """What the picture shows of the default, for those who do not see it."""
    real = [line.by_length for line in speeds if line.method == DEFAULT and line.data != SYNTHETIC]
    (synthetic,) = (line.by_length for line in speeds if (line.method, line.data) == (DEFAULT, SYNTHETIC))
    lengths = sorted({length for line in real for length in line})
    found = ", ".join(
        f"{_range([line[length] for line in real if length in line])} at {format_size(length)}" for length in lengths
    )
    longest = max(synthetic)
    return (
        f"Speed-up of MuSe over exact attention. Heads of trained models: {found}. "
        f"Synthetic data: {synthetic[longest]:.3g} at {format_size(longest)}."
    )


def draw(speeds: Sequence[Speeds]) -> Path:
    """Speed-up of forward and backward against length, exact attention being 1."""
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7.4, 5.8), sharex=True, height_ratios=(3, 2))
    for line in speeds:
        is_synthetic = line.data == SYNTHETIC
        axes = below if is_synthetic else above
        axes.plot(
            *zip(*line.by_length.items(), strict=True),
            marker="o" if line.data in (_SMOLLM2, SYNTHETIC) else "D",
            markersize=4 if is_synthetic else 6,
            linewidth=1.4 if is_synthetic else 2.4,
            color=_COLOURS[line.method],
            alpha=0.5 if is_synthetic else 1,
        )
    smollm2, paper, qwen, synthetic, papers_synthetic = speeds
    _label(above, smollm2, "heads of SmolLM2", (10, 0), "left")
    _label(above, paper, "heads of SmolLM2", (10, -18), "left")
    _label(above, qwen, "heads of 128 of Qwen 1.5B, two to a key head", (0, -34), "center")
    _label(below, synthetic, "", (4, 8), "right")
    _label(below, papers_synthetic, "", (0, -16), "center")
    lengths = sorted({length for line in speeds for length in line.by_length})
    below.set_xscale("log", base=2)
    below.set_xticks(lengths, [format_size(length) for length in lengths])
    gpus = sorted(set.union(*(line.gpus for line in speeds)))
    below.set_xlabel(f"sequence length ({', '.join(gpus)}, 8 heads, bfloat16, causal)")
    above.set_ylim(0, 5)
    below.set_yscale("log", base=2)
    below.set_yticks([1 / 8, 1 / 2, 1, 2, 8, 32])
    for axes in (above, below):
        axes.axhline(1, color=GREY, linewidth=1.2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda speed, _: f"{speed:g}x"))
    above.set_ylabel("speed-up, forward + backward")
    above.text(lengths[-1], 1.04, "exact attention (cuDNN)", color=GREY, ha="right", va="bottom", fontsize=9.5)
    above.set_title("Heads of trained models", fontsize=11, loc="left")
    below.set_title("Synthetic data, attention spread evenly", fontsize=11, loc="left", color=GREY)
    figure.tight_layout()
    return save(figure, PICTURE)


def _speeds(method: str, data: str, timings: Sequence[Timing]) -> Speeds:
    found: dict[int, list[float]] = defaultdict(list)
    own = [timing for timing in timings if timing.method == method]
    for timing in own:
        found[timing.length].append(timing.speedup)
    means = {length: fmean(speedups) for length, speedups in sorted(found.items())}
    return Speeds(method, data, means, {timing.gpu for timing in own})


def _label(axes: pyplot.Axes, line: Speeds, data: str, offset: tuple[float, float], side: str) -> None:
    """At the last point."""
    last, speedup = list(line.by_length.items())[-1]
    axes.annotate(
        f"{line.method} {speedup:.3g}x" + (f"\n{data}" if data else ""),
        *((last, speedup), offset), textcoords="offset points", ha=side, color=_COLOURS[line.method], fontsize=9.5,
    )  # fmt: skip


def _range(speedups: Sequence[float]) -> str:
    low, high = (f"{speedup:.3g}" for speedup in (min(speedups), max(speedups)))
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    found = read_speeds()
    print(f"wrote {draw(found)}: {describe(found)}")
