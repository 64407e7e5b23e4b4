"""Measures of fidelity as columns of a table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from muse_lab.report import fidelity_columns
from muse_lab.report.tree import Column, number

Item = TypeVar("Item")


def measure_columns(
    measures: Collection[fidelity_columns.Column],
    items: Collection[Item],
    pooled: Callable[[Item], Mapping[str, float]],
) -> list[tuple[Column, Callable[[Item], str]]]:
    """For `Table.of`: those measures that are known of any item, by what is `pooled` for it."""
    known = fidelity_columns.known(tuple(measures), map(pooled, items))
    return [(number(measure.title, measure.definition), _cell(measure, pooled)) for measure in known]


def _cell(measure: fidelity_columns.Column, pooled: Callable[[Item], Mapping[str, float]]) -> Callable[[Item], str]:
    return lambda item: measure.cell(pooled(item))
