"""The paper's streaming k-means: one pass in minibatches, in which each vector pulls its nearest centroid."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.device_functions import dot
from muse_attention.backends.triton.filling import fill
from muse_attention.backends.triton.nearest import (
    Vectors,
    affinity,
    argmax,
    best_of_chunk,
    half_norms,
    initial_best,
    load_centroids,
    load_vectors,
    store_centroids,
    vectors_of_sequence,
)
from muse_attention.backends.triton.numbers import padded
from muse_attention.backends.triton.runtime.launching import kernel

MINIBATCH = 64
DECAY = 0.9


def stream(vectors: Vectors, order: Tensor, centroids: Tensor) -> None:
    """Update (heads, clusters, D) `centroids`: each vector, in the (N,) `order`, pulls its nearest centroid."""
    settings = {"MINIBATCH": MINIBATCH, "DECAY": DECAY, "LOG2_DECAY": math.log2(DECAY), "num_warps": 8}
    tables = {**vectors.arguments, "order_ptr": order, "centroids_ptr": centroids}
    if vectors.is_cut:
        weights = fill(centroids.new_empty(centroids.shape[:2]), 1.0)
        _stream_in_chunks[(vectors.heads,)](**tables, weights_ptr=weights, CHUNK=vectors.at_once, **settings)
    else:
        _stream[(vectors.heads,)](**tables, CP=padded(vectors.clusters), **settings)


@triton.jit
def _decayed(nearest, offs_place, LOG2_DECAY: tl.constexpr, ACC: tl.constexpr):
    """[MINIBATCH]: the weight left to each vector after later vectors of the minibatch have come to its centroid."""
    # [MINIBATCH, MINIBATCH]
    follows = (nearest[:, None] == nearest[None, :]) & (offs_place[:, None] < offs_place[None, :])
    followers = tl.sum(follows.to(tl.int32), 1).to(ACC)  # [MINIBATCH]
    return tl.exp2(followers * LOG2_DECAY)


@triton.jit
def _receive(totals, weights, offs_cluster, x, nearest, share, DECAY: tl.constexpr, ACC: tl.constexpr):
    """Totals [CHUNK, D] and weights [CHUNK] of the centroids `offs_cluster` after a minibatch.

    A centroid with the total `t` that receives `x_1 .. x_m` has the total `DECAY^m t + sum_r DECAY^(m-r) x_r`
    afterwards: the closed form of one update per vector.
    """
    member = tl.where(nearest[:, None] == offs_cluster[None, :], share[:, None], 0.0).to(x.dtype)  # [MINIBATCH, CHUNK]
    received = dot(tl.trans(member), x, ACC)  # [CHUNK, D]
    counted = tl.sum(member.to(ACC), 0)  # [CHUNK]
    # `counted` is 1 + DECAY + .. + DECAY^(m-1), from which DECAY^m follows.
    kept = 1.0 - (1.0 - DECAY) * counted  # [CHUNK]
    return totals * kept[:, None] + received, weights * kept + counted


@kernel(stage="clustering", do_not_specialize=["first_heads", "length", "clusters"])
def _stream(
    first_ptr, second_ptr, order_ptr, centroids_ptr, first_heads, length, clusters, FACTOR: tl.constexpr,
    D: tl.constexpr, CP: tl.constexpr, MINIBATCH: tl.constexpr, DECAY: tl.constexpr, LOG2_DECAY: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """One pass in minibatches, with all centroids on chip.

    Grid: (heads,). `first_ptr`, `second_ptr`: (heads, N, D); `order_ptr`: (N,) int32; `centroids_ptr`: (heads, C, D),
    in place.
    """
    sequence = tl.program_id(0)
    vectors_ptr = vectors_of_sequence(first_ptr, second_ptr, sequence, first_heads, length, D)
    offs_cluster, offs_place = tl.arange(0, CP), tl.arange(0, MINIBATCH)  # [CP], [MINIBATCH]
    current = load_centroids(centroids_ptr, sequence, 0, clusters, D, CP)  # [CP, D]
    totals = current  # [CP, D]
    weights = tl.full([CP], 1.0, ACC)
    for begin in range(0, length, MINIBATCH):
        mask_row = begin + offs_place < length  # [MINIBATCH]
        offs_row = tl.load(order_ptr + begin + offs_place, mask=mask_row, other=0)  # [MINIBATCH]
        x = load_vectors(vectors_ptr, offs_row, mask_row, sequence < first_heads, FACTOR, D, ACC)  # [MINIBATCH, D]
        rounded, norms = half_norms(current, 0, clusters, CP, x.dtype, ACC)  # [CP, D], [CP]
        nearest = argmax(affinity(x, rounded, norms, ACC), CP, x.dtype)  # [MINIBATCH]
        nearest = tl.where(mask_row, nearest, -1)
        share = _decayed(nearest, offs_place, LOG2_DECAY, ACC)  # [MINIBATCH]
        totals, weights = _receive(totals, weights, offs_cluster, x, nearest, share, DECAY, ACC)
        current = totals / weights[:, None]
    rounded = current.to(first_ptr.dtype.element_ty).to(ACC)
    store_centroids(centroids_ptr, sequence, 0, clusters, rounded, D, CP)


@kernel(stage="clustering", do_not_specialize=["first_heads", "length", "clusters"])
def _stream_in_chunks(
    first_ptr, second_ptr, order_ptr, centroids_ptr, weights_ptr, first_heads, length, clusters,
    FACTOR: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, MINIBATCH: tl.constexpr, DECAY: tl.constexpr,
    LOG2_DECAY: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """As `_stream`, with totals and weights in memory: until the end `centroids_ptr` holds the totals.

    `weights_ptr`: (heads, C), 1 everywhere before.
    """
    sequence = tl.program_id(0)
    vectors_ptr = vectors_of_sequence(first_ptr, second_ptr, sequence, first_heads, length, D)
    offs_place = tl.arange(0, MINIBATCH)
    weights_ptr += sequence.to(tl.int64) * clusters
    for begin in range(0, length, MINIBATCH):
        mask_row = begin + offs_place < length  # [MINIBATCH]
        offs_row = tl.load(order_ptr + begin + offs_place, mask=mask_row, other=0)  # [MINIBATCH]
        x = load_vectors(vectors_ptr, offs_row, mask_row, sequence < first_heads, FACTOR, D, ACC)  # [MINIBATCH, D]
        best, nearest = initial_best(MINIBATCH, x.dtype, ACC)  # [MINIBATCH], [MINIBATCH]
        for chunk in range(0, clusters, CHUNK):
            offs_cluster = chunk + tl.arange(0, CHUNK)  # [CHUNK]
            weights = tl.load(weights_ptr + offs_cluster, mask=offs_cluster < clusters, other=1.0)  # [CHUNK]
            # [CHUNK, D]
            current = load_centroids(centroids_ptr, sequence, chunk, clusters, D, CHUNK) / weights[:, None]
            rounded, norms = half_norms(current, chunk, clusters, CHUNK, x.dtype, ACC)  # [CHUNK, D], [CHUNK]
            scores = affinity(x, rounded, norms, ACC)  # [MINIBATCH, CHUNK]
            best, nearest = best_of_chunk(scores, chunk, best, nearest, CHUNK, x.dtype)
        nearest = tl.where(mask_row, nearest, -1)
        share = _decayed(nearest, offs_place, LOG2_DECAY, ACC)  # [MINIBATCH]
        tl.debug_barrier()
        for chunk in range(0, clusters, CHUNK):
            offs_cluster = chunk + tl.arange(0, CHUNK)
            mask_cluster = offs_cluster < clusters  # [CHUNK]
            weights = tl.load(weights_ptr + offs_cluster, mask=mask_cluster, other=1.0)
            totals = load_centroids(centroids_ptr, sequence, chunk, clusters, D, CHUNK)  # [CHUNK, D]
            totals, weights = _receive(totals, weights, offs_cluster, x, nearest, share, DECAY, ACC)
            store_centroids(centroids_ptr, sequence, chunk, clusters, totals, D, CHUNK)
            tl.store(weights_ptr + offs_cluster, weights, mask=mask_cluster)
        tl.debug_barrier()
    for chunk in range(0, clusters, CHUNK):
        offs_cluster = chunk + tl.arange(0, CHUNK)
        weights = tl.load(weights_ptr + offs_cluster, mask=offs_cluster < clusters, other=1.0)
        current = load_centroids(centroids_ptr, sequence, chunk, clusters, D, CHUNK) / weights[:, None]
        rounded = current.to(first_ptr.dtype.element_ty).to(ACC)
        store_centroids(centroids_ptr, sequence, chunk, clusters, rounded, D, CHUNK)
