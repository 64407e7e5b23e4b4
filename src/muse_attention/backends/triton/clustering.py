"""Stage 1: centroids over the whole sequence by Lloyd's k-means on a sample, then capped assignment inside each block.

`streaming` and `balancing` have the paper's k-means and the caps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muse_attention.backends.triton.balancing import keep_under_cap
from muse_attention.backends.triton.lloyd import assign_to_nearest, lloyd_iteration, take_starts
from muse_attention.backends.triton.nearest import Sequences
from muse_attention.backends.triton.numbers import cdiv
from muse_attention.backends.triton.runtime.remembering import once
from muse_attention.backends.triton.streaming import stream
from muse_attention.config import MuSeConfig
from muse_attention.core.shuffle import seeded_shuffle
from muse_attention.core.structures import Side

_PARTS = 16
"""Programs that share a sequence in a Lloyd iteration."""

SUM_MEMBERS = {"num_warps": 4}


def find_clusters(order: Tensor, *tensors_and_settings: Any) -> tuple[Tensor, ...]:
    """Centroids (batch, heads, clusters, D) and assignment (batch, heads, N) of each side, from their `start_positions`
    and vectors; `order` is from `shuffled_positions`."""
    *tensors, side_settings, config = tensors_and_settings
    starts, vectors = tensors[: len(side_settings)], tensors[len(side_settings) :]
    sides = [Side(tensor.flatten(0, 1), *settings) for tensor, settings in zip(vectors, side_settings, strict=True)]
    if len({side.clusters for side in sides}) == 1:
        # Clustering is a chain of small steps: queries and keys take them together.
        tables = cluster(sides, starts, order, config)
    else:
        tables = [table for number in (0, 1) for table in cluster([sides[number]], [starts[number]], order, config)]
    batch = vectors[0].shape[0]
    return tuple(table.unflatten(0, (batch, -1)) for table in tables)


def cluster(sides: list[Side], starts: list[Tensor], order: Tensor, config: MuSeConfig) -> list[Tensor]:
    """Centroids (heads, clusters, D) and assignment (heads, N) int32 of one or two sides of (heads, N, D) vectors.

    Two sides have the same number of clusters, and the second has factor 1. They share every launch except those that
    apply the caps.
    """
    first = sides[0]
    keys = sides[1].vectors if len(sides) > 1 else first.vectors[:0]
    shape, length = (1, first.clusters), keys.shape[1]
    sequences = Sequences.new(first.vectors, keys, shape, shape, first.factor, length, False)
    take_starts(sequences, starts[0], starts[-1])
    if config.clustering != "streaming":
        stride = config.lloyd_stride(length, first.clusters)
        parts = min(_PARTS, cdiv(length, sequences.chunks["TILE"] * stride))
        for _ in range(config.lloyd_iterations):
            # The residuals of queries and the tilt of keys refer to exactly the same, rounded point.
            lloyd_iteration(sequences, config, parts, SUM_MEMBERS, is_rounded=True)
    else:
        stream(sequences, order)
    assign_to_nearest(sequences)
    tables = [table.squeeze(1) if table.ndim == 4 else table for table in sequences.tables[: 2 * len(sides)]]
    for side, centroids, assignment in zip(sides, tables[::2], tables[1::2], strict=True):
        if side.cap is not None and side.cap < min(config.block_size, length):
            keep_under_cap(side, centroids, assignment, config)
    return tables


def shuffled_positions(length: int, seed: int, device: torch.device) -> Tensor:
    """(length,) int32: the seeded order of positions."""
    return once((length, seed), device, lambda: seeded_shuffle(length, seed, device).int())
