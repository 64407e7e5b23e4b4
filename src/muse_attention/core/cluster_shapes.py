"""Shapes of the clusters of a head."""

from __future__ import annotations

from typing import NamedTuple

from muse_attention.config import MuSeConfig
from muse_attention.core.generations import Generations


class ClusterShapes(NamedTuple):
    """The shapes that centroids, and the spread of keys, have for each head."""

    query_centroids: tuple[int, ...]
    key_centroids: tuple[int, ...]
    key_spread: tuple[int, ...] | None

    @classmethod
    def of(cls, config: MuSeConfig, length: int, head_dim: int, *, is_causal: bool) -> ClusterShapes:
        if config.tolerance is None:
            return cls((config.query_clusters if config.tilt else 1, head_dim), (config.key_clusters, head_dim), None)
        blocks = -(-length // config.block_size)  # (The compiler cannot call a method of a constant.)
        generations = Generations(blocks, is_causal)
        return cls(
            (generations.number, config.query_clusters, head_dim),
            (generations.seen_blocks, config.key_clusters, head_dim),
            (generations.number, head_dim),
        )
