"""The sequences of vectors that are clustered together, and how clustering kernels find each vector's nearest centroid.

A kernel holds all centroids of a head on chip if they fit, and otherwise goes over them in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.device_functions import dot, index_in_order, load_rows, store_rows
from muse_attention.backends.triton.numbers import accumulator, padded
from muse_attention.core.precision import compute_dtype

_MOST_NUMBERS = 1 << 15
"""Largest padded size of the centroids that a kernel holds on chip as a whole."""
_NUMBERS_OF_CHUNK = 1 << 13
"""Size of a chunk of larger ones, in float32: the next chunk is loaded meanwhile."""


@dataclass(frozen=True)
class Sequences:
    """Vectors of all heads in sequences, each clustered on its own: the queries before each of `S` generations, and the
    keys of each block that is seen. One generation and one block, which are all of a head, are the paper's method."""

    queries: Tensor
    """(H, N, D)"""
    keys: Tensor
    """(G, N, D)"""
    query_centroids: Tensor
    """(H, S, Q, D)"""
    query_assignment: Tensor
    """(H, N) int32"""
    key_centroids: Tensor
    """(G, seen blocks, K, D)"""
    key_assignment: Tensor
    """(G, N) int32"""
    factor: float
    """of queries"""
    block_size: int
    is_causal: bool

    @classmethod
    def new(
        cls, queries: Tensor, keys: Tensor, query_shape: tuple[int, int], key_shape: tuple[int, int], *settings: Any
    ) -> Sequences:
        """With room for (S, Q) centroids of queries and (seen blocks, K) of keys. `settings` are the last fields."""
        return cls(queries, keys, *_new_tables(queries, *query_shape), *_new_tables(keys, *key_shape), *settings)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Centroids and assignment of queries, then of keys."""
        return self.query_centroids, self.query_assignment, self.key_centroids, self.key_assignment

    @property
    def heads(self) -> int:
        """Of queries and of keys."""
        return self.queries.shape[0] + self.keys.shape[0]

    @property
    def length(self) -> int:
        return self.queries.shape[1]

    @property
    def clusters(self) -> int:
        """The larger number of a sequence's clusters, of queries or keys."""
        return max(self.query_centroids.shape[2], self.key_centroids.shape[2])

    @property
    def at_once(self) -> int:
        return centroids_at_once(self.clusters, self.queries.shape[2])

    @property
    def is_cut(self) -> bool:
        """Whether there are too many centroids to hold them all on chip."""
        return self.at_once < self.clusters

    @property
    def vectors(self) -> dict[str, Any]:
        """Arguments of kernels: vectors and their centroids."""
        return {
            "queries_ptr": self.queries,
            "keys_ptr": self.keys,
            "query_centroids_ptr": self.query_centroids,
            "key_centroids_ptr": self.key_centroids,
            "query_heads": self.queries.shape[0],
            "length": self.length,
            "FACTOR": self.factor,
            "D": self.queries.shape[2],
            "ACC": accumulator(self.queries.dtype),
        }

    @property
    def arguments(self) -> dict[str, Any]:
        """The same, and which sequences there are."""
        return {
            **self.vectors,
            "generations": self.query_centroids.shape[1],
            "seen_blocks": self.key_centroids.shape[1],
            "block_size": self.block_size,
            "query_clusters": self.query_centroids.shape[2],
            "key_clusters": self.key_centroids.shape[2],
            "IS_CAUSAL": self.is_causal,
        }

    @property
    def assignments(self) -> dict[str, Tensor]:
        return {"query_assignment_ptr": self.query_assignment, "key_assignment_ptr": self.key_assignment}

    @property
    def chunks(self) -> dict[str, int]:
        return {"CP": padded(self.clusters), "CHUNK": self.at_once, "TILE": rows_with_scores(self.at_once)}


