"""Figures of a report, from what is to be drawn."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from muse_lab.report.plots import Axis, Line, Rule, draw_heat_map, draw_lines
from muse_lab.report.tree import Figure


def line_figure(
    name: str,
    title: str,
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    description: str = "",
    above: float | None = None,
    rules: Sequence[Rule] = (),
) -> Figure:
    """Curves, as `draw_lines` draws them; the description is the title unless there is more to say."""
    draw = functools.partial(draw_lines, lines, x, y, above=above, rules=rules)
    return Figure(name, title, description or title, draw)


def heat_map(
    name: str,
    title: str,
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    description: str,
    x: str,
    y: str,
    label: str,
    is_share: bool = False,
) -> Figure:
    """A colour for every row and column, as `draw_heat_map` draws them."""
    draw = functools.partial(draw_heat_map, values, rows, columns, x=x, y=y, label=label, is_share=is_share)
    return Figure(name, title, description, draw)
