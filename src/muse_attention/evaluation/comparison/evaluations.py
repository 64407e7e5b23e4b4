"""What runs were evaluated to on the way, under exact attention, and how much later than exact training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from muse_attention.evaluation.comparison.findings import reference_of
from muse_attention.evaluation.comparison.results import ComparisonResults, Run
from muse_attention.evaluation.comparison.runs import choose_evenly
from muse_attention.plots import Curve
from muse_attention.report.tree import Section, Table, number, text

_ABOUT = (
    "Held-out windows, and needle documents of held-out files, the same each time, under exact attention whatever "
    "the attention of the update; in columns of million tokens. The last column of losses says after how many million "
    "tokens the run that others are compared with had the last loss of the row, between two evaluations by the "
    "logarithm of the loss; it is empty where that run never had it. Learning rates fall over a run: this says what "
    "runs of this length lack, and not what longer ones would."
)
_LOSSES = {"held_out_loss": "Held-out loss", "needles_loss": "Loss of answers to needles"}
_SHARES = {"needles_right": "Needles of which every token is right"}
_COLUMNS = 6


def evaluations_sections(results: ComparisonResults) -> Iterable[Section]:
    """None where no run was evaluated on the way."""
    tables = list(evaluations_tables(results))
    if tables:
        yield Section.of("Evaluated on the way", _ABOUT, *tables)


def evaluations_tables(results: ComparisonResults) -> Iterator[Table]:
    for measure, title in (_LOSSES | _SHARES).items():
        curves = {name: curve for name, run in results.runs.items() if (curve := _curve(run, measure))}
        if not curves:
            continue
        chosen = choose_evenly(sorted({int(tokens) for curve in curves.values() for tokens, _ in curve}), _COLUMNS)
        columns = [text("run"), *(number(f"{tokens / 1e6:,.1f}") for tokens in chosen)]
        form = ".4f" if measure in _LOSSES else ".1%"
        rows = []
        for name, curve in curves.items():
            found = dict(curve)
            row = [name, *(format(found[tokens], form) if tokens in found else "" for tokens in chosen)]
            reference = reference_of(results, results.runs[name])
            if measure in _LOSSES:
                is_other = reference.name != name and reference.name in curves
                row.append(_in_millions(reached(curves[reference.name], curve[-1][1])) if is_other else "")
            rows.append(tuple(row))
        if measure in _LOSSES:
            columns.append(number("the reference was there after"))
        yield Table(columns, rows, title)


def reached(curve: Curve, loss: float) -> float | None:
    """The tokens after which a falling curve first has the loss; None if it begins below it or never gets there."""
    for (before, above), (after, below) in itertools.pairwise(curve):
        if above >= loss >= below > 0:
            if above == below:
                return before
            return before + (after - before) * math.log(above / loss) / math.log(above / below)
    return None


def _curve(run: Run, measure: str) -> Sequence[tuple[float, float]]:
    return [(one.tokens, one.values[measure]) for one in run.curves.evaluations if measure in one.values]


def _in_millions(tokens: float | None) -> str:
    return "" if tokens is None else f"{tokens / 1e6:,.1f}"
