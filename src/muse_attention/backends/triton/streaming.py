"""The paper's streaming k-means: one pass in minibatches, in which each vector pulls its nearest centroid."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.device_functions import dot
from muse_attention.backends.triton.filling import fill
from muse_attention.backends.triton.nearest import (
    Sequences,
    affinity,
    argmax,
    best_of_chunk,
    half_norms,
    initial_best,
    load_centroids,
    load_vectors,
    rows_of_head,
    store_centroids,
)
from muse_attention.backends.triton.numbers import padded
from muse_attention.backends.triton.runtime.launching import kernel

MINIBATCH = 64
DECAY = 0.9


def stream(sequences: Sequences, order: Tensor) -> None:
    """Update the centroids, as many of queries as of keys: each vector, in the (N,) `order`, pulls its nearest."""
    shared = {
        **sequences.vectors, "order_ptr": order, "clusters": sequences.clusters, "MINIBATCH": MINIBATCH, "DECAY": DECAY,
        "LOG2_DECAY": math.log2(DECAY), "num_warps": 8,
    }  # fmt: skip
    if sequences.is_cut:
        shape = (sequences.heads, sequences.clusters)
        weights = fill(sequences.query_centroids.new_empty(shape), 1.0)
        _stream_in_chunks[(sequences.heads,)](**shared, weights_ptr=weights, CHUNK=sequences.at_once)
    else:
        _stream[(sequences.heads,)](**shared, CP=padded(sequences.clusters))


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


@kernel(stage="clustering", do_not_specialize=["query_heads", "length", "clusters"])
def _stream(
    queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, order_ptr, query_heads, length, clusters,
    FACTOR: tl.constexpr, D: tl.constexpr, CP: tl.constexpr, MINIBATCH: tl.constexpr, DECAY: tl.constexpr,
    LOG2_DECAY: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One pass in minibatches, with all centroids on chip.

    Grid: (H + G,). `queries_ptr`: (H, N, D); `keys_ptr`: (G, N, D); `query_centroids_ptr`: (H, C, D) and
    `key_centroids_ptr`: (G, C, D), in place; `order_ptr`: (N,) int32.
    """
    head = tl.program_id(0)
    vectors_ptr = rows_of_head(queries_ptr, keys_ptr, head, query_heads, length, D)
    centroids_ptr = rows_of_head(query_centroids_ptr, key_centroids_ptr, head, query_heads, clusters, D)
    offs_cluster, offs_place = tl.arange(0, CP), tl.arange(0, MINIBATCH)  # [CP], [MINIBATCH]
    current = load_centroids(centroids_ptr, 0, clusters, D, CP)  # [CP, D]
    totals = current  # [CP, D]
    weights = tl.full([CP], 1.0, ACC)
    for begin in range(0, length, MINIBATCH):
        mask_row = begin + offs_place < length  # [MINIBATCH]
        offs_row = tl.load(order_ptr + begin + offs_place, mask=mask_row, other=0)  # [MINIBATCH]
        x = load_vectors(vectors_ptr, offs_row, mask_row, head < query_heads, FACTOR, D, ACC)  # [MINIBATCH, D]
        rounded, norms = half_norms(current, 0, clusters, CP, x.dtype, ACC)  # [CP, D], [CP]
        nearest = argmax(affinity(x, rounded, norms, ACC), CP, x.dtype)  # [MINIBATCH]
        nearest = tl.where(mask_row, nearest, -1)
        share = _decayed(nearest, offs_place, LOG2_DECAY, ACC)  # [MINIBATCH]
        totals, weights = _receive(totals, weights, offs_cluster, x, nearest, share, DECAY, ACC)
        current = totals / weights[:, None]
    rounded = current.to(queries_ptr.dtype.element_ty).to(ACC)
    store_centroids(centroids_ptr, 0, clusters, rounded, D, CP)


@kernel(stage="clustering", do_not_specialize=["query_heads", "length", "clusters"])
def _stream_in_chunks(
    queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, order_ptr, weights_ptr, query_heads, length,
    clusters, FACTOR: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, MINIBATCH: tl.constexpr, DECAY: tl.constexpr,
    LOG2_DECAY: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """As `_stream`, with totals and weights in memory: until the end the totals are where centroids will be.

    `weights_ptr`: (H + G, C), 1 everywhere before.
    """
    head = tl.program_id(0)
    vectors_ptr = rows_of_head(queries_ptr, keys_ptr, head, query_heads, length, D)
    centroids_ptr = rows_of_head(query_centroids_ptr, key_centroids_ptr, head, query_heads, clusters, D)
    offs_place = tl.arange(0, MINIBATCH)
    weights_ptr += head.to(tl.int64) * clusters
    for begin in range(0, length, MINIBATCH):
        mask_row = begin + offs_place < length  # [MINIBATCH]
        offs_row = tl.load(order_ptr + begin + offs_place, mask=mask_row, other=0)  # [MINIBATCH]
        x = load_vectors(vectors_ptr, offs_row, mask_row, head < query_heads, FACTOR, D, ACC)  # [MINIBATCH, D]
        best, nearest = initial_best(MINIBATCH, x.dtype, ACC)  # [MINIBATCH], [MINIBATCH]
        for chunk in range(0, clusters, CHUNK):
            offs_cluster = chunk + tl.arange(0, CHUNK)  # [CHUNK]
            weights = tl.load(weights_ptr + offs_cluster, mask=offs_cluster < clusters, other=1.0)  # [CHUNK]
            # [CHUNK, D]
            current = load_centroids(centroids_ptr, chunk, clusters, D, CHUNK) / weights[:, None]
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
            totals = load_centroids(centroids_ptr, chunk, clusters, D, CHUNK)  # [CHUNK, D]
            totals, weights = _receive(totals, weights, offs_cluster, x, nearest, share, DECAY, ACC)
            store_centroids(centroids_ptr, chunk, clusters, totals, D, CHUNK)
            tl.store(weights_ptr + offs_cluster, weights, mask=mask_cluster)
        tl.debug_barrier()
    for chunk in range(0, clusters, CHUNK):
        offs_cluster = chunk + tl.arange(0, CHUNK)
        weights = tl.load(weights_ptr + offs_cluster, mask=offs_cluster < clusters, other=1.0)
        current = load_centroids(centroids_ptr, chunk, clusters, D, CHUNK) / weights[:, None]
        rounded = current.to(queries_ptr.dtype.element_ty).to(ACC)
        store_centroids(centroids_ptr, chunk, clusters, rounded, D, CHUNK)
