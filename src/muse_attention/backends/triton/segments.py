"""Segments, the queries of each (query cluster, block): their layout, their tiles, and their scores of summaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.device_functions import dot, load_rows
from muse_attention.backends.triton.grouping import Groups
from muse_attention.backends.triton.numbers import accumulator, fitting, padded
from muse_attention.backends.triton.tiles import Tiles

ROWS_OF_TILE = 64
"""Queries in a tile, all of one segment."""


@dataclass(frozen=True)
class Segments:
    """The queries of each (query cluster, block), of all heads."""

    residuals: Tensor
    """(H, N, D), in the order of `groups`"""
    shift: Tensor
    """(H, N), likewise: what the key offset adds to all logits of a query"""
    groups: Groups
    tiles: Tiles
    blocks: int
    query_clusters: int
    key_clusters: int
    is_causal: bool

    @property
    def sizes(self) -> dict[str, int]:
        """Arguments of kernels, like the next two."""
        return {
            "length": self.residuals.shape[1],
            "blocks": self.blocks,
            "query_clusters": self.query_clusters,
            "key_clusters": self.key_clusters,
        }

    @property
    def rows(self) -> dict[str, Any]:
        """The rows of each tile."""
        return {**self.tiles.arguments, "order_ptr": self.groups.order, **self.sizes}

    @property
    def queries(self) -> dict[str, Any]:
        """What logits are computed from, and how."""
        head_dim = self.residuals.shape[-1]
        return {
            "residuals_ptr": self.residuals,
            "D": head_dim,
            "IS_CAUSAL": self.is_causal,
            "ACC": accumulator(self.residuals.dtype),
        }

    def clamped_to_clusters(self, launch: dict[str, int]) -> dict[str, int]:
        """The launch settings, with no more columns at a time than there are key clusters."""
        columns = padded(self.key_clusters)
        return {name: min(number, columns) if name == "CLUSTERS" else number for name, number in launch.items()}

    def fit(self, launch: dict[int, dict[str, int]], value_dim: int) -> dict[str, int]:
        return self.clamped_to_clusters(fitting(launch, self.residuals.shape[-1], value_dim, self.residuals.dtype))


@triton.jit
def blocks_of_segment(segment, blocks, IS_CAUSAL: tl.constexpr):
    """The block of a segment, and the number of blocks to loop over to reach all that its queries see."""
    own_block = segment % blocks
    return own_block, own_block if IS_CAUSAL else blocks


@triton.jit
def score(residual, mass_ptr, key_mean_ptr, first, offs_cluster, mask_cluster, D: tl.constexpr, ACC: tl.constexpr):
    """Key means of the summaries `first + offs_cluster`, [CLUSTERS, D], and the logits of the queries against them,
    [ROWS, CLUSTERS]."""
    means = load_rows(key_mean_ptr, first, offs_cluster, mask_cluster, D)  # [CLUSTERS, D]
    masses = tl.load(mass_ptr + first + offs_cluster, mask=mask_cluster, other=float("-inf"))  # [CLUSTERS]
    # [ROWS, CLUSTERS]
    logits = dot(residual, tl.trans(means), ACC) + masses[None, :]
    return means, logits
