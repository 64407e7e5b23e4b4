"""Pairs of models that began with the same weights and saw the same tokens, one of them trained exactly."""

from __future__ import annotations

from typing import NamedTuple

from docs_build.records import read_comparison
from muse_lab.evaluation.comparison.findings import difference, reference_of, switching
from muse_lab.evaluation.comparison.results import ComparisonResults, Run
from muse_lab.records.attention_names import EXACT

_NEAR = 10
"""The bin of positions 1k to 2k."""


class Pair(NamedTuple):
    """Losses in nats, under exact attention where nothing else is said."""

    attention: str
    length: int
    head_dim: int
    seed: int
    exact: float
    """loss after exact training"""
    trained: float
    """loss after training with the attention"""
    percent: float
    """their difference"""
    median: float
    """over windows, in percent"""
    last_half: float
    """in the last half of a window, in percent"""
    cost: float
    """of the attention, in the model trained with it"""
    exact_far_gain: float
    far_gain: float


def read_pairs(record: str) -> list[Pair]:
    """All of a record of `muse compare`; a ValueError if a run has no exact training with its seed beside it."""
    results, path = read_comparison(record)
    pairs = []
    for run in results.runs.values():
        if run.attention == EXACT:
            continue
        reference = reference_of(results, run)
        gap, cost = difference(results, run), switching(results, run, run.tested_attention)
        begin = [(one.recipe.seed, one.recipe.initial) for one in (run, reference)]
        if gap is None or cost is None or reference.attention != EXACT or begin[0] != begin[1]:
            raise ValueError(f"{path}: {run.name} is no pair with exact training, or was not measured")
        own, other = losses_by_position(results, run, EXACT), losses_by_position(results, reference, EXACT)
        losses = [results.loss(one, EXACT) for one in (reference, run)]
        exact, trained = [loss.mean for loss in losses if loss is not None]
        pairs.append(
            Pair(
                run.attention, results.settings.length, run.recipe.head_dim, run.recipe.seed, exact, trained,
                gap.percent.mean, gap.median, 100 * (own[-1] / other[-1] - 1), cost.mean,
                far_gain(results, reference), far_gain(results, run),
            )
        )  # fmt: skip
    return pairs


def far_gain(results: ComparisonResults, run: Run) -> float:
    """The fall of the loss from positions 1k to 2k to the last half of the window."""
    losses = losses_by_position(results, run, EXACT)
    return losses[_NEAR] - losses[-1]


def losses_by_position(results: ComparisonResults, run: Run, attention: str) -> list[float]:
    """Of the finished model; a ValueError if they were not measured."""
    cell = results.whole(run, attention)
    if cell is None:
        raise ValueError(f"{run.name} was not measured under {attention}")
    return [mean.mean for mean in cell.by_position]
