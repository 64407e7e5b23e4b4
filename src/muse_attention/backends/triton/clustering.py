"""Stage 1: centroids over the whole sequence by Lloyd's k-means on a sample, then capped assignment inside each block.

`streaming` and `balancing` have the paper's k-means and the caps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.balancing import keep_under_cap
from muse_attention.backends.triton.device_functions import add_dot
from muse_attention.backends.triton.filling import copied
from muse_attention.backends.triton.nearest import (
    Vectors,
    affinity,
    argmax,
    find_nearest,
    half_norms,
    load_centroids,
    load_vectors,
    rows_with_scores,
    store_centroids,
    vectors_of_sequence,
)
from muse_attention.backends.triton.numbers import accumulator, cdiv, padded
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.runtime.remembering import once
from muse_attention.backends.triton.streaming import stream
from muse_attention.config import MuSeConfig
from muse_attention.core.shuffle import seeded_shuffle
from muse_attention.core.structures import Side


def find_clusters(order: Tensor, *tensors_and_settings: Any) -> tuple[Tensor, ...]:
    """Centroids (batch, heads, clusters, D) and assignment (batch, heads, N) of each side."""
    *tensors, side_settings, config = tensors_and_settings
    sides = [Side(tensor.flatten(0, 1), *settings) for tensor, settings in zip(tensors, side_settings, strict=True)]
    if len({side.clusters for side in sides}) == 1:
        # Clustering is a chain of small steps: queries and keys take them together.
        together = cluster(sides, order, config)
        clusters = [(copied(centroids), copied(assignment)) for centroids, assignment in together]
    else:
        clusters = [cluster([side], order, config)[0] for side in sides]
    flat = [(table, tensor) for tensor, tables in zip(tensors, clusters, strict=True) for table in tables]
    return tuple(table.unflatten(0, tensor.shape[:2]) for table, tensor in flat)


def cluster(sides: list[Side], order: Tensor, config: MuSeConfig) -> list[tuple[Tensor, Tensor]]:
    """Centroids (heads, clusters, D) and assignment (heads, N) int32 of one or two sides of (heads, N, D) vectors.

    Two sides have the same number of clusters, and the second has factor 1. They share every launch except those that
    apply the caps. `order` is from `shuffled_positions`.
    """
    vectors = Vectors(sides)
    centroids = vectors.new_table()
    _take[(cdiv(vectors.clusters, 16), vectors.heads)](
        **vectors.arguments, order_ptr=order, centroids_ptr=centroids, TILE=16
    )
    if config.clustering != "streaming":
        for _ in range(config.lloyd_iterations):
            _lloyd_iteration(vectors, centroids, config.lloyd_stride(vectors.length, vectors.clusters))
    else:
        stream(vectors, order, centroids)
    assignment = find_nearest(vectors, centroids)
    sizes = [side.vectors.shape[0] for side in sides]
    clusters = list(zip(centroids.split(sizes), assignment.split(sizes), strict=True))
    for side, (side_centroids, side_assignment) in zip(sides, clusters, strict=True):
        if side.cap is not None and side.cap < min(config.block_size, vectors.length):
            keep_under_cap(Vectors([side]), side_centroids, side_assignment, side.cap, config)
    return clusters


def shuffled_positions(length: int, seed: int, device: torch.device) -> Tensor:
    """(length,) int32: the seeded order of positions."""
    return once((length, seed), device, lambda: seeded_shuffle(length, seed, device).int())


@kernel(stage="clustering", do_not_specialize=["first_heads", "length", "clusters"])
def _take(
    first_ptr, second_ptr, order_ptr, centroids_ptr, first_heads, length, clusters, FACTOR: tl.constexpr,
    D: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
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
    vectors_ptr = vectors_of_sequence(first_ptr, second_ptr, sequence, first_heads, length, D)
    x = load_vectors(vectors_ptr, offs_row, mask_cluster, sequence < first_heads, FACTOR, D, ACC)  # [TILE, D]
    store_centroids(centroids_ptr, sequence, tl.program_id(0) * TILE, clusters, x.to(ACC), D, TILE)


_PARTS = 16
"""Programs that share a sequence in a Lloyd iteration."""

SUM_MEMBERS = {"num_warps": 4}


def _lloyd_iteration(vectors: Vectors, centroids: Tensor, stride: int) -> None:
    """Move (heads, clusters, D) centroids to the means of their nearest vectors, out of every `stride`-th vector."""
    tile = rows_with_scores(vectors.at_once)
    parts = min(_PARTS, cdiv(vectors.length, tile * stride))
    sums = centroids.new_empty(vectors.heads, parts, *centroids.shape[1:])
    sizes = centroids.new_empty(vectors.heads, parts, vectors.clusters)
    # (A kernel needs a tensor even for an argument that it does not read.)
    nearest = find_nearest(vectors, centroids, stride) if vectors.is_cut else centroids
    _sum_members[(parts, vectors.heads, cdiv(vectors.clusters, vectors.at_once))](
        **vectors.arguments, centroids_ptr=centroids, nearest_ptr=nearest, sums_ptr=sums, sizes_ptr=sizes,
        stride=stride, **vectors.chunks, TILE=tile, **SUM_MEMBERS,
    )  # fmt: skip
    _mean_of_parts[(cdiv(vectors.clusters, 16), vectors.heads)](
        vectors_ptr=vectors.first, sums_ptr=sums, sizes_ptr=sizes, centroids_ptr=centroids, parts=parts,
        clusters=vectors.clusters, D=vectors.head_dim, ACC=accumulator(centroids.dtype), TILE=16,
    )  # fmt: skip


@kernel(stage="clustering", do_not_specialize=["stride", "first_heads", "length", "clusters"])
def _sum_members(
    first_ptr, second_ptr, centroids_ptr, nearest_ptr, sums_ptr, sizes_ptr, stride, first_heads, length, clusters,
    FACTOR: tl.constexpr, D: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Sum and count the vectors nearest to each centroid, in a part of the sequence.

    Grid: (parts, heads, chunks of centroids). `first_ptr`, `second_ptr`: (heads, N, D); `centroids_ptr`: (heads, C, D);
    `nearest_ptr`: (heads, N / stride) int32, read only if there are several chunks; `sums_ptr`:
    (heads, parts, C, D); `sizes_ptr`: (heads, parts, C).
    """
    part, sequence = tl.program_id(0), tl.program_id(1)
    vectors_ptr = vectors_of_sequence(first_ptr, second_ptr, sequence, first_heads, length, D)
    offs_cluster, offs_d = tl.arange(0, CHUNK), tl.arange(0, padded(D))  # [CHUNK], [D]
    sampled = tl.cdiv(length, stride)
    if CHUNK == CP:
        current = load_centroids(centroids_ptr, sequence, 0, clusters, D, CHUNK)  # [CHUNK, D]
        rounded, norms = half_norms(current, 0, clusters, CHUNK, first_ptr.dtype.element_ty, ACC)  # [CHUNK, D], [CHUNK]
    else:
        offs_cluster += tl.program_id(2) * CHUNK
        nearest_ptr += sequence.to(tl.int64) * sampled
    total = tl.zeros([CHUNK, padded(D)], ACC)  # [CHUNK, D]
    count = tl.zeros([CHUNK], ACC)
    rows = tl.cdiv(tl.cdiv(sampled, tl.num_programs(0)), TILE) * TILE
    for begin in range(part * rows, tl.minimum((part + 1) * rows, sampled), TILE):
        offs_place = begin + tl.arange(0, TILE)  # [TILE]
        offs_row = offs_place * stride  # [TILE]
        # [TILE, D]
        x = load_vectors(vectors_ptr, offs_row, offs_row < length, sequence < first_heads, FACTOR, D, ACC)
        if CHUNK == CP:
            nearest = argmax(affinity(x, rounded, norms, ACC), CHUNK, x.dtype)  # [TILE]
        else:
            nearest = tl.load(nearest_ptr + offs_place, mask=offs_row < length, other=-1)
        member = (nearest[:, None] == offs_cluster[None, :]) & (offs_row < length)[:, None]  # [TILE, CHUNK]
        total = add_dot(tl.trans(member.to(x.dtype)), x, total)
        count += tl.sum(member.to(ACC), 0)
    offs = (sequence.to(tl.int64) * tl.num_programs(0) + part) * clusters + offs_cluster  # [CHUNK]
    tl.store(sizes_ptr + offs, count, mask=offs_cluster < clusters)
    mask = (offs_cluster < clusters)[:, None] & (offs_d < D)[None, :]  # [CHUNK, D]
    tl.store(sums_ptr + offs[:, None] * D + offs_d[None, :], total, mask=mask)


