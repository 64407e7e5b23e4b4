"""The nearest centroid of each vector: queries and keys as the kernels of clustering read and compare them.

A kernel holds all centroids of a head on chip where they fit. Where they do not, it goes over them in chunks.
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
"""Numbers of centroids that a kernel holds on chip, both sizes padded to powers of two."""
_NUMBERS_OF_CHUNK = 1 << 13
"""What it holds of them at a time if there are more: the next chunk is loaded meanwhile, in float32."""
_TILES_OF_PART = 16
"""Tiles of vectors that one program assigns."""
FIND_NEAREST = {"num_warps": 4}


class Vectors:
    """One or two tensors of vectors, which go through the kernels together."""

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
        """As kernels take them: heads below `of_first` are rows of `first_ptr`, the others of `second_ptr`."""
        return {
            "first_ptr": self.first,
            "second_ptr": self.second,
            "of_first": self.first.shape[0],
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
    """Rows whose affinity to so many clusters is held on chip at a time."""
    return max(16, min(64, 8192 // padded(clusters)))


def centroids_at_once(clusters: int, head_dim: int) -> int:
    """Centroids that a kernel holds on chip: all of them, padded, or a chunk."""
    every, width = padded(clusters), padded(head_dim)
    return every if every * width <= _MOST_NUMBERS else max(16, _NUMBERS_OF_CHUNK // width)


@triton.jit
def vectors_of_sequence(first_ptr, second_ptr, sequence, of_first, length, D: tl.constexpr):
    """Where the vectors of a sequence begin."""
    if sequence < of_first:
        vectors_ptr = first_ptr + sequence.to(tl.int64) * length * D
    else:
        vectors_ptr = second_ptr + (sequence - of_first).to(tl.int64) * length * D
    return vectors_ptr


@triton.jit
def load_vectors(vectors_ptr, offs_row, mask_row, is_first, FACTOR: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr):
    """[ROWS, D]: rows of vectors, times the factor of their side. One that is not finite must poison what attends to
    it, not the clustering of everything else."""
    offs_d = tl.arange(0, padded(D))  # [D]
    mask = mask_row[:, None] & (offs_d < D)[None, :]  # [ROWS, D]
    # [ROWS, D]
    loaded = tl.load(vectors_ptr + offs_row.to(tl.int64)[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
    scaled = loaded.to(ACC)  # [ROWS, D]
    scaled = tl.where(is_first, scaled * FACTOR, scaled)
    return tl.where(tl.abs(scaled) < float("inf"), scaled, 0.0).to(loaded.dtype)


@triton.jit
def load_centroids(centroids_ptr, sequence, first, clusters, D: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, D]: those of a sequence from `first` on."""
    offs_cluster, offs_d = first + tl.arange(0, CHUNK), tl.arange(0, padded(D))  # [CHUNK], [D]
    offs = (sequence.to(tl.int64) * clusters + offs_cluster)[:, None] * D + offs_d[None, :]  # [CHUNK, D]
    return tl.load(centroids_ptr + offs, mask=(offs_cluster < clusters)[:, None] & (offs_d < D)[None, :], other=0.0)


@triton.jit
def store_centroids(centroids_ptr, sequence, first, clusters, tile, D: tl.constexpr, CHUNK: tl.constexpr):
    """Write [CHUNK, D] to those of a sequence from `first` on."""
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
    """[ROWS, CHUNK]: larger is nearer: `-|x - c|^2 / 2` without the `|x|^2` that all centroids share."""
    # [ROWS, CHUNK]
    scores = dot(x, tl.trans(centroids), ACC) - half_norms[None, :]
    scores = tl.where(scores == scores, scores, 0.0)
    scores = tl.minimum(tl.maximum(scores, -1e38), 1e38)
    return tl.where((half_norms == float("inf"))[None, :], float("-inf"), scores)


@triton.jit
def argmax(scores, CP: tl.constexpr, DTYPE: tl.constexpr):
    """[ROWS]: the first index of the largest score of each row, up to a precision beyond that of half-precision
    vectors."""
    if DTYPE == tl.float16 or DTYPE == tl.bfloat16:
        return CP - 1 - (tl.max(index_in_order(scores, CP), 1) & (CP - 1))
    else:
        return tl.argmax(scores, 1)


@triton.jit
def nothing_found(ROWS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr):
    """What `best_of_chunk` begins with, [ROWS] each: less than any score, and centroid 0."""
    if DTYPE == tl.float16 or DTYPE == tl.bfloat16:
        least = tl.full([ROWS], -(2**31), tl.int32)
    else:
        least = tl.full([ROWS], float("-inf"), ACC)
    return least, tl.zeros([ROWS], tl.int32)


@triton.jit
def best_of_chunk(scores, first, best, nearest, CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """The best score of each row so far, and the centroid that has it, with the scores of those from `first` on: [ROWS]
    each.

    As `argmax`: half-precision scores are compared in a precision beyond theirs, and of equal ones the first counts.
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
    best, nearest = nothing_found(x.shape[0], x.dtype, ACC)  # [ROWS], [ROWS]
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


@kernel(stage="clustering", do_not_specialize=["of_first", "length", "clusters"])
def _find_nearest(
    first_ptr, second_ptr, centroids_ptr, assignment_ptr, stride, of_first, length, clusters, FACTOR: tl.constexpr,
    D: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The nearest centroid of every `stride`-th vector. (A `stride` of 1 is a constant for the compiler.)

    Grid: (sampled vectors / (TILE TILES), heads). `first_ptr`, `second_ptr`: (heads, N, D); `centroids_ptr`:
    (heads, C, D); `assignment_ptr`: (heads, N / stride) int32.
    """
    sequence = tl.program_id(1)
    vectors_ptr = vectors_of_sequence(first_ptr, second_ptr, sequence, of_first, length, D)
    if CHUNK == CP:
        current = load_centroids(centroids_ptr, sequence, 0, clusters, D, CHUNK)  # [CHUNK, D]
        rounded, norms = half_norms(current, 0, clusters, CHUNK, first_ptr.dtype.element_ty, ACC)  # [CHUNK, D], [CHUNK]
    start = tl.program_id(0) * TILE * TILES
    sampled = tl.cdiv(length, stride)
    for begin in range(start, tl.minimum(start + TILE * TILES, sampled), TILE):
        offs_place = begin + tl.arange(0, TILE)  # [TILE]
        mask_row = offs_place < sampled  # [TILE]
        # [TILE, D]
        x = load_vectors(vectors_ptr, offs_place * stride, mask_row, sequence < of_first, FACTOR, D, ACC)
        if CHUNK == CP:
            nearest = argmax(affinity(x, rounded, norms, ACC), CHUNK, x.dtype)  # [TILE]
        else:
            nearest = nearest_in_chunks(x, centroids_ptr, assignment_ptr, sequence, clusters, False, D, CHUNK, ACC)
        tl.store(assignment_ptr + sequence.to(tl.int64) * sampled + offs_place, nearest, mask=mask_row)
