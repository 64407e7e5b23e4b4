"""Small frozen structures that pass between the stages of the method.

Axes: `G` key heads of all sequences, `N` tokens, `Q` query clusters of a key head (those of all the query heads that
share it), `K` key clusters, `nb` blocks, `D` and `Dv` the head dimensions of keys and values. The reference has
(batch, heads) instead of `G`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Side(NamedTuple):
    """Queries or keys, to be clustered."""

    vectors: Tensor
    """(batch, heads, N, D)"""
    factor: float
    """of the vectors, which are multiplied by it"""
    clusters: int
    cap: int | None
    """most vectors of a block that one cluster may hold"""


@dataclass(frozen=True)
class Clusters:
    """A separate clustering of the queries and of the keys of each head. It carries no gradient.

    Centroids of queries live in the space of the *scaled* queries: the softmax scale is folded in first. With a
    tolerance, queries have centroids for each of `S` generations, and keys for each of the `nb` blocks that are seen
    (`core/generations.py`).
    """

    query_centroids: Tensor
    """(batch, query heads, Q, D); with a tolerance (batch, query heads, S, Q, D)"""
    query_assignment: Tensor
    """(batch, query heads, N) int32: the cluster of each query"""
    key_centroids: Tensor
    """(batch, key heads, K, D); with a tolerance (batch, key heads, nb, K, D)"""
    key_assignment: Tensor
    """(batch, key heads, N) int32: the cluster of each key; 0 in a block that no other sees"""
    key_spread: Tensor | None = None
    """With a tolerance (batch, key heads, S, D): variance of the keys inside their clusters in each dimension, scaled
    to a mean of 1, over the past of each generation. None without."""


@dataclass(frozen=True)
class Summaries:
    """Each bucket (block, key cluster) as seen from each query cluster: a log-mass and two tilted means.

    An empty bucket has log-mass -inf and means 0.
    """

    log_mass: Tensor
    """(G, Q, nb, K)"""
    key_mean: Tensor
    """(G, Q, nb, K, D)"""
    value_mean: Tensor
    """(G, Q, nb, K, Dv)"""

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.log_mass, self.key_mean, self.value_mean

    def zeros_like(self) -> Summaries:
        """Zeros of the same shapes, for the gradient."""
        return Summaries(*(torch.zeros_like(part) for part in self.parts()))


@dataclass(frozen=True)
class Selection:
    """The keys that are attended to token by token.

    In the paper's method, the key clusters each query opens and, in each of them, the blocks it retrieves; -1 means
    none, comes last, and only where there are no more to choose from. With a tolerance, the first row of each tile of
    queries that wants a bucket (`core/query_tiles.py`).
    """

    opened: Tensor
    """(batch, query heads, N, opened clusters) int32; with a tolerance (batch, query heads, 0) uint8"""
    retrieved: Tensor
    """(batch, query heads, N, opened clusters, blocks) int32; with a tolerance (batch, query heads, blocks, tiles of a
    block, buckets) uint8"""


@dataclass(frozen=True)
class Partial:
    """Softmax attention over some of a query's terms: their output, and the logsumexp of their logits."""

    out: Tensor
    """(..., Dv)"""
    lse: Tensor
    """(...,); -inf where a query has no such term, and then `out` is 0"""
