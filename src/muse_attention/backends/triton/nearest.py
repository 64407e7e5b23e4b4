"""The nearest centroid of each vector: how clustering kernels load vectors and compare them with centroids.

A kernel holds all centroids of a head on chip if they fit, and otherwise goes over them in chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.device_functions import dot, index_in_order
from muse_attention.backends.triton.numbers import accumulator, cdiv, padded
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Side

_MOST_NUMBERS = 1 << 15
"""Largest padded size of the centroids that a kernel holds on chip as a whole."""
_NUMBERS_OF_CHUNK = 1 << 13
"""Size of a chunk of larger ones, in float32: the next chunk is loaded meanwhile."""
_TILES_OF_PART = 16
"""Tiles of vectors per program."""
FIND_NEAREST = {"num_warps": 4}


class Vectors:
    """One or two tensors of vectors, clustered by the same launches."""

    def __init__(self, sides: list[Side]) -> None:
        self.first, self.factor, self.second = sides[0].vectors, sides[0].factor, sides[-1].vectors
        self.heads = sum(side.vectors.shape[0] for side in sides)
        self.length, self.head_dim = self.first.shape[1:]
        self.clusters = sides[0].clusters
        self.at_once = centroids_at_once(self.clusters, self.head_dim)

    @property
    def is_cut(self) -> bool:
        """Whether there are too many centroids to hold them all on chip."""
        return self.at_once < self.clusters

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of kernels: heads below `first_heads` are rows of `first_ptr`, the others of `second_ptr`."""
        return {
            "first_ptr": self.first,
            "second_ptr": self.second,
            "first_heads": self.first.shape[0],
            "length": self.length,
            "clusters": self.clusters,
            "FACTOR": self.factor,
            "D": self.head_dim,
            "ACC": accumulator(self.first.dtype),
        }

    @property
    def chunks(self) -> dict[str, int]:
        return {"CP": padded(self.clusters), "CHUNK": self.at_once}

    def new_table(self) -> Tensor:
        """(heads, clusters, D): room for centroids."""
        shape = (self.heads, self.clusters, self.head_dim)
        return self.first.new_empty(shape, dtype=compute_dtype(self.first.dtype))


def find_nearest(vectors: Vectors, centroids: Tensor, stride: int = 1) -> Tensor:
    """(heads, N / stride) int32: the nearest of (heads, clusters, D) centroids, for every `stride`-th vector."""
    sampled = cdiv(vectors.length, stride)
    assignment = vectors.first.new_empty(vectors.heads, sampled, dtype=torch.int32)
    tile = rows_with_scores(vectors.at_once)
    _find_nearest[(cdiv(sampled, tile * _TILES_OF_PART), vectors.heads)](
        **vectors.arguments, centroids_ptr=centroids, assignment_ptr=assignment, stride=stride, **vectors.chunks,
        TILE=tile, TILES=_TILES_OF_PART, **FIND_NEAREST,
    )  # fmt: skip
    return assignment


