"""Stages 2 and 3: summarise every bucket for every query cluster, and accumulate over the blocks a query sees.

Means of keys are stored less the `key_offset` of their head, wherever a structure or an argument holds them.
"""

from __future__ import annotations

from torch import Tensor

from muse_attention.backends.triton.accumulation import accumulate, accumulate_backward
from muse_attention.backends.triton.bucket_summaries import ROWS_OF_TILE, summarise_backward, summarise_buckets
from muse_attention.backends.triton.grouping import Groups
from muse_attention.backends.triton.scored_summaries import Accumulated, PairGradients, ScoredSummaries, new_gradient

__all__ = [
    "ROWS_OF_TILE",
    "Accumulated",
    "PairGradients",
    "ScoredSummaries",
    "accumulate_backward",
    "new_gradient",
    "summarise",
    "summarise_backward",
]


def summarise(
    keys: Tensor,
    values: Tensor,
    centroids: Tensor,
    buckets: Groups,
    blocks: int,
    key_clusters: int,
    key_offset: Tensor,
    squares: Tensor | None,
    *,
    is_causal: bool,
) -> tuple[ScoredSummaries, Accumulated]:
    """Summaries of (G, N, D) keys and (G, N, Dv) values, in the order of `buckets`, from (H, Q, D) query centroids.

    Means of keys are less the (G, D) `key_offset`. With `squares`, (G, N), the `square_distances` of the keys, also how
    far these are apart.
    """
    shape = (*centroids.shape[:2], blocks, key_clusters)
    of_buckets, seen = (
        ScoredSummaries.new(shape, keys, values.shape[-1], has_spread=squares is not None) for _ in range(2)
    )
    summarise_buckets(
        keys, values, centroids, buckets, key_offset, squares, is_causal=is_causal, fill_in=of_buckets, seen=seen
    )
    accumulated = accumulate(of_buckets, seen, has_spread=squares is not None, is_causal=is_causal)
    return of_buckets, accumulated
