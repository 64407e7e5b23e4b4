"""Made-up results of `muse compare`."""

from __future__ import annotations

from typing import Any

from muse_attention.registry import full_name
from muse_lab.evaluation.comparison.results import Cell, ComparisonResults, ComparisonSettings, Run
from muse_lab.evaluation.comparison.training_curves import TrainingCurves
from muse_lab.pretraining.recipes import override, tiny
from muse_lab.records.machine import describe_machine

MUSE = full_name("muse:QK8R2B128", 64)


def trained(**metrics: list[dict[str, Any]]) -> ComparisonResults:
    """Runs by their names, each with the lines of its metrics: `exact` with exact attention, others with MuSe."""
    settings = ComparisonSettings("made up", "", 2, 1, 9, "cpu", "float32")
    results = ComparisonResults(describe_machine(), settings)
    for name, lines in metrics.items():
        attention = "exact" if name == "exact" else MUSE
        recipe = override(tiny(), [f"attention={attention}", "length=64"])
        results.runs[name] = Run(name, recipe, 10, recipe.steps, TrainingCurves.of(lines), "cuda")
        results.cells.append(Cell(name, recipe.steps, "", "exact", [1, 1], [[2.0, 2.0]]))
    return results
