"""Lloyd's k-means on a sample: assign every vector to its nearest centroid, move centroids to the means."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.nearest import (
    Vectors,
    affinity,
    argmax,
    find_nearest,
    half_norms,
    load_centroids,
    load_vectors,
    rows_with_scores,
    vectors_of_sequence,
)
from muse_attention.backends.triton.numbers import arithmetic, cdiv, padded
from muse_attention.backends.triton.runtime.launching import kernel

_PARTS = 16
"""Pieces of a sequence whose members are summed by different programs of a Lloyd iteration."""

SUM_MEMBERS = {"num_warps": 4}


def lloyd_iteration(vectors: Vectors, centroids: Tensor, stride: int) -> None:
    """Move each of (heads, clusters, D) centroids to the mean of those nearest to it among every `stride`-th vector."""
    tile = rows_with_scores(vectors.at_once)
    parts = min(_PARTS, cdiv(vectors.length, tile * stride))
    sums = centroids.new_empty(vectors.heads, parts, *centroids.shape[1:])
    sizes = centroids.new_empty(vectors.heads, parts, vectors.clusters)
    # (A kernel takes a tensor even where it does not look at it.)
    nearest = find_nearest(vectors, centroids, stride) if vectors.is_cut else centroids
    _sum_members[(parts, vectors.heads, cdiv(vectors.clusters, vectors.at_once))](
        **vectors.arguments, centroids_ptr=centroids, nearest_ptr=nearest, sums_ptr=sums, sizes_ptr=sizes,
        stride=stride, **vectors.chunks, TILE=tile, **SUM_MEMBERS,
    )  # fmt: skip
    _mean_of_parts[(cdiv(vectors.clusters, 16), vectors.heads)](
        vectors_ptr=vectors.first, sums_ptr=sums, sizes_ptr=sizes, centroids_ptr=centroids, parts=parts,
        clusters=vectors.clusters, D=vectors.head_dim, DP=padded(vectors.head_dim),
        ACC=arithmetic(centroids.dtype)["ACC"], TILE=16,
    )  # fmt: skip


@kernel(stage="clustering", do_not_specialize=["stride", "of_first", "length", "clusters"])
def _sum_members(
    first_ptr, second_ptr, centroids_ptr, nearest_ptr, sums_ptr, sizes_ptr, stride, of_first, length, clusters,
    FACTOR: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a part of the sequence, the vectors nearest to each centroid, summed and counted.

    Grid: (parts, heads, chunks of centroids). `first_ptr`, `second_ptr`: (heads, N, D); `centroids_ptr`: (heads, C, D);
    `nearest_ptr`: (heads, N / stride) int32, looked at only if there are several chunks; `sums_ptr`:
    (heads, parts, C, D); `sizes_ptr`: (heads, parts, C).
    """
    part, sequence = tl.program_id(0), tl.program_id(1)
    vectors_ptr = vectors_of_sequence(first_ptr, second_ptr, sequence, of_first, length, D)
    offs_cluster, offs_d = tl.arange(0, CHUNK), tl.arange(0, DP)  # [CHUNK], [D]
    sampled = tl.cdiv(length, stride)
    if CHUNK == CP:
        current = load_centroids(centroids_ptr, sequence, 0, clusters, D, DP, CHUNK)  # [CHUNK, D]
        rounded, norms = half_norms(current, 0, clusters, CHUNK, first_ptr.dtype.element_ty, ACC)  # [CHUNK, D], [CHUNK]
    else:
        offs_cluster += tl.program_id(2) * CHUNK
        nearest_ptr += sequence.to(tl.int64) * sampled
    total = tl.zeros([CHUNK, DP], ACC)  # [CHUNK, D]
    count = tl.zeros([CHUNK], ACC)
    rows = tl.cdiv(tl.cdiv(sampled, tl.num_programs(0)), TILE) * TILE
    for begin in range(part * rows, tl.minimum((part + 1) * rows, sampled), TILE):
        offs_place = begin + tl.arange(0, TILE)  # [TILE]
        offs_row = offs_place * stride  # [TILE]
        x = load_vectors(vectors_ptr, offs_row, offs_row < length, sequence < of_first, FACTOR, D, DP, ACC)  # [TILE, D]
        if CHUNK == CP:
            nearest = argmax(affinity(x, rounded, norms, ACC, PRECISION), CHUNK, x.dtype)  # [TILE]
        else:
            nearest = tl.load(nearest_ptr + offs_place, mask=offs_row < length, other=-1)
        member = (nearest[:, None] == offs_cluster[None, :]) & (offs_row < length)[:, None]  # [TILE, CHUNK]
        total = tl.dot(tl.trans(member.to(x.dtype)), x, total, input_precision=PRECISION, out_dtype=ACC)
        count += tl.sum(member.to(ACC), 0)
    offs = (sequence.to(tl.int64) * tl.num_programs(0) + part) * clusters + offs_cluster  # [CHUNK]
    tl.store(sizes_ptr + offs, count, mask=offs_cluster < clusters)
    mask = (offs_cluster < clusters)[:, None] & (offs_d < D)[None, :]  # [CHUNK, D]
    tl.store(sums_ptr + offs[:, None] * D + offs_d[None, :], total, mask=mask)


@kernel(stage="clustering", do_not_specialize=["parts", "clusters"])
def _mean_of_parts(
    vectors_ptr, sums_ptr, sizes_ptr, centroids_ptr, parts, clusters, D: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The mean of the members of all parts. A centroid without members stays where it is.

    Centroids are numbers of the vectors' dtype: the residuals of queries and the tilt of keys are then from exactly the
    same point.

    Grid: (C / TILE, heads). `vectors_ptr`: of that dtype; `sums_ptr`: (heads, parts, C, D); `sizes_ptr`:
    (heads, parts, C); `centroids_ptr`: (heads, C, D).
    """
    sequence = tl.program_id(1).to(tl.int64)
    offs_cluster, offs_d = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DP)  # [TILE], [D]
    mask = (offs_cluster < clusters)[:, None] & (offs_d < D)[None, :]  # [TILE, D]
    total = tl.zeros([TILE, DP], ACC)  # [TILE, D]
    count = tl.zeros([TILE], ACC)
    for part in range(parts):
        offs = (sequence * parts + part) * clusters + offs_cluster  # [TILE]
        total += tl.load(sums_ptr + offs[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
        count += tl.load(sizes_ptr + offs, mask=offs_cluster < clusters, other=0.0)
    offs = centroids_ptr + (sequence * clusters + offs_cluster)[:, None] * D + offs_d[None, :]  # [TILE, D]
    mean = (total / tl.maximum(count, 1.0)[:, None]).to(vectors_ptr.dtype.element_ty).to(ACC)  # [TILE, D]
    tl.store(offs, mean, mask=mask & (count > 0)[:, None])
