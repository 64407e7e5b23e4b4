"""Evaluations of runs during training, under exact attention."""

from __future__ import annotations

from collections.abc import Iterator

from muse_lab.evaluation.comparison.results import ComparisonResults, Run
from muse_lab.evaluation.comparison.runs import choose_evenly
from muse_lab.report.plots import Curve
from muse_lab.report.tree import Table, number, shown, text

ABOUT = (
    "Held-out windows, and needle documents of held-out files, the same at every evaluation of a run, under exact "
    "attention whatever the attention of the update; columns are millions of tokens. Learning rates fall over a run, "
    "so this does not tell what longer runs would reach."
)
_MEASURES = {
    "held_out_loss": ("Held-out loss", ".4f"),
    "needles_loss": ("Loss of answers to needles", ".4f"),
    "needles_right": ("Needles of which every token is right", ".1%"),
}
"""Titles and formats, by the names in `metrics.jsonl`."""
_COLUMNS = 6


def evaluations_tables(results: ComparisonResults) -> Iterator[Table]:
    for measure, (title, form) in _MEASURES.items():
        curves = {name: curve for name, run in results.runs.items() if (curve := _curve(run, measure))}
        if not curves:
            continue
        evaluated = sorted({int(tokens) for curve in curves.values() for tokens, _ in curve})
        chosen = sorted({*choose_evenly(evaluated, _COLUMNS), *(int(curve[-1][0]) for curve in curves.values())})
        rows = []
        for name, curve in curves.items():
            values = dict(curve)
            rows.append((name, *(shown(values.get(tokens), form) for tokens in chosen)))
        yield Table([text("run"), *(number(f"{tokens / 1e6:,.1f}") for tokens in chosen)], rows, title)


def _curve(run: Run, measure: str) -> Curve:
    return [(point.tokens, point.values[measure]) for point in run.curves.evaluations if measure in point.values]
