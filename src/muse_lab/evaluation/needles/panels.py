"""Shares of right answers by depth, length and kind, beside each other: of attentions of one model, or of several."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from muse_attention.sizes import format_size
from muse_lab.evaluation.needles.results import NeedleResults
from muse_lab.evaluation.needles.statistics import (
    Asked,
    Group,
    Measure,
    by_depth,
    failures,
    groups,
    in_order,
    is_exact,
    is_preferred,
    share,
)
from muse_lab.pretraining.needles.samples import BUCKETS, CANDIDATES, depth_of
from muse_lab.records.means import WILSON, Share
from muse_lab.report.plots import Axis, Curve, coloured, heat_map, line_figure
from muse_lab.report.tree import Card, Figure, Table, number

EXACT_MATCH, RIGHT_OF_SOME = "exact match", f"right of {CANDIDATES}"
MEASURES: dict[str, Measure] = {EXACT_MATCH: is_exact, RIGHT_OF_SOME: is_preferred}
DEFINITIONS = {
    EXACT_MATCH: f"Share of questions to which greedy generation gives the uid. {WILSON}",
    RIGHT_OF_SOME: "Share of questions in which the uid is more probable than each of seven others, those of the "
    f"prompt and random ones: chance is 12.5%. {WILSON}",
}
ALL_KINDS = "all kinds"


Columns = Mapping[Any, Asked]
"""By their labels, which are texts where they are shown."""


def groups_of(columns: Columns) -> list[Group]:
    """Every group that some column was asked, in order."""
    return in_order({group for one in columns.values() for group in groups(one.results) if one.answers([group])})


class Panels(NamedTuple):
    """The columns at one length, and what they were asked."""

    length: int
    columns: Columns
    """those that answered something"""
    by_kind: dict[str, list[Group]]
    """first, if several kinds were asked of every column, these together"""

    @property
    def together(self) -> tuple[str, list[Group]]:
        """All kinds, or the only one: the title, and what is in it."""
        kind, asked = next(iter(self.by_kind.items()))
        return title_of(self.length, kind), asked


def panels_of(columns: Columns) -> Iterator[Panels]:
    for length, grouped in itertools.groupby(groups_of(columns), key=lambda group: group[0]):
        at_length = list(grouped)
        answered = {name: asked for name, asked in columns.items() if asked.answers(at_length)}
        shared = _shared(answered, at_length)
        together = {ALL_KINDS: shared} if len(shared) > 1 else {}
        yield Panels(length, answered, together | {kind: [(length, kind)] for _, kind in at_length})


def depth_tables(columns: Columns, measure: str) -> Iterator[Table]:
    """Over all lengths and kinds that every column was asked, if there are several lengths; then by length and kind."""
    panels = list(panels_of(columns))
    shared = _shared(columns, groups_of(columns))
    if len(panels) > 1 and len(shared) > 1:
        yield depth_table(columns, shared, measure, "all lengths and kinds")
    for panel in panels:
        for kind, together in panel.by_kind.items():
            yield depth_table(panel.columns, together, measure, title_of(panel.length, kind))


def _shared(columns: Columns, candidates: list[Group]) -> list[Group]:
    """The groups that every column was asked."""
    return [group for group in candidates if all(asked.answers([group]) for asked in columns.values())]


def depth_table(columns: Columns, together: list[Group], measure: str, title: str = "") -> Table:
    shares = [by_depth(asked.answers(together), MEASURES[measure]) for asked in columns.values()]
    rows = [
        (f"{depth_of(bucket):.2f}", *(with_number(column[bucket]) for column in shares)) for bucket in range(BUCKETS)
    ]
    return Table(map(number, ("depth", *columns)), rows, title)


def depth_figure(place: int, title: str, curves: Mapping[str, Curve]) -> Figure:
    """Exact match against depth, a line for each of the curves; `place` is that of the picture among others."""
    x, y = Axis("depth of the definition"), Axis(EXACT_MATCH, from_zero=True)
    description = f"Exact match against depth: {title}"
    return line_figure(f"depth-{place}", title, coloured(curves.items(), "o"), x, y, description=description)


def heat_maps(columns: Columns, measure: str) -> list[Figure]:
    """Depth against length, all kinds together; against the kind, where there is but one length."""
    lengths = sorted({length for length, _ in groups_of(columns)})
    figures = []
    answered = {name: asked for name, asked in columns.items() if groups_of({name: asked})}
    for place, (name, asked) in enumerate(answered.items(), start=1):
        own_groups = groups_of({name: asked})
        if len(lengths) > 1:
            across = {format_size(length): [group for group in own_groups if group[0] == length] for length in lengths}
        else:
            across = {kind: [(length, kind)] for length, kind in own_groups}
        shares = [by_depth(asked.answers(together), MEASURES[measure]) for together in across.values()]
        title, against = f"{measure.capitalize()}: {name}", "length" if len(lengths) > 1 else "kind"
        values = [[None if one is None else one.value for one in of_depth] for of_depth in zip(*shares, strict=True)]
        depths = [f"{depth_of(bucket):.2f}" for bucket in range(BUCKETS)]
        figures.append(
            heat_map(
                *(f"{measure.replace(' ', '-')}-{place}", title, values, depths, list(across)),
                description=f"{title}, depth against {against}",
                x=against,
                y="depth of the definition",
                label=measure,
                is_share=True,
            )
        )
    return figures


def _found(columns: Columns) -> dict[str, Share]:
    """The share of needles that each column finds, of all it was asked."""
    shares = {name: share(asked.answers(groups_of(columns)), is_exact) for name, asked in columns.items()}
    return {name: found for name, found in shares.items() if found is not None}


def found_in_words(columns: Columns) -> str:
    return "; ".join(f"{name} finds {found}" for name, found in _found(columns).items()) + " of the needles."


def failed_in_words(models: Mapping[str, NeedleResults]) -> Iterator[str]:
    """A line for each model of which samples failed, by its label."""
    for name, results in models.items():
        if failed := failures(results):
            yield f"Failed of {name}: {len(failed)} of {len(results.measured)} samples, which count in no share"


def cards(columns: Columns) -> list[Card]:
    return [
        Card(f"{EXACT_MATCH}, {name}", f"{100 * found.value:.1f}%", f"{_interval(found)}, n = {found.number}")
        for name, found in _found(columns).items()
    ][:6]


def _interval(fraction: Share) -> str:
    return " to ".join(f"{100 * bound:.1f}" for bound in fraction.interval)


def with_number(fraction: Share | None) -> str:
    return "" if fraction is None else f"{fraction} of {fraction.number}"


def title_of(length: int, kind: str) -> str:
    return f"{kind}, {format_size(length)}"
