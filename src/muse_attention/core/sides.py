"""The two sides of a clustering: queries and keys. A side of one cluster needs no search."""

from __future__ import annotations

import torch
from torch import Tensor

from muse_attention.config import MuSeConfig
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Clusters, Side


def sides_to_cluster(query: Tensor, key: Tensor, config: MuSeConfig, *, scale: float) -> list[Side]:
    """The scaled queries and the keys; without a tilt, the keys alone."""
    keys = Side(key, 1.0, config.key_clusters, config.largest_key_cluster)
    if not config.tilt:
        return [keys]
    return [Side(query, scale, config.query_clusters, config.largest_query_cluster), keys]


def join_sides(query: Tensor, *tables: Tensor) -> Clusters:
    """Centroids and assignment of each side that was clustered.

    Without a tilt every query cluster would see the same summaries, so one with centroid 0 stands for all.
    """
    return Clusters(*tables) if len(tables) == 4 else Clusters(*_one_cluster(query), *tables)


def single_cluster(query: Tensor, key: Tensor) -> Clusters:
    """One cluster for all, centred at the origin: enough where summaries are not used."""
    return Clusters(*_one_cluster(query), *_one_cluster(key))


def _one_cluster(tensor: Tensor) -> tuple[Tensor, Tensor]:
    centroid = tensor.new_zeros(*tensor.shape[:2], 1, tensor.shape[3], dtype=compute_dtype(tensor.dtype))
    return centroid, tensor.new_zeros(tensor.shape[:3], dtype=torch.int32)
