"""What runs were evaluated to on the way, under exact attention, and how much later than exact training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from muse_lab.evaluation.comparison.findings import reference_of
from muse_lab.evaluation.comparison.results import ComparisonResults, Run
from muse_lab.evaluation.comparison.runs import choose_evenly
from muse_lab.report.plots import Curve
from muse_lab.report.tree import Table, number, text

ABOUT = (
    "Held-out windows, and needle documents of held-out files, the same at every evaluation of a run, under exact "
    "attention whatever the attention of the update; in columns of million tokens. The last column of losses says "
    "after how many million tokens the reference, exact training where there is one, had the last loss of the row, "
    "between two evaluations by the logarithm of the loss; it is empty where it never had, and where it was asked "
    "something else. Learning rates fall over a run: this says what runs of this length lack, and not what longer ones "
    "would."
)
_LOSSES = {"held_out_loss": "Held-out loss", "needles_loss": "Loss of answers to needles"}
_SHARES = {"needles_right": "Needles of which every token is right"}
_COLUMNS = 6


def evaluations_tables(results: ComparisonResults) -> Iterator[Table]:
    for measure, title in (_LOSSES | _SHARES).items():
        curves = {name: curve for name, run in results.runs.items() if (curve := _curve(run, measure))}
        if not curves:
            continue
        is_loss = measure in _LOSSES
        evaluated = sorted({int(tokens) for curve in curves.values() for tokens, _ in curve})
        chosen = sorted({*choose_evenly(evaluated, _COLUMNS), *(int(curve[-1][0]) for curve in curves.values())})
        rows = []
        for name, curve in curves.items():
            found = dict(curve)
            shown = (format(found[tokens], ".4f" if is_loss else ".1%") if tokens in found else "" for tokens in chosen)
            rows.append((name, *shown, *([_reference_was_there(results, name, curves)] if is_loss else [])))
        columns = [text("run"), *(number(f"{tokens / 1e6:,.1f}") for tokens in chosen)]
        yield Table([*columns, *([number("the reference was there after")] if is_loss else [])], rows, title)


def when_reached(curve: Curve, loss: float) -> str:
    """The million tokens after which a curve first has the loss; nothing if it never gets there."""
    begin, first = curve[0]
    if first < loss:
        return f"before {begin / 1e6:,.1f}"
    for (before, above), (after, below) in itertools.pairwise(curve):
        if above >= loss >= below > 0:
            share = math.log(above / loss) / math.log(above / below) if above > below else 0
            return f"{(before + share * (after - before)) / 1e6:,.1f}"
    return ""


def _reference_was_there(results: ComparisonResults, name: str, curves: Mapping[str, Curve]) -> str:
    """Nothing for a reference itself, and where the reference of a run was asked something else, or nothing."""
    run = results.runs[name]
    reference = reference_of(results, run)
    if reference is run or reference.name not in curves or not _were_asked_the_same(run, reference):
        return ""
    return when_reached(curves[reference.name], curves[name][-1][1])


def _curve(run: Run, measure: str) -> Curve:
    return [(one.tokens, one.values[measure]) for one in run.curves.evaluations if measure in one.values]


def _were_asked_the_same(run: Run, other: Run) -> bool:
    """Needle documents depend on the seed, and on the length as windows do."""
    asked = ("seed", "length", "evaluate_samples", "evaluate_needles")
    return all(getattr(run.recipe, name) == getattr(other.recipe, name) for name in asked)
