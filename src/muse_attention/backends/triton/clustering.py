"""Stage 1: centroids over the whole sequence, then capped assignment inside each block."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.balancing import keep_under_cap
from muse_attention.backends.triton.filling import copied
from muse_attention.backends.triton.lloyd import lloyd_iteration
from muse_attention.backends.triton.nearest import (
    Vectors,
    find_nearest,
    load_vectors,
    store_centroids,
    vectors_of_sequence,
)
from muse_attention.backends.triton.numbers import cdiv
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.runtime.remembering import once
from muse_attention.backends.triton.streaming import stream
from muse_attention.config import MuSeConfig
from muse_attention.core.shuffle import seeded_shuffle
from muse_attention.core.structures import Side


def find_clusters(order: Tensor, *tensors_and_settings: Any) -> tuple[Tensor, ...]:
    """Tables of each side, (batch, heads, clusters, D) and (batch, heads, N)."""
    *tensors, how, config = tensors_and_settings
    sides = [Side(tensor.flatten(0, 1), *of_side) for tensor, of_side in zip(tensors, how, strict=True)]
    if len({side.clusters for side in sides}) == 1:
        # Clustering is a chain of small steps: queries and keys take them together.
        together = cluster(sides, order, config)
        found = [(copied(centroids), copied(assignment)) for centroids, assignment in together]
    else:
        found = [of_side for side in sides for of_side in cluster([side], order, config)]
    return tuple(
        table.unflatten(0, tensor.shape[:2])
        for tensor, of_side in zip(tensors, found, strict=True)
        for table in of_side
    )


def cluster(sides: list[Side], order: Tensor, config: MuSeConfig) -> list[tuple[Tensor, Tensor]]:
    """Centroids (heads, clusters, D) and assignment (heads, N) int32 of one or two sides of (heads, N, D) vectors.

    Two sides have as many clusters, and the second has factor 1. They go through every kernel together, save what keeps
    them under their caps. `order` is `shuffled_positions`.
    """
    vectors = Vectors(sides)
    centroids = vectors.new_table()
    _take[(cdiv(vectors.clusters, 16), vectors.heads)](
        **vectors.arguments, order_ptr=order, centroids_ptr=centroids, TILE=16
    )
    if config.clustering != "streaming":
        for _ in range(config.lloyd_iterations):
            lloyd_iteration(vectors, centroids, config.lloyd_stride(vectors.length, vectors.clusters))
    else:
        stream(vectors, order, centroids)
    assignment = find_nearest(vectors, centroids)
    sizes = [side.vectors.shape[0] for side in sides]
    found = list(zip(centroids.split(sizes), assignment.split(sizes), strict=True))
    for side, (some_centroids, some_assignment) in zip(sides, found, strict=True):
        if side.cap is not None and side.cap < min(config.block_size, vectors.length):
            keep_under_cap(Vectors([side]), some_centroids, some_assignment, side.cap, config)
    return found


def shuffled_positions(length: int, seed: int, device: torch.device) -> Tensor:
    """(length,) int32: the seeded order of positions."""
    return once((length, seed), device, lambda: seeded_shuffle(length, seed, device).int())


@kernel(stage="clustering", do_not_specialize=["of_first", "length", "clusters"])
def _take(
    first_ptr, second_ptr, order_ptr, centroids_ptr, of_first, length, clusters, FACTOR: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Centroids start as vectors at equal distances in the shuffled order.

    Grid: (C / TILE, heads). `first_ptr`, `second_ptr`: (heads, N, D); `order_ptr`: (N,) int32; `centroids_ptr`:
    (heads, C, D).
    """
    sequence = tl.program_id(1)
    offs_cluster = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    mask_cluster = offs_cluster < clusters  # [TILE]
    offs_place = offs_cluster * tl.maximum(1, length // clusters) % length  # [TILE]
    offs_row = tl.load(order_ptr + offs_place, mask=mask_cluster, other=0)  # [TILE]
    vectors_ptr = vectors_of_sequence(first_ptr, second_ptr, sequence, of_first, length, D)
    x = load_vectors(vectors_ptr, offs_row, mask_cluster, sequence < of_first, FACTOR, D, DP, ACC)  # [TILE, D]
    store_centroids(centroids_ptr, sequence, tl.program_id(0) * TILE, clusters, x.to(ACC), D, DP, TILE)
