"""README's picture, from the records: `python -m docs_build.speed_picture`. A newer record redraws it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from matplotlib import pyplot

from docs_build.records import DEFAULT, MOBA, PAPER, SYNTHETIC, Timing, read_timings
from docs_build.style import BLUE, GREEN, GREY, ORANGE, save
from muse_attention.sizes import format_size

PICTURE = "speed-up.svg"
_COLOURS = {DEFAULT: GREEN, PAPER: BLUE, MOBA: ORANGE}


def draw(timings: list[Timing]) -> Path:
    """Speed-up of forward and backward against length, exact attention being 1."""
    lines: dict[tuple[str, str], list[Timing]] = defaultdict(list)
    for timing in timings:
        # the default wherever it was measured; what it is compared with on the data that all lengths have
        if timing.method == DEFAULT or (timing.method in (PAPER, MOBA) and timing.data == SYNTHETIC):
            lines[timing.method, timing.data].append(timing)
    figure, axes = pyplot.subplots(figsize=(7.2, 4.4))
    axes.axhline(1, color=GREY, linewidth=1.2)
    lengths = sorted({timing.length for line in lines.values() for timing in line})
    axes.text(lengths[-1], 1.04, "exact attention (cuDNN)", color=GREY, ha="right", va="bottom", fontsize=10)
    for (method, data), line in sorted(lines.items(), key=lambda item: -item[1][-1].speedup):
        axes.plot(
            [timing.length for timing in line],
            [timing.speedup for timing in line],
            marker="o",
            markersize=5,
            linewidth=2,
            linestyle="solid" if data == SYNTHETIC else "dashed",
            color=_COLOURS[method],
            label=f"{method} ({data})",
        )
        last = line[-1]
        is_lower = any(other[-1].length == last.length and other[-1].speedup > last.speedup for other in lines.values())
        axes.annotate(
            f"{last.speedup:.1f}x",
            (last.length, last.speedup),
            xytext=(-8, -2) if is_lower else (0, 8),
            textcoords="offset points",
            ha="right" if is_lower else "center",
            color=_COLOURS[method],
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [format_size(length) for length in lengths])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("sequence length")
    axes.set_ylabel("speed-up, forward + backward")
    axes.legend(frameon=False, fontsize=10, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    gpus = sorted({timing.gpu for line in lines.values() for timing in line})
    axes.set_title(f"{', '.join(gpus)}, 8 heads of 64, bfloat16, causal", fontsize=10, loc="left")
    return save(figure, PICTURE)


if __name__ == "__main__":
    print(f"wrote {draw(read_timings())}")