def _new_tables(vectors: Tensor, sequences: int, clusters: int) -> tuple[Tensor, Tensor]:
    """Room for centroids and the assignment."""
    heads, length, head_dim = vectors.shape
    centroids = vectors.new_empty(heads, sequences, clusters, head_dim, dtype=compute_dtype(vectors.dtype))
    return centroids, vectors.new_empty(heads, length, dtype=torch.int32)


def rows_with_scores(clusters: int) -> int:
    """Rows of a tile whose affinities to so many clusters fit on chip."""
    return max(16, min(64, 8192 // padded(clusters)))


def centroids_at_once(clusters: int, head_dim: int) -> int:
    """Centroids that a kernel holds on chip: all of them, padded, or a chunk."""
    all_clusters, width = padded(clusters), padded(head_dim)
    return all_clusters if all_clusters * width <= _MOST_NUMBERS else max(16, _NUMBERS_OF_CHUNK // width)


@triton.jit
def rows_of_head(queries_ptr, keys_ptr, head, query_heads, rows, X: tl.constexpr):
    """Pointer to what a head has of two tables with so many rows of `X` numbers for each head."""
    if head < query_heads:
        rows_ptr = queries_ptr + head.to(tl.int64) * rows * X
    else:
        rows_ptr = keys_ptr + (head - query_heads).to(tl.int64) * rows * X
    return rows_ptr


@triton.jit
def load_vectors(
    vectors_ptr, offs_row, mask_row, are_queries, FACTOR: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr
):
    """[ROWS, D]: rows of vectors, times the factor of queries. 0 for what is not finite: it must poison what attends to
    it, not the clustering of everything else."""
    loaded = load_rows(vectors_ptr, 0, offs_row.to(tl.int64), mask_row, D)  # [ROWS, D]
    scaled = loaded.to(ACC)  # [ROWS, D]
    scaled = tl.where(are_queries, scaled * FACTOR, scaled)
    return tl.where(tl.abs(scaled) < float("inf"), scaled, 0.0).to(loaded.dtype)


@triton.jit
def load_centroids(centroids_ptr, first, clusters, D: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, D]: the centroids of a sequence from `first` on."""
    offs_cluster = first + tl.arange(0, CHUNK)  # [CHUNK]
    return load_rows(centroids_ptr, 0, offs_cluster, offs_cluster < clusters, D)


@triton.jit
def store_centroids(centroids_ptr, first, clusters, tile, D: tl.constexpr, CHUNK: tl.constexpr):
    """Write a tile [CHUNK, D] to the centroids of a sequence from `first` on."""
    offs_cluster = first + tl.arange(0, CHUNK)  # [CHUNK]
    store_rows(centroids_ptr, 0, offs_cluster, offs_cluster < clusters, tile, D)


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
    x, centroids_ptr, rooms_ptr, clusters, HAS_ROOM: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """[ROWS]: the nearest centroid of each row of `x`, or the nearest one that `rooms_ptr`, (C,), has room for."""
    best, nearest = initial_best(x.shape[0], x.dtype, ACC)  # [ROWS], [ROWS]
    for first in range(0, clusters, CHUNK):
        current = load_centroids(centroids_ptr, first, clusters, D, CHUNK)  # [CHUNK, D]
        rounded, norms = half_norms(current, first, clusters, CHUNK, x.dtype, ACC)  # [CHUNK, D], [CHUNK]
        scores = affinity(x, rounded, norms, ACC)  # [ROWS, CHUNK]
        if HAS_ROOM:
            offs_cluster = first + tl.arange(0, CHUNK)  # [CHUNK]
            room = tl.load(rooms_ptr + offs_cluster, mask=offs_cluster < clusters, other=0)  # [CHUNK]
            scores = tl.where((room > 0)[None, :], scores, float("-inf"))
        best, nearest = best_of_chunk(scores, first, best, nearest, CHUNK, x.dtype)  # [ROWS], [ROWS]
    return nearest
