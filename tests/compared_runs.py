"""Made-up results of `muse compare`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from muse_attention.registry import full_name
from muse_lab.evaluation.comparison.results import Cell, ComparisonResults, ComparisonSettings, Run
from muse_lab.evaluation.comparison.training_curves import TrainingCurves
from muse_lab.pretraining.recipes import override, tiny
from muse_lab.records.machine import describe_machine
from tests.training_runs import metrics_line

MUSE = full_name("muse:QK8R2B128", 64)
SETTINGS = ComparisonSettings("made up", "", 2, 2, 9, "cpu", "float32")


def made_up(**runs: tuple[str, int, float, Sequence[float]]) -> ComparisonResults:
    """Of each run: its attention, size, speed, and the losses of two samples under exact attention."""
    results = ComparisonResults(describe_machine(), SETTINGS)
    for name, (attention, parameters, speed, losses) in runs.items():
        metrics = [metrics_line(index, 5.0, speed, attention) for index in range(1, 9)]
        add_run(results, name, attention, losses, metrics, parameters=parameters)
    return results


def trained(**metrics: list[dict[str, Any]]) -> ComparisonResults:
    """Runs by their names, each with the lines of its metrics: `exact` with exact attention, others with MuSe."""
    results = ComparisonResults(describe_machine(), SETTINGS)
    for name, lines in metrics.items():
        add_run(results, name, "exact" if name == "exact" else MUSE, [2.0, 2.0], lines)
    return results


def add_run(
    results: ComparisonResults,
    name: str,
    attention: str,
    losses: Sequence[float],
    metrics: list[dict[str, Any]],
    *changes: str,
    parameters: int = 10,
) -> None:
    recipe = override(tiny(), [f"attention={attention}", "length=64", "batch=2", *changes])
    results.runs[name] = Run(name, recipe, parameters, recipe.steps, TrainingCurves.of(metrics), "cuda")
    add_losses(results, name, "exact", losses)


def add_losses(results: ComparisonResults, name: str, attention: str, losses: Sequence[float]) -> None:
    """Of the newest weights: of each sample the mean of its two positions, the first of which has half a nat less."""
    bins = [[loss - 0.5, loss + 0.5] for loss in losses]
    results.cells.append(Cell(name, results.runs[name].step, "", attention, [1, 1], bins))


def change(results: ComparisonResults, name: str, *changes: str) -> None:
    """The recipe of a run."""
    run = results.runs[name]
    results.runs[name] = dataclasses.replace(run, recipe=override(run.recipe, list(changes)))
