"""The tables of docs/evidence/pretraining.md: `python -m docs_build.trained_table`.

One row for each attention and length, means over seeds, and one for each pair of models behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from docs_build.marked_tables import with_table
from docs_build.records import DEFAULT, RECORDS, classify
from docs_build.trained_pairs import Pair, median_gap, read_group
from muse_attention.sizes import format_size
from muse_lab.records.attention_names import short_names
from muse_lab.records.means import Mean

PAGE = RECORDS.parent / "docs" / "evidence" / "pretraining.md"
BEGIN = "<!-- table: python -m docs_build.trained_table -->"
BEGIN_PAIRS = "<!-- pairs: python -m docs_build.trained_table -->"
GROUPS = (
    ("far-64k",),
    ("far-64k-search", "far-64k-search-33"),
    ("far-64k-caution",),
    ("far-32k",),
    ("far-32k-search",),
    ("far-32k-heads-of-128",),
    ("far-32k-heads-of-128-search", "far-32k-heads-of-128-search-33"),
    ("far-32k-heads-of-128-caution",),
)
"""Records of pairs that differ by their seed alone."""
_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t, two-sided 95%, by number of seeds."""


def make_page(page: str) -> str:
    """The page with its tables."""
    groups = [read_group(*records) for records in GROUPS]
    return with_table(with_table(page, _summary(groups), BEGIN), _pairs(groups), BEGIN_PAIRS)


def _summary(groups: Sequence[Sequence[Pair]]) -> str:
    lines = [
        "| length, heads | trained with | seeds | median window | 95% interval | mean | cost of MuSe | far gain kept |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for pairs in groups:
        median, mean = median_gap(pairs), Mean.of([pair.percent for pair in pairs])
        kept = fmean(pair.far_gain for pair in pairs) / fmean(pair.exact_far_gain for pair in pairs)
        cells = [
            _kind(pairs[0]),
            _shown(pairs[0]),
            str(len(pairs)),
            f"**{_percent(median)}**",
            _interval(median, len(pairs)),
            _percent(mean),
            f"{fmean(pair.cost for pair in pairs):+.4f}",
            f"{kept:.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _pairs(groups: Sequence[Sequence[Pair]]) -> str:
    lines = [
        "| length, heads | trained with | seed | exact training | MuSe training | mean | median window | last half | "
        "cost of MuSe | far gain, exact | far gain, MuSe | kept |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {_kind(pair)} | {_shown(pair)} | {pair.seed} | {pair.exact:.4f} | {pair.trained:.4f} | "
        f"{pair.percent:+.2f}% | {pair.median:+.2f}% | {pair.last_half:+.2f}% | {pair.cost:+.4f} | "
        f"{pair.exact_far_gain:.3f} | {pair.far_gain:.3f} | {pair.far_gain / pair.exact_far_gain:.1%} |"
        for pairs in groups
        for pair in pairs
    ]
    return "\n".join(lines)


def _kind(pair: Pair) -> str:
    return f"{format_size(pair.length)}, {pair.head_dim}"


def _shown(pair: Pair) -> str:
    if classify(pair.attention, pair.length) == DEFAULT:
        return "the default"
    (name,) = short_names([pair.attention]).values()
    return f"`{name}`"


def _interval(mean: Mean, number: int) -> str:
    """That holds the mean over all seeds with 95% confidence, if they are normally distributed."""
    assert mean.standard_error is not None
    half = _T[number] * mean.standard_error
    return f"{mean.mean - half:+.2f} to {mean.mean + half:+.2f}%"


def _percent(gap: Mean) -> str:
    return f"{gap.shown('+.2f')}%"


if __name__ == "__main__":
    PAGE.write_text(make_page(PAGE.read_text()))
    print(f"wrote the tables of {PAGE.name}")