@kernel(stage="clustering", do_not_specialize=["parts", "clusters"])
def _mean_of_parts(
    vectors_ptr, sums_ptr, sizes_ptr, centroids_ptr, parts, clusters, D: tl.constexpr, TILE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """The mean of the members of all parts. A centroid without members stays where it is.

    Centroids are rounded to the vectors' dtype, so that the residuals of queries and the tilt of keys refer to exactly
    the same point.

    Grid: (C / TILE, heads). `vectors_ptr`: of that dtype; `sums_ptr`: (heads, parts, C, D); `sizes_ptr`:
    (heads, parts, C); `centroids_ptr`: (heads, C, D).
    """
    sequence = tl.program_id(1).to(tl.int64)
    offs_cluster, offs_d = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, padded(D))  # [TILE], [D]
    mask = (offs_cluster < clusters)[:, None] & (offs_d < D)[None, :]  # [TILE, D]
    total = tl.zeros([TILE, padded(D)], ACC)  # [TILE, D]
    count = tl.zeros([TILE], ACC)
    for part in range(parts):
        offs = (sequence * parts + part) * clusters + offs_cluster  # [TILE]
        total += tl.load(sums_ptr + offs[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
        count += tl.load(sizes_ptr + offs, mask=offs_cluster < clusters, other=0.0)
    offs = centroids_ptr + (sequence * clusters + offs_cluster)[:, None] * D + offs_d[None, :]  # [TILE, D]
    mean = (total / tl.maximum(count, 1.0)[:, None]).to(vectors_ptr.dtype.element_ty).to(ACC)  # [TILE, D]
    tl.store(offs, mean, mask=mask & (count > 0)[:, None])
