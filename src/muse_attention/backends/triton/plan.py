"""What the kernels' forward pass leaves to the backward pass beside its results: the orders it has sorted things into.

All of it is one tensor of integers, an output of the operator.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from muse_attention.backends.triton.integer_tables import tables_in
from muse_attention.config import MuSeConfig


@dataclass(frozen=True)
class Plan:
    """Orders and starts of the segments, the buckets and the pairs, as in `Groups`."""

    segment_order: Tensor
    """(H, N)"""
    segment_starts: Tensor
    """(H, Q nb + 1)"""
    bucket_order: Tensor
    """(G, N)"""
    bucket_starts: Tensor
    """(G, K nb + 1)"""
    pair_order: Tensor
    """(G, R N picks)"""
    pair_starts: Tensor
    """(G, K nb + 1)"""

    @staticmethod
    def shapes(
        config: MuSeConfig, heads: int, key_heads: int, length: int, query_clusters: int, picks: int
    ) -> list[tuple[int, int]]:
        """`picks` are the pairs of a query."""
        blocks, key_clusters = config.number_of_blocks(length), config.key_clusters
        return [
            (heads, length),
            (heads, query_clusters * blocks + 1),
            (key_heads, length),
            (key_heads, key_clusters * blocks + 1),
            (key_heads, heads // key_heads * length * picks),
            (key_heads, key_clusters * blocks + 1),
        ]

    @classmethod
    def of(cls, memory: Tensor, shapes: list[tuple[int, int]]) -> Plan:
        """Views of a tensor with room for these shapes."""
        return cls(*tables_in(memory, shapes))

    def of_heads(self, group: slice, of_queries: slice) -> Plan:
        """The part of some key heads and their query heads."""
        return Plan(
            self.segment_order[of_queries],
            self.segment_starts[of_queries],
            self.bucket_order[group],
            self.bucket_starts[group],
            self.pair_order[group],
            self.pair_starts[group],
        )
