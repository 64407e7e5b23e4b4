"""What the records of needles in benchmarks/ say, read from the tables of their reports."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from muse_attention.evaluation.means import Mean


def read_needles_over_trainings(path: Path, model: str) -> list[float]:
    """Percentage points that a model finds less than exact training, of each training in which it is."""
    return [_numbers(cell)[0] for title, cell in _less_exact(path, model).items() if title.startswith("seed-") and cell]


def read_mean_over_trainings(path: Path, model: str) -> Mean:
    """Of these."""
    mean, standard_error = _numbers(_less_exact(path, model)["mean"])
    return Mean(mean, standard_error)


def read_needles_compared(path: Path, model: str) -> float:
    """The same of one training, where the prompt is read with exact attention."""
    row = next(iter(_table_below(path, "### the prompt read by exact")))
    own, exact = (float(row[name].partition("%")[0]) for name in (model, "exact"))
    return own - exact


def _less_exact(path: Path, model: str) -> dict[str, str]:
    return next(row for row in _table_below(path, "## Less exact, all kinds") if row["model"] == model)


def _table_below(path: Path, heading: str) -> Iterator[dict[str, str]]:
    """The rows of the first table behind a heading of a report, by their titles; a ValueError if there is none."""
    lines = iter(path.read_text().splitlines())
    if not any(line.startswith(heading) for line in lines):
        raise ValueError(f"{path} has no {heading!r}")
    table = itertools.takewhile(_is_row, itertools.dropwhile(lambda line: not _is_row(line), lines))
    titles, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    return (dict(zip(titles, row, strict=True)) for row in rows)


def _is_row(line: str) -> bool:
    return line.startswith("|")


def _numbers(cell: str) -> list[float]:
    """The value of a cell, and its standard error."""
    return [float(part) for part in cell.split(" ± ")]
