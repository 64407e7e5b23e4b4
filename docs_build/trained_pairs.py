"""Pairs of models that began with the same weights and saw the same tokens, one of them trained exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from docs_build.records import read_comparison
from muse_lab.evaluation.comparison.findings import difference, reference_of, switching
from muse_lab.evaluation.comparison.results import ComparisonResults, Run
from muse_lab.records.attention_names import EXACT
from muse_lab.records.means import Mean

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
    """nats by which the attention raises the loss of the model trained with it"""
    cost_in_last_half: float
    exact_far_gain: float
    """nats by which the loss falls from positions 1k to 2k to the last half of the window"""
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
        own, other = (_losses_by_position(results, one, EXACT) for one in (run, reference))
        approximate = _losses_by_position(results, run, run.tested_attention)
        exact, trained = [loss.mean for one in (reference, run) if (loss := results.loss(one, EXACT))]
        pairs.append(
            Pair(
                run.attention, results.settings.length, run.recipe.head_dim, run.recipe.seed, exact, trained,
                gap.percent.mean, gap.median, 100 * (own[-1] / other[-1] - 1), cost.mean, approximate[-1] - own[-1],
                other[_NEAR] - other[-1], own[_NEAR] - own[-1],
            )
        )  # fmt: skip
    return pairs


def read_group(*records: str) -> list[Pair]:
    """Pairs that differ by their seed alone; a ValueError if others are among them, or a seed comes twice."""
    pairs = [pair for record in records for pair in read_pairs(record)]
    if len({pair[:3] for pair in pairs}) != 1 or len({pair.seed for pair in pairs}) != len(pairs):
        raise ValueError(f"{', '.join(records)}: not one attention, length and head dimension, each seed once")
    return pairs


def median_gap(pairs: Sequence[Pair]) -> Mean:
    """Loss less that of exact training in the median window, in percent, the mean over seeds."""
    return Mean.of([pair.median for pair in pairs])


def _losses_by_position(results: ComparisonResults, run: Run, attention: str) -> list[float]:
    """Of the finished model; a ValueError if they were not measured."""
    cell = results.whole(run, attention)
    if cell is None:
        raise ValueError(f"{run.name} was not measured under {attention}")
    return [mean.mean for mean in cell.by_position]