def rows_with_scores(clusters: int) -> int:
    """Rows of a tile whose affinities to so many clusters fit on chip."""
    return max(16, min(64, 8192 // padded(clusters)))


def centroids_at_once(clusters: int, head_dim: int) -> int:
    """Centroids that a kernel holds on chip: all of them, padded, or a chunk."""
    all_clusters, width = padded(clusters), padded(head_dim)
    return all_clusters if all_clusters * width <= _MOST_NUMBERS else max(16, _NUMBERS_OF_CHUNK // width)


@triton.jit
def vectors_of_sequence(first_ptr, second_ptr, sequence, first_heads, length, D: tl.constexpr):
    """Pointer to the vectors of a sequence."""
    if sequence < first_heads:
        vectors_ptr = first_ptr + sequence.to(tl.int64) * length * D
    else:
        vectors_ptr = second_ptr + (sequence - first_heads).to(tl.int64) * length * D
    return vectors_ptr


@triton.jit
def load_vectors(vectors_ptr, offs_row, mask_row, is_first, FACTOR: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr):
    """[ROWS, D]: rows of vectors, times the factor of their side. 0 for what is not finite: it must poison what attends
    to it, not the clustering of everything else."""
    offs_d = tl.arange(0, padded(D))  # [D]
    mask = mask_row[:, None] & (offs_d < D)[None, :]  # [ROWS, D]
    # [ROWS, D]
    loaded = tl.load(vectors_ptr + offs_row.to(tl.int64)[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
    scaled = loaded.to(ACC)  # [ROWS, D]
    scaled = tl.where(is_first, scaled * FACTOR, scaled)
    return tl.where(tl.abs(scaled) < float("inf"), scaled, 0.0).to(loaded.dtype)


@triton.jit
def load_centroids(centroids_ptr, sequence, first, clusters, D: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, D]: the centroids of a sequence from `first` on."""
    offs_cluster, offs_d = first + tl.arange(0, CHUNK), tl.arange(0, padded(D))  # [CHUNK], [D]
    offs = (sequence.to(tl.int64) * clusters + offs_cluster)[:, None] * D + offs_d[None, :]  # [CHUNK, D]
    return tl.load(centroids_ptr + offs, mask=(offs_cluster < clusters)[:, None] & (offs_d < D)[None, :], other=0.0)


@triton.jit
def store_centroids(centroids_ptr, sequence, first, clusters, tile, D: tl.constexpr, CHUNK: tl.constexpr):
    """Write a tile [CHUNK, D] to the centroids of a sequence from `first` on."""
    offs_cluster, offs_d = first + tl.arange(0, CHUNK), tl.arange(0, padded(D))  # [CHUNK], [D]
    offs = (sequence.to(tl.int64) * clusters + offs_cluster)[:, None] * D + offs_d[None, :]  # [CHUNK, D]
    tl.store(centroids_ptr + offs, tile, mask=(offs_cluster < clusters)[:, None] & (offs_d < D)[None, :])


@triton.jit
def half_norms(centroids, first, clusters, CHUNK: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr):
    """The centroids from `first` on in the vectors' dtype, [CHUNK, D], and half the square of their norms, [CHUNK];
    infinite where there is no centroid."""
    rounded = centroids.to(DTYPE)  # [CHUNK, D]
    wide = rounded.to(ACC)  # [CHUNK, D]
    return rounded, tl.where(first + tl.arange(0, CHUNK) < clusters, 0.5 * tl.sum(wide * wide, 1), float("inf"))


@triton.jit
def affinity(x, centroids, half_norms, ACC: tl.constexpr):
    """[ROWS, CHUNK]: `-|x - c|^2 / 2` without the `|x|^2` that all centroids share. Larger is nearer."""
    # [ROWS, CHUNK]
    scores = dot(x, tl.trans(centroids), ACC) - half_norms[None, :]
    scores = tl.where(scores == scores, scores, 0.0)
    scores = tl.minimum(tl.maximum(scores, -1e38), 1e38)
    return tl.where((half_norms == float("inf"))[None, :], float("-inf"), scores)


@triton.jit
def argmax(scores, CP: tl.constexpr, DTYPE: tl.constexpr):
    """[ROWS]: the first index of the largest score of each row. For half-precision vectors, scores lose low bits of
    float32."""
    if DTYPE == tl.float16 or DTYPE == tl.bfloat16:
        return CP - 1 - (tl.max(index_in_order(scores, CP), 1) & (CP - 1))
    else:
        return tl.argmax(scores, 1)


@triton.jit
def initial_best(ROWS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr):
    """The start of `best_of_chunk`, [ROWS] each: a score below all others, and centroid 0."""
    if DTYPE == tl.float16 or DTYPE == tl.bfloat16:
        least = tl.full([ROWS], -(2**31), tl.int32)
    else:
        least = tl.full([ROWS], float("-inf"), ACC)
    return least, tl.zeros([ROWS], tl.int32)


@triton.jit
def best_of_chunk(scores, first, best, nearest, CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """The best score of each row and its centroid, [ROWS] each, updated with the scores of the centroids from `first`
    on.

    Compares as `argmax` does; of equal scores the first counts.
    """
    if DTYPE == tl.float16 or DTYPE == tl.bfloat16:
        packed = tl.max(index_in_order(scores, CHUNK), 1)  # [ROWS]
        score, index = packed & -CHUNK, CHUNK - 1 - (packed & (CHUNK - 1))  # [ROWS], [ROWS]
    else:
        score, index = tl.max(scores, 1, return_indices=True)
    is_nearer = score > best  # [ROWS]
    return tl.where(is_nearer, score, best), tl.where(is_nearer, first + index, nearest)


@triton.jit
def nearest_in_chunks(
    x, centroids_ptr, rooms_ptr, sequence, clusters, HAS_ROOM: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """[ROWS]: the nearest centroid of each row of `x`, or the nearest one that `rooms_ptr`, (C,), has room for."""
    best, nearest = initial_best(x.shape[0], x.dtype, ACC)  # [ROWS], [ROWS]
    for first in range(0, clusters, CHUNK):
        current = load_centroids(centroids_ptr, sequence, first, clusters, D, CHUNK)  # [CHUNK, D]
        rounded, norms = half_norms(current, first, clusters, CHUNK, x.dtype, ACC)  # [CHUNK, D], [CHUNK]
        scores = affinity(x, rounded, norms, ACC)  # [ROWS, CHUNK]
        if HAS_ROOM:
            offs_cluster = first + tl.arange(0, CHUNK)  # [CHUNK]
            room = tl.load(rooms_ptr + offs_cluster, mask=offs_cluster < clusters, other=0)  # [CHUNK]
            scores = tl.where((room > 0)[None, :], scores, float("-inf"))
        best, nearest = best_of_chunk(scores, first, best, nearest, CHUNK, x.dtype)  # [ROWS], [ROWS]
    return nearest


@kernel(stage="clustering", do_not_specialize=["first_heads", "length", "clusters"])
def _find_nearest(
    first_ptr, second_ptr, centroids_ptr, assignment_ptr, stride, first_heads, length, clusters,
    FACTOR: tl.constexpr, D: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The nearest centroid of every `stride`-th vector. (A `stride` of 1 is a constant for the compiler.)

    Grid: (sampled vectors / (TILE TILES), heads). `first_ptr`, `second_ptr`: (heads, N, D); `centroids_ptr`:
    (heads, C, D); `assignment_ptr`: (heads, N / stride) int32.
    """
    sequence = tl.program_id(1)
    vectors_ptr = vectors_of_sequence(first_ptr, second_ptr, sequence, first_heads, length, D)
    if CHUNK == CP:
        current = load_centroids(centroids_ptr, sequence, 0, clusters, D, CHUNK)  # [CHUNK, D]
        rounded, norms = half_norms(current, 0, clusters, CHUNK, first_ptr.dtype.element_ty, ACC)  # [CHUNK, D], [CHUNK]
    start = tl.program_id(0) * TILE * TILES
    sampled = tl.cdiv(length, stride)
    for begin in range(start, tl.minimum(start + TILE * TILES, sampled), TILE):
        offs_place = begin + tl.arange(0, TILE)  # [TILE]
        mask_row = offs_place < sampled  # [TILE]
        # [TILE, D]
        x = load_vectors(vectors_ptr, offs_place * stride, mask_row, sequence < first_heads, FACTOR, D, ACC)
        if CHUNK == CP:
            nearest = argmax(affinity(x, rounded, norms, ACC), CHUNK, x.dtype)  # [TILE]
        else:
            nearest = nearest_in_chunks(x, centroids_ptr, assignment_ptr, sequence, clusters, False, D, CHUNK, ACC)
        tl.store(assignment_ptr + sequence.to(tl.int64) * sampled + offs_place, nearest, mask=mask_row)
