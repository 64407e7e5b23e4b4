"""Training loss against tokens and against seconds, from the records of 64k: `python -m docs_build.seconds_picture`.

The runs that were compared shared their GPU. Seconds are their tokens over the tokens per second of the same training
alone on one.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from matplotlib import pyplot

from docs_build.records import DEFAULT, GPU, classify, read_comparison, read_speeds
from docs_build.style import GREEN, GREY, WIDTH, save
from muse_attention.sizes import format_size
from muse_lab.evaluation.comparison.seeds import Seeds, seeds_of
from muse_lab.records.attention_names import EXACT

PICTURE = "loss-against-seconds.svg"
RECORD, SPEEDS = "far-64k", "far-64k-alone"
_TOGETHER = 2
"""Points of a recorded curve that are one of the picture."""


def draw() -> Path:
    results, path = read_comparison(RECORD)
    length = results.settings.length
    groups = {classify(group.attention, length) or group.attention: group for group in seeds_of(results)}
    if lacking := {EXACT, DEFAULT} - groups.keys():
        raise ValueError(f"{path} has no runs of several seeds with {', '.join(lacking)}")
    speeds = read_speeds(SPEEDS)
    figure, both = pyplot.subplots(2, 1, figsize=(WIDTH, 6.4))
    for name, method, colour in (("exact attention", EXACT, GREY), (DEFAULT, DEFAULT, GREEN)):
        tokens, losses = _mean_curve(groups[method])
        speed = speeds[method]
        label = f"{name}: {speed / 1000:,.0f}k tokens/s"
        both[0].plot([one / 1e6 for one in tokens], losses, marker="o", markersize=4, color=colour, label=label)
        both[1].plot([one / speed for one in tokens], losses, marker="o", markersize=4, color=colour)
    both[0].set_xlabel("tokens (millions)")
    both[1].set_xlabel("seconds on one GPU")
    for axes in both:
        axes.set_ylabel("training loss (nats)")
    both[0].legend(frameon=False, fontsize=10)
    seeds, updates = len(groups[EXACT].runs), _TOGETHER * groups[EXACT].runs[0].curves.averaged
    about = f"23M models at {format_size(length)}, {GPU}:\nmeans of {seeds} seeds and of {updates} updates"
    both[0].set_title(about, fontsize=10, loc="left")
    figure.tight_layout()
    return save(figure, PICTURE)


def _mean_curve(group: Seeds) -> tuple[list[float], list[float]]:
    """Tokens and losses, over seeds and over a few points."""
    points = list(zip(*(run.curves.points for run in group.runs), strict=True))
    parts = [sum(points[end - _TOGETHER : end], ()) for end in range(_TOGETHER, len(points) + 1, _TOGETHER)]
    tokens = [fmean(point.tokens for point in part) for part in parts]
    return tokens, [fmean(point.loss for point in part) for part in parts]


if __name__ == "__main__":
    print(f"wrote {draw()}")
