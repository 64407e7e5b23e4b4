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
    if len({side.clusters for side in sides}) == 1:
        # Clustering is a chain of small steps: queries and keys take them together.
        found = _cluster(sides, config)
    else:
        found = [of_side for side in sides for of_side in _cluster([side], config)]
    return join_sides(query, *(table for of_side in found for table in of_side))


def _cluster(sides: list[Side], config: MuSeConfig) -> list[tuple[Tensor, Tensor]]:
    """Of sides with the same number of clusters."""
    clusters = sides[0].clusters
    length, head_dim = sides[0].vectors.shape[2:]
    heads = [(head, side) for side in sides for head in side.vectors.reshape(-1, length, head_dim)]
    dtype = compute_dtype(sides[0].vectors.dtype)
    parts = [
        clustering.cluster(
            torch.stack([head.to(dtype) * side.factor for head, side in heads[group]]),
            [side.cap for _, side in heads[group]],
            clusters,
            config,
        )
        for group in head_groups(len(heads), 2 * length * (clusters + head_dim))
    ]
    centroids, assignment = (torch.cat(part) for part in zip(*parts, strict=True))
    tensors = [side.vectors for side in sides]
    sizes = [tensor.shape[0] * tensor.shape[1] for tensor in tensors]
    return [
        (some.clone().view(*tensor.shape[:2], clusters, head_dim), assigned.clone().view(tensor.shape[:3]))
        for tensor, some, assigned in zip(tensors, centroids.split(sizes), assignment.split(sizes), strict=True)
    ]
