"""The nearest centroid of each vector: queries and keys as the kernels of clustering read them, and compare them.

A kernel holds all centroids of a head on chip where they fit. Where they do not, it goes over them in chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from muse_attention.backends.triton.numbers import index_in_order, padded

_MOST_NUMBERS = 1 << 15
"""Numbers of centroids that a kernel holds on chip, both sizes padded to powers of two."""
_NUMBERS_OF_CHUNK = 1 << 13
"""What it holds of them at a time if there are more: the next chunk is loaded meanwhile, in float32."""


def centroids_at_once(clusters: int, head_dim: int) -> int:
    """Centroids that a kernel holds on chip: all of them, padded, or a chunk."""
    every, width = padded(clusters), padded(head_dim)
    return every if every * width <= _MOST_NUMBERS else max(16, _NUMBERS_OF_CHUNK // width)


@triton.jit
def vectors_of_sequence(first, second, sequence, of_first, length, D: tl.constexpr):
    """Where the vectors of a sequence begin."""
    if sequence < of_first:
        vectors = first + sequence.to(tl.int64) * length * D
    else:
        vectors = second + (sequence - of_first).to(tl.int64) * length * D
    return vectors


@triton.jit
def load_vectors(
    vectors, row, is_row, is_first, FACTOR: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ACC: tl.constexpr
):
    """Rows of vectors, times the factor of their side. One that is not finite must poison what attends to it, not the
    clustering of everything else."""
    dim = tl.arange(0, DP)
    loaded = tl.load(
        vectors + row.to(tl.int64)[:, None] * D + dim[None, :], mask=is_row[:, None] & (dim < D)[None, :], other=0.0
    )
    scaled = loaded.to(ACC)
    scaled = tl.where(is_first, scaled * FACTOR, scaled)
    return tl.where(tl.abs(scaled) < float("inf"), scaled, 0.0).to(loaded.dtype)


@triton.jit
def load_centroids(centroids, sequence, first, clusters, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr):
    """Those of a sequence from `first` on."""
    number, dim = first + tl.arange(0, CHUNK), tl.arange(0, DP)
    at = (sequence.to(tl.int64) * clusters + number)[:, None] * D + dim[None, :]
    return tl.load(centroids + at, mask=(number < clusters)[:, None] & (dim < D)[None, :], other=0.0)


@triton.jit
def half_norms(centroids, first, clusters, CHUNK: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr):
    """The centroids from `first` on in the vectors' dtype, and half the square of their norms; infinite where there is
    no centroid."""
    rounded = centroids.to(DTYPE)
    wide = rounded.to(ACC)
    return rounded, tl.where(first + tl.arange(0, CHUNK) < clusters, 0.5 * tl.sum(wide * wide, 1), float("inf"))


@triton.jit
def affinity(x, centroids, half_norms, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """Larger is nearer: `-|x - c|^2 / 2` without the `|x|^2` that all centroids share."""
    scores = tl.dot(x, tl.trans(centroids), input_precision=PRECISION, out_dtype=ACC) - half_norms[None, :]
    scores = tl.where(scores == scores, scores, 0.0)
    scores = tl.minimum(tl.maximum(scores, -1e38), 1e38)
    return tl.where((half_norms == float("inf"))[None, :], float("-inf"), scores)


@triton.jit
def argmax(scores, CP: tl.constexpr, DTYPE: tl.constexpr):
    """The first index of the largest score of each row, up to a precision beyond that of half-precision vectors."""
    if DTYPE == tl.float16 or DTYPE == tl.bfloat16:
        return CP - 1 - (tl.max(index_in_order(scores, CP), 1) & (CP - 1))
    else:
        return tl.argmax(scores, 1)


@triton.jit
def nothing_found(ROWS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr):
    """What `best_of_chunk` begins with: less than any score, and centroid 0."""
    if DTYPE == tl.float16 or DTYPE == tl.bfloat16:
        least = tl.full([ROWS], -(2**31), tl.int32)
    else:
        least = tl.full([ROWS], float("-inf"), ACC)
    return least, tl.zeros([ROWS], tl.int32)


@triton.jit
def best_of_chunk(scores, first, best, nearest, CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """The best score of each row so far, and the centroid that has it, with the scores of those from `first` on.

    As `argmax`: half-precision scores are compared in a precision beyond theirs, and of equal ones the first counts.
    """
    if DTYPE == tl.float16 or DTYPE == tl.bfloat16:
        packed = tl.max(index_in_order(scores, CHUNK), 1)
        score, index = packed & -CHUNK, CHUNK - 1 - (packed & (CHUNK - 1))
    else:
        score, index = tl.max(scores, 1, return_indices=True)
    is_nearer = score > best
    return tl.where(is_nearer, score, best), tl.where(is_nearer, first + index, nearest)


@triton.jit
def nearest_in_chunks(
    x, centroids, rooms, sequence, clusters, HAS_ROOM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    CHUNK: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The nearest centroid of each row of `x`, or the nearest one that `rooms` has room for."""
    best, nearest = nothing_found(x.shape[0], x.dtype, ACC)
    for first in range(0, clusters, CHUNK):
        current = load_centroids(centroids, sequence, first, clusters, D, DP, CHUNK)  # [CHUNK, D]
        rounded, norms = half_norms(current, first, clusters, CHUNK, x.dtype, ACC)
        scores = affinity(x, rounded, norms, ACC, PRECISION)  # [rows, CHUNK]
        if HAS_ROOM:
            number = first + tl.arange(0, CHUNK)
            room = tl.load(rooms + number, mask=number < clusters, other=0)
            scores = tl.where((room > 0)[None, :], scores, float("-inf"))
        best, nearest = best_of_chunk(scores, first, best, nearest, CHUNK, x.dtype)
    return nearest
