"""Runs that were continued after their schedule had ended: loss against further tokens, as in the paper's Table 33."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from muse_lab.evaluation.comparison.findings import difference
from muse_lab.evaluation.comparison.results import ComparisonResults, Run
from muse_lab.pretraining.recipes import FREE, Recipe
from muse_lab.records.attention_names import EXACT, short_names
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
    def further_updates(self) -> int:
        return self.step - self.run.recipe.steps


def further_points(results: ComparisonResults) -> list[Point]:
    """All measured weights of continued runs and of those they continue, by further updates."""
    families: dict[tuple[Recipe, str], dict[int, Point]] = {}
    for run in results.runs.values():
        if run.recipe.further_steps:
            attention = run.recipe.attention_at(run.recipe.steps)
            begun = _finished_recipe(run.recipe)
            points = families.setdefault((begun, attention), {})
            alike = [other for other in results.runs.values() if _finished_recipe(other.recipe) == begun]
            finished = [other for other in alike if not other.recipe.further_steps]
            for other in (*finished, run):  # the finished run itself before a copy of its last checkpoint
                for step in results.steps(other):
                    if step >= other.recipe.steps:
                        points.setdefault(step, Point(other, step, attention))
    return [points[step] for points in families.values() for step in sorted(points)]


def further_table(results: ComparisonResults) -> Table:
    points = further_points(results)
    own = {point.run.attention for point in points} - {EXACT}
    names = short_names([*own, *(point.attention for point in points), EXACT])

    return Table.of(
        points,
        (text("run"), lambda point: point.run.name),
        (number("further tokens"), lambda point: f"{point.further_updates * point.run.recipe.tokens_per_step:,}"),
        (number("% of pretraining"), lambda point: f"{100 * point.further_updates / point.run.recipe.steps:.2g}%"),
        (text("further attention"), lambda point: names[point.attention]),
        (number("loss, tested: exact"), lambda point: results.loss(point.run, EXACT, point.step)),
        (
            number("tested: as trained before"),
            lambda point: results.loss(point.run, point.run.tested_attention, point.step),
        ),
        (number("less exact training"), lambda point: _less_exact_training(results, point)),
    )


def further_sections(results: ComparisonResults) -> Iterator[Section]:
    """No section if no run was continued."""
    table = further_table(results)
    if table.rows:
        yield Section("Further training", _ABOUT, table, _PAPER)


def _finished_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the run that was continued, without fields that do not change what is learnt."""
    changes = {name: getattr(Recipe, name) for name in FREE}
    return dataclasses.replace(recipe, further_steps=0, further_attention="", **changes)


def _less_exact_training(results: ComparisonResults, point: Point) -> str | None:
    gap = difference(results, point.run, point.step)
    return gap.nats.signed() if gap and results.runs[gap.reference].attention == EXACT else None
