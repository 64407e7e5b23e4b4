"""What the records of needles in benchmarks/ say, read from the tables of their reports."""

from __future__ import annotations

import itertools
from pathlib import Path

from muse_lab.records.means import Mean

_OF_ONE_TRAINING = "seed-"
"""Begins the titles of columns, one for each training."""


def read_mean_over_trainings(path: Path, model: str, length: str) -> tuple[Mean, int]:
    """Percentage points of a model less exact training, in a report over trainings; and how many have the model."""
    row = _row(path, f"## Less exact, all kinds, {length}", "model", model)
    trainings = [cell for title, cell in row.items() if title.startswith(_OF_ONE_TRAINING) and cell]
    try:
        mean, standard_error = (float(part) for part in row["mean"].split(" ± "))
    except (KeyError, ValueError):
        raise ValueError(f"{path}: {model} has no mean over trainings with a standard error") from None
    return Mean(mean, standard_error), len(trainings)


def read_difference(path: Path, model: str, length: str) -> float:
    """The same of one training, where the prompt is read with exact attention."""
    row = _row(path, "### the prompt read by exact", "kind, length", f"all kinds, {length}")
    if model not in row:
        raise ValueError(f"{path}: there is no model called {model}")
    own, exact = (float(row[name].partition("%")[0]) for name in (model, "exact"))
    return own - exact


def _row(path: Path, heading: str, title: str, wanted: str) -> dict[str, str]:
    """By titles, of the first table behind a heading of a report."""
    lines = itertools.dropwhile(lambda line: line != heading, path.read_text().splitlines())
    table = itertools.takewhile(_is_row, itertools.dropwhile(lambda line: not _is_row(line), lines))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    rows = [dict(zip(cells[0], row, strict=True)) for row in cells]
    found = [row for row in rows if row.get(title) == wanted]
    if len(found) != 1:
        raise ValueError(f"{path}: below {heading!r} there is not one row with {wanted!r}")
    return found[0]


def _is_row(line: str) -> bool:
    return line.startswith("|")
