"""Runs that were continued after their schedule had ended: loss against further tokens, as in the paper's Table 33."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from muse_lab.evaluation.comparison.findings import reference_of
from muse_lab.evaluation.comparison.results import Cell, ComparisonResults, Run
from muse_lab.evaluation.means import Mean
from muse_lab.pretraining.recipes import FREE, Recipe
from muse_lab.pretraining.schedule import EXACT
from muse_lab.records.attention_names import short_names
from muse_lab.report.tree import Section, Table, number, text

_ABOUT = (
    "A finished run is trained further, with its optimiser's state and its place in the data, at the learning rate "
    "that its schedule ended with. 0 further tokens is the run as it was finished."
)
_PAPER = Table(
    (number("million tokens"), number("% of pretraining"), number("loss, tested: exact"), text("note")),
    (
        ("0", "0%", "0.7108", "before fine-tuning"),
        ("26", "0.1%", "0.6994", "beats the baseline, 0.7026"),
        ("210", "0.9%", "0.6985", ""),
    ),
    "The paper's Table 33 (1B model on code, trained with MuSe, then with exact attention at a rate that is not given)",
)


class Point(NamedTuple):
    """Weights of a run that is continued, or of the run that it continues."""

    run: Run
    step: int
    attention: str
    """of the further updates"""

    @property
    def further_tokens(self) -> int:
        return (self.step - self.run.recipe.steps) * self.run.recipe.tokens_per_step

    @property
    def percent(self) -> float:
        """Of the tokens of the schedule."""
        return 100 * (self.step - self.run.recipe.steps) / self.run.recipe.steps


def further_points(results: ComparisonResults) -> list[Point]:
    """All weights that were measured of continued runs and of those they continue, each by further tokens."""
    continued = [run for run in results.runs.values() if run.recipe.further_steps]
    points: dict[tuple[Recipe, str, int], Point] = {}
    for run in continued:
        attention = run.recipe.attention_at(run.recipe.steps)
        begun = _as_it_was_finished(run.recipe)
        alike = [other for other in results.runs.values() if _as_it_was_finished(other.recipe) == begun]
        finished = [other for other in alike if not other.recipe.further_steps]
        for other in (*finished, run):  # the finished run itself before a copy of its last checkpoint
            for step in results.steps(other):
                if step >= other.recipe.steps:
                    points.setdefault((begun, attention, step), Point(other, step, attention))
    families = list(dict.fromkeys((recipe, attention) for recipe, attention, _ in points))
    return [points[key] for key in sorted(points, key=lambda key: (families.index((key[0], key[1])), key[2]))]


def further_table(results: ComparisonResults) -> Table:
    points = further_points(results)
    own = {point.run.attention for point in points} - {EXACT}
    names = short_names([*own, *(point.attention for point in points), EXACT])
    columns = [text("run"), number("further tokens"), number("% of pretraining"), text("further attention")]
    columns += [number("loss, tested: exact"), number("tested: as trained before"), number("less exact training")]
    rows = []
    for point in points:
        cells = [results.whole(point.run, name, point.step) for name in (EXACT, point.run.tested_attention)]
        rows.append(
            (
                point.run.name,
                f"{point.further_tokens:,}",
                f"{point.percent:.2g}%",
                names[point.attention],
                *("" if cell is None else str(Mean.of(cell.means)) for cell in cells),
                _less_reference(results, point, cells[0]),
            )
        )
    return Table(columns, rows)


def further_sections(results: ComparisonResults) -> Iterable[Section]:
    """None where no run was continued."""
    table = further_table(results)
    return [Section("Further training", [_ABOUT], tables=[table, _PAPER])] if table.rows else []


def _as_it_was_finished(recipe: Recipe) -> Recipe:
    """The recipe of the run that was continued, but for what does not change what is learnt."""
    changes = {name: getattr(Recipe, name) for name in FREE}
    return dataclasses.replace(recipe, further_steps=0, further_attention="", **changes)


def _less_reference(results: ComparisonResults, point: Point, cell: Cell | None) -> str:
    """Of the run of the same size that was trained with exact attention, under exact attention."""
    reference = reference_of(results, point.run)
    other = results.whole(reference, EXACT)
    if cell is None or other is None or reference.attention != EXACT or reference is point.run:
        return ""
    return Mean.of_differences(cell.means, other.means).signed()
