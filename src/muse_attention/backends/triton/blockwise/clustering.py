"""Centroids of the keys of each block that is seen, and of the queries before each generation: Lloyd's k-means.

A *sequence* is what is clustered by itself: the keys of a block, or the queries of the past of a generation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import Geometry
from muse_attention.backends.triton.nearest import (
    affinity,
    argmax,
    half_norms,
    load_centroids,
    load_vectors,
    rows_with_scores,
    store_centroids,
)
from muse_attention.backends.triton.numbers import arithmetic, cdiv, padded
from muse_attention.backends.triton.row_tiles import load_rows
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.runtime.remembering import once
from muse_attention.config import MuSeConfig
from muse_attention.core.precision import compute_dtype
from muse_attention.core.shuffle import seeded_shuffle

_PARTS = 16
"""Pieces of a sequence whose members are summed by different programs."""
SUM_MEMBERS: dict[bool, dict[str, int]] = {
    True: {"num_warps": 4, "num_stages": 1, "maxnreg": 168},
    False: {"num_warps": 8, "num_stages": 2},
}
"""For up to 128 clusters, and for more."""


def start_positions(lengths: tuple[int, ...], clusters: int, config: MuSeConfig, device: torch.device) -> Tensor:
    """(sequences, clusters) int32: the vectors that centroids start as, of sequences of these lengths."""

    def find() -> Tensor:
        rows = []
        for length in lengths:
            order = seeded_shuffle(length, config.seed, device)
            rows.append(order[(torch.arange(clusters, device=device) * max(1, length // clusters)) % length])
        return torch.stack(rows).int()

    return once((*lengths, clusters, config.seed), device, find)


def lengths_of_keys(geometry: Geometry) -> tuple[int, ...]:
    """Keys of each block that is seen."""
    size = geometry.config.block_size
    return tuple(min(size, geometry.length - block * size) for block in range(geometry.seen_blocks))


def lengths_of_queries(geometry: Geometry) -> tuple[int, ...]:
    """Queries that each generation is found from."""
    generations, size = geometry.generations, geometry.config.block_size
    return tuple(min(geometry.length, generations.past(number) * size) for number in range(generations.number))


def find_centroids(
    vectors: Tensor, starts: Tensor, geometry: Geometry, *, factor: float, are_queries: bool
) -> Tensor:
    """(heads, sequences, clusters, D) centroids of (heads, N, D) vectors times a factor."""
    heads, length, head_dim = vectors.shape
    sequences, clusters = starts.shape
    config = geometry.config
    centroids = vectors.new_empty(heads, sequences, clusters, head_dim, dtype=compute_dtype(vectors.dtype))
    longest = max(lengths_of_queries(geometry) if are_queries else lengths_of_keys(geometry))
    tile = rows_with_scores(clusters)
    # (As many samples as that has any sequence, or up to twice as many.)
    most = min(longest, 2 * config.lloyd_sample * clusters)
    parts = min(_PARTS, cdiv(most, tile))
    sums = centroids.new_empty(heads, sequences, parts, clusters, head_dim)
    sizes = centroids.new_empty(heads, sequences, parts, clusters)
    of_vectors: dict[str, Any] = {
        "vectors_ptr": vectors,
        "centroids_ptr": centroids,
        "length": length,
        "block_size": config.block_size,
        "clusters": clusters,
        "FACTOR": factor,
        "ARE_QUERIES": are_queries,
        "IS_CAUSAL": geometry.is_causal,
        "D": head_dim,
        "DP": padded(head_dim),
        **arithmetic(vectors.dtype),
    }
    _take_starts[(cdiv(clusters, 16), sequences, heads)](**of_vectors, starts_ptr=starts, TILE=16)
    for _ in range(config.lloyd_iterations):
        _sum_members_of_sequence[(parts, sequences, heads)](
            **of_vectors, sums_ptr=sums, sizes_ptr=sizes, sample=config.lloyd_sample, CP=padded(clusters), TILE=tile,
            **SUM_MEMBERS[clusters <= 128],
        )  # fmt: skip
        _mean_of_sequence[(cdiv(clusters, 16), heads * sequences)](
            sums_ptr=sums, sizes_ptr=sizes, centroids_ptr=centroids, parts=parts, clusters=clusters, D=head_dim,
            DP=padded(head_dim), TILE=16,
        )  # fmt: skip
    return centroids


@triton.jit
def range_of_sequence(sequence, length, block_size, ARE_QUERIES: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """The first vector of a sequence, and how many it has."""
    if ARE_QUERIES:
        first, number = sequence * 0, tl.minimum(length, block_size << sequence) if IS_CAUSAL else length
    else:
        first = sequence * block_size
        number = tl.minimum(block_size, length - first)
    return first, number


@kernel(stage="clustering", do_not_specialize=["length", "block_size", "clusters"])
def _take_starts(
    vectors_ptr, starts_ptr, centroids_ptr, length, block_size, clusters, FACTOR: tl.constexpr,
    ARE_QUERIES: tl.constexpr, IS_CAUSAL: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Centroids start as vectors.

    Grid: (C / TILE, sequences, heads). `vectors_ptr`: (heads, N, D); `starts_ptr`: (sequences, C) int32;
    `centroids_ptr`: (heads, sequences, C, D).
    """
    sequence, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    offs_cluster = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    mask_cluster = offs_cluster < clusters  # [TILE]
    first, _ = range_of_sequence(sequence, length, block_size, ARE_QUERIES, IS_CAUSAL)
    offs_row = first + tl.load(starts_ptr + sequence * clusters + offs_cluster, mask=mask_cluster, other=0)  # [TILE]
    # [TILE, D]
    x = load_vectors(vectors_ptr + head * length * D, offs_row, mask_cluster, True, FACTOR, D, DP, ACC)
    of_sequence = head * tl.num_programs(1) + sequence
    store_centroids(centroids_ptr, of_sequence, tl.program_id(0) * TILE, clusters, x.to(ACC), D, DP, TILE)


