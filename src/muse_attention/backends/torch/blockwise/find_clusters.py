"""Clusters of the keys of each block, and of the queries before each generation. Blocks are clustered side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from muse_attention.backends.torch import clustering
from muse_attention.backends.torch.grouping import head_groups
from muse_attention.config import MuSeConfig
from muse_attention.core.cluster_shapes import ClusterShapes
from muse_attention.core.generations import Generations
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Clusters


def find_clusters(query: Tensor, key: Tensor, config: MuSeConfig, *, is_causal: bool, scale: float) -> Clusters:
    """Cluster the scaled queries and the keys of each head."""
    length, head_dim = key.shape[2:]
    generations = Generations(config.number_of_blocks(length), is_causal)
    shapes = ClusterShapes.of(config, length, head_dim, is_causal=is_causal)
    dtype = compute_dtype(query.dtype)
    queries, keys = query.flatten(0, 1), key.flatten(0, 1)
    of_queries = [
        _cluster_queries(queries[group].to(dtype) * scale, generations, config)
        for group in head_groups(queries.shape[0], 2 * length * (config.query_clusters + head_dim))
    ]
    of_keys = [
        _cluster_keys(keys[group].to(dtype), generations, config)
        for group in head_groups(keys.shape[0], 2 * length * (config.key_clusters + head_dim))
    ]
    query_centroids, query_assignment = (torch.cat(part) for part in zip(*of_queries, strict=True))
    key_centroids, key_assignment, spread = (torch.cat(part) for part in zip(*of_keys, strict=True))
    of_query_heads, of_key_heads = query.shape[:2], key.shape[:2]
    assert shapes.key_spread is not None
    return Clusters(
        query_centroids.view(*of_query_heads, *shapes.query_centroids),
        query_assignment.view(*of_query_heads, length),
        key_centroids.view(*of_key_heads, *shapes.key_centroids),
        key_assignment.view(*of_key_heads, length),
        spread.view(*of_key_heads, *shapes.key_spread),
    )


def _cluster_queries(queries: Tensor, generations: Generations, config: MuSeConfig) -> tuple[Tensor, Tensor]:
    """(heads, S, Q, D) centroids and (heads, N) assignment of (heads, N, D) queries."""
    queries = clustering.finite(queries)
    length, block_size = queries.shape[1], config.block_size
    centroids, assignment = [], torch.zeros_like(queries[..., 0], dtype=torch.int32)
    for number in range(generations.number):
        past = min(length, generations.past(number) * block_size)
        new_centroids = clustering.find_centroids(queries[:, :past], config.query_clusters, config)
        centroids.append(new_centroids)
        first = past if generations.is_causal else 0
        if first < length:
            served = slice(first, min(length, 2 * past))
            assignment[:, served] = clustering.nearest(queries[:, served], new_centroids)
    return torch.stack(centroids, 1), assignment


def _cluster_keys(keys: Tensor, generations: Generations, config: MuSeConfig) -> tuple[Tensor, Tensor, Tensor]:
    """(heads, seen blocks, K, D) centroids, (heads, N) assignment and (heads, S, D) spread of (heads, N, D) keys."""
    keys = clustering.finite(keys)
    heads, length, head_dim = keys.shape
    assignment = torch.zeros_like(keys[..., 0], dtype=torch.int32)
    centroids, largest, squares, counts = [], [], [], []
    full_blocks = length // config.block_size
    # Full blocks side by side; a short last one, which only a sequence without a causal mask sees, by itself.
    for first, last in ((0, min(full_blocks, generations.seen_blocks)), (full_blocks, generations.seen_blocks)):
        if first >= last:
            continue
        rows = slice(first * config.block_size, min(length, last * config.block_size))
        blocks = keys[:, rows].reshape(heads * (last - first), -1, head_dim)
        new_centroids = clustering.find_centroids(blocks, config.key_clusters, config)
        nearest = clustering.nearest(blocks, new_centroids)
        assignment[:, rows] = nearest.view(heads, -1)
        centroids.append(new_centroids.view(heads, last - first, -1, head_dim))
        residuals = blocks - new_centroids.gather(1, nearest.long()[..., None].expand_as(blocks))
        size = residuals.abs().amax((1, 2))
        residuals /= size.clamp(min=1e-30)[:, None, None]  # squares of large ones would overflow
        largest.append(size.view(heads, -1))
        squares.append(residuals.square().sum(1).view(heads, -1, head_dim))
        counts += [blocks.shape[1]] * (last - first)
    if not centroids:
        no_blocks = keys.new_empty(heads, 0, config.key_clusters, head_dim)
        return no_blocks, assignment, keys.new_ones(heads, generations.number, head_dim)
    spreads = [
        _spread(
            torch.cat(largest, 1)[:, : generations.past(number)],
            torch.cat(squares, 1)[:, : generations.past(number)],
            sum(counts[: generations.past(number)]),
        )
        for number in range(generations.number)
    ]
    return torch.cat(centroids, 1), assignment, torch.stack(spreads, 1)


def _spread(largest: Tensor, squares: Tensor, count: int) -> Tensor:
    """(heads, D): variance in each dimension, scaled to a mean of 1; `squares` are in units of each block's largest."""
    share = largest / largest.amax(1, keepdim=True).clamp(min=1e-30)
    variance = (share.square()[..., None] * squares).sum(1) / count
    mean = variance.mean(-1, keepdim=True)
    return torch.where(mean > 0, variance / mean.clamp(min=1e-30), 1)
