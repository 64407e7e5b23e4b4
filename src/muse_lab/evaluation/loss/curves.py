"""Curves of losses against the context, the loss that no context removes, and gaps to exact attention."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from muse_lab.evaluation.fits import Decay
from muse_lab.evaluation.loss.positions import LossResults
from muse_lab.records.attention_names import recorded_config
from muse_lab.records.means import Mean

SHORTEST = 64
"""Smallest number of tokens to which a curve can be fitted."""
_FIRST_POSITION = 32
"""The first position of a curve: earlier ones depend on how a text begins."""
_POINTS = 200
"""Largest number of points of a curve, evenly spaced on a log axis."""


class Bin(NamedTuple):
    """The mean loss between two positions, both included."""

    first: int
    last: int
    loss: float


def cumulative_mean(results: LossResults, attention: str) -> Tensor:
    """(length - 1): the mean loss of all positions up to each; position n, at index n - 1, has seen n tokens."""
    by_position = results.losses[attention].by_position
    return by_position.cumsum(0) / torch.arange(1, len(by_position) + 1)


def gap(results: LossResults, attention: str) -> Mean:
    """Mean loss of whole samples less that of exact attention, in nats."""
    return Mean.of_differences(results.losses[attention].means, results.losses["exact"].means)


def binned(results: LossResults, attention: str) -> list[Bin]:
    """The loss itself, not its cumulative mean, between powers of two of the position."""
    return bins_of(results.losses[attention].by_position)


def bins_of(by_position: Tensor) -> list[Bin]:
    """`binned`, for any losses by position. If the last position is a power of two, it is in the bin before."""
    firsts = [2**power for power in range(max(1, (len(by_position) - 1).bit_length()))]
    lasts = [*(first - 1 for first in firsts[1:]), len(by_position)]
    return [
        Bin(first, last, float(by_position[first - 1 : last].mean())) for first, last in zip(firsts, lasts, strict=True)
    ]


def fit_exact(results: LossResults) -> Decay:
    """A fit to exact attention's cumulative mean from position 32 on. Its irreducible loss is used for all curves."""
    curve = cumulative_mean(results, "exact")
    return Decay.fit([(position, float(curve[position - 1])) for position in _spaced(len(curve))])


def reducible_curve(results: LossResults, attention: str, irreducible: float) -> list[tuple[float, float]]:
    """(position, cumulative mean less the irreducible loss), from position 32 on."""
    curve = cumulative_mean(results, attention)
    return [(position, float(curve[position - 1]) - irreducible) for position in _spaced(len(curve))]


def ratios_per_doubling(results: LossResults) -> list[float | None]:
    """Factors by which the gap shrinks from an attention to the one with twice its query, key and retrieved clusters.

    One ratio for every such pair, by clusters; None unless both gaps are positive.
    """
    configs = {config: name for name in results.whole if (config := recorded_config(name)) is not None}
    ratios = []
    for config in sorted(configs, key=lambda config: config.key_clusters):
        changes = {"query_clusters": 2 * config.query_clusters, "key_clusters": 2 * config.key_clusters}
        if config.tolerance is None:
            changes["retrieved_clusters"] = 2 * config.retrieved_clusters
        doubled = configs.get(config.replace(**changes))
        if doubled is not None:
            before, after = gap(results, configs[config]).mean, gap(results, doubled).mean
            ratios.append(before / after if min(before, after) > 0 else None)
    return ratios


def _spaced(last: int) -> list[int]:
    positions = np.geomspace(_FIRST_POSITION, last, _POINTS).round().astype(int)
    return [int(position) for position in np.unique(positions)]