@kernel(stage="clustering", do_not_specialize=["length", "block_size", "clusters", "sample"])
def _sum_members_of_sequence(
    vectors_ptr, centroids_ptr, sums_ptr, sizes_ptr, length, block_size, clusters, sample, FACTOR: tl.constexpr,
    ARE_QUERIES: tl.constexpr, IS_CAUSAL: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CP: tl.constexpr,
    TILE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a part of the samples of a sequence, the vectors nearest to each centroid, summed and counted.

    Grid: (parts, sequences, heads). `vectors_ptr`: (heads, N, D); `centroids_ptr`: (heads, sequences, C, D);
    `sums_ptr`: (heads, sequences, parts, C, D); `sizes_ptr`: (heads, sequences, parts, C).
    """
    part, sequence, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    of_sequence = head * tl.num_programs(1) + sequence
    first, number = range_of_sequence(sequence, length, block_size, ARE_QUERIES, IS_CAUSAL)
    stride = tl.maximum(1, number // (sample * clusters))
    sampled = tl.cdiv(number, stride)
    current = load_centroids(centroids_ptr, of_sequence, 0, clusters, D, DP, CP)  # [CP, D]
    rounded, norms = half_norms(current, 0, clusters, CP, vectors_ptr.dtype.element_ty, ACC)  # [CP, D], [CP]
    offs_cluster, offs_d = tl.arange(0, CP), tl.arange(0, DP)  # [CP], [D]
    total = tl.zeros([CP, DP], ACC)  # [CP, D]
    count = tl.zeros([CP], ACC)
    rows = tl.cdiv(tl.cdiv(sampled, tl.num_programs(0)), TILE) * TILE
    for begin in range(part * rows, tl.minimum((part + 1) * rows, sampled), TILE):
        offs_row = (begin + tl.arange(0, TILE)) * stride  # [TILE]
        mask_row = offs_row < number  # [TILE]
        # [TILE, D]
        x = load_vectors(vectors_ptr + head * length * D, first + offs_row, mask_row, True, FACTOR, D, DP, ACC)
        nearest = argmax(affinity(x, rounded, norms, ACC, PRECISION), CP, x.dtype)  # [TILE]
        member = ((nearest[:, None] == offs_cluster[None, :]) & mask_row[:, None]).to(x.dtype)  # [TILE, CP]
        total = tl.dot(tl.trans(member), x, total, input_precision=PRECISION, out_dtype=ACC)
        count += tl.sum(member.to(ACC), 0)
    at = (of_sequence * tl.num_programs(0) + part) * clusters
    mask_cluster = offs_cluster < clusters  # [CP]
    offs = (at + offs_cluster)[:, None] * D + offs_d[None, :]  # [CP, D]
    tl.store(sums_ptr + offs, total, mask=mask_cluster[:, None] & (offs_d < D)[None, :])
    tl.store(sizes_ptr + at + offs_cluster, count, mask=mask_cluster)


@kernel(stage="clustering", do_not_specialize=["parts", "clusters"])
def _mean_of_sequence(
    sums_ptr, sizes_ptr, centroids_ptr, parts, clusters, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr
):
    """Move centroids to the means of their members; one without any stays.

    Grid: (C / TILE, heads sequences). `sums_ptr`: (heads sequences, parts, C, D); `sizes_ptr`:
    (heads sequences, parts, C); `centroids_ptr`: (heads sequences, C, D).
    """
    of_sequence = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * TILE
    offs_cluster, offs_d = first + tl.arange(0, TILE), tl.arange(0, DP)  # [TILE], [D]
    mask_cluster = offs_cluster < clusters  # [TILE]
    total = tl.zeros([TILE, DP], sums_ptr.dtype.element_ty)  # [TILE, D]
    count = tl.zeros([TILE], sums_ptr.dtype.element_ty)
    for part in range(parts):
        at = (of_sequence * parts + part) * clusters
        total += load_rows(sums_ptr, at, offs_cluster, mask_cluster, D, DP)
        count += tl.load(sizes_ptr + at + offs_cluster, mask=mask_cluster, other=0.0)
    offs = (of_sequence * clusters + offs_cluster)[:, None] * D + offs_d[None, :]  # [TILE, D]
    mask = (mask_cluster & (count > 0))[:, None] & (offs_d < D)[None, :]  # [TILE, D]
    tl.store(centroids_ptr + offs, total / tl.maximum(count, 1.0)[:, None], mask=mask)
