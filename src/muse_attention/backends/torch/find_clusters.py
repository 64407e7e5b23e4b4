"""Clusters of all queries and keys of the paper's method, a few heads at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from muse_attention.backends.torch import clustering
from muse_attention.backends.torch.layout import head_groups
from muse_attention.config import MuSeConfig
from muse_attention.core.precision import compute_dtype
from muse_attention.core.sides import join_sides, sides_to_cluster
from muse_attention.core.structures import Clusters, Side


def find_clusters(query: Tensor, key: Tensor, config: MuSeConfig, *, scale: float) -> Clusters:
    """Cluster the scaled queries and the keys of each head."""
    sides = sides_to_cluster(query, key, config, scale=scale)
    return join_sides(query, *(table for side in sides for table in _cluster(side, config)))


def _cluster(side: Side, config: MuSeConfig) -> tuple[Tensor, Tensor]:
    """Centroids (batch, heads, clusters, D) and assignment (batch, heads, N) int32."""
    length, head_dim = side.vectors.shape[2:]
    heads = side.vectors.flatten(0, 1)
    dtype = compute_dtype(heads.dtype)
    parts = []
    for group in head_groups(heads.shape[0], 2 * length * (side.clusters + head_dim)):
        vectors = clustering.finite(heads[group].to(dtype) * side.factor)
        centroids = clustering.find_centroids(vectors, side.clusters, config)
        parts.append((centroids, clustering.assign(vectors, centroids, side.cap, config)))
    centroids, assignment = (torch.cat(part) for part in zip(*parts, strict=True))
    return centroids.unflatten(0, side.vectors.shape[:2]), assignment.unflatten(0, side.vectors.shape[:2])
