"""Clusters of all queries and keys, and how the keys are spread about their centroids, as a sequence of kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from muse_attention.backends.triton import clustering
from muse_attention.backends.triton.filling import copied
from muse_attention.backends.triton.key_spread import find_key_spread
from muse_attention.core.structures import Side


def find_clusters(order: Tensor, *tensors_and_settings: Any) -> tuple[Tensor, ...]:
    """Tables of each side, (batch, heads, clusters, D) and (batch, heads, N), and the (batch, key heads, D) spread of
    keys."""
    *tensors, how, config = tensors_and_settings
    sides = [Side(tensor.flatten(0, 1), *of_side) for tensor, of_side in zip(tensors, how, strict=True)]
    if len({side.clusters for side in sides}) == 1:
        # Clustering is a chain of small steps: queries and keys take them together.
        together = clustering.cluster(sides, order, config)
        found = [(copied(centroids), copied(assignment)) for centroids, assignment in together]
    else:
        found = [of_side for side in sides for of_side in clustering.cluster([side], order, config)]
    tables = [
        table.unflatten(0, tensor.shape[:2])
        for tensor, of_side in zip(tensors, found, strict=True)
        for table in of_side
    ]
    if config.needs_spread:
        spread = find_key_spread(sides[-1].vectors, *found[-1])
        tables.append(spread.unflatten(0, tensors[-1].shape[:2]))
    return tuple(tables)
