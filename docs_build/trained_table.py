"""The tables of docs/evidence/pretraining.md: `python -m docs_build.trained_table`.

One row for each attention and length, means over seeds, and one for each pair of models behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from docs_build.marked_tables import with_table
from docs_build.records import DEFAULT, RECORDS, classify
from docs_build.trained_pairs import Pair, read_pairs
from muse_attention.sizes import format_size
from muse_lab.records.attention_names import short_names
from muse_lab.records.means import Mean

PAGE = RECORDS.parent / "docs" / "evidence" / "pretraining.md"
BEGIN = "<!-- table: python -m docs_build.trained_table -->"
BEGIN_PAIRS = "<!-- pairs: python -m docs_build.trained_table -->"
SEARCHING_SIZES = "Q8K32T0.1B2k,search=0.05"
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


def read_groups() -> list[list[Pair]]:
    """A ValueError if the pairs of a group do not belong together, or a seed comes twice."""
    groups = []
    for records in GROUPS:
        pairs = [pair for record in records for pair in read_pairs(record)]
        if len({pair[:3] for pair in pairs}) != 1 or len({pair.seed for pair in pairs}) != len(pairs):
            raise ValueError(f"{', '.join(records)}: not one attention, length and head dimension, each seed once")
        groups.append(pairs)
    return groups


def find_group(attention: str, length: int, head_dim: int) -> list[Pair]:
    """By DEFAULT, or by the sizes of a configuration."""
    for pairs in read_groups():
        if (_called(pairs[0]), *pairs[0][1:3]) == (attention, length, head_dim):
            return pairs
    raise ValueError(f"no record has {attention} at {length} with heads of {head_dim}")


def median_of(pairs: Sequence[Pair]) -> Mean:
    """The mean over seeds of the median over windows, in percent."""
    return Mean.of([pair.median for pair in pairs])


def make_page(page: str) -> str:
    """The page with its tables."""
    groups = read_groups()
    return with_table(with_table(page, _summary(groups), BEGIN), _pairs(groups), BEGIN_PAIRS)


def _summary(groups: Sequence[Sequence[Pair]]) -> str:
    lines = [
        "| length, heads | trained with | seeds | median window | mean | cost of MuSe | far gain kept |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for pairs in groups:
        kept = fmean(pair.far_gain for pair in pairs) / fmean(pair.exact_far_gain for pair in pairs)
        lines.append(
            f"| {_kind(pairs[0])} | {_shown(pairs[0])} | {len(pairs)} | **{_percent(median_of(pairs))}** | "
            f"{_percent(Mean.of([pair.percent for pair in pairs]))} | {fmean(pair.cost for pair in pairs):+.4f} | "
            f"{kept:.1%} |"
        )
    return "\n".join(lines)


def _pairs(groups: Sequence[Sequence[Pair]]) -> str:
    lines = [
        "| length, heads | trained with | seed | exact training | MuSe training | mean | median window | last half | "
        "cost of MuSe | far gain, exact | far gain, MuSe |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {_kind(pair)} | {_shown(pair)} | {pair.seed} | {pair.exact:.4f} | {pair.trained:.4f} | "
        f"{pair.percent:+.2f}% | {pair.median:+.2f}% | {pair.last_half:+.2f}% | {pair.cost:+.4f} | "
        f"{pair.exact_far_gain:.3f} | {pair.far_gain:.3f} |"
        for pairs in groups
        for pair in pairs
    ]
    return "\n".join(lines)


def _kind(pair: Pair) -> str:
    return f"{format_size(pair.length)}, {pair.head_dim}"


def _called(pair: Pair) -> str:
    if classify(pair.attention, pair.length) == DEFAULT:
        return DEFAULT
    (name,) = short_names([pair.attention]).values()
    return name


def _shown(pair: Pair) -> str:
    name = _called(pair)
    return "the default" if name == DEFAULT else f"`{name}`"


def _percent(gap: Mean) -> str:
    return f"{gap.shown('+.2f')}%"


if __name__ == "__main__":
    PAGE.write_text(make_page(PAGE.read_text()))
    print(f"wrote the tables of {PAGE.name}")
