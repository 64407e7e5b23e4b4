"""Queries and keys of each block in the order of their clusters: the forward pass finds it, the backward pass reads it.

All of it is one tensor of integers, an output of the operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import Geometry
from muse_attention.backends.triton.integer_tables import size_of_tables, tables_in


@dataclass(frozen=True)
class Order:
    """Tables of int32. A place counts the vectors of a head block after block, cluster after cluster, in order of
    position."""

    queries: Tensor
    """(H, nb B): the position of the query at each place"""
    query_tiles_before: Tensor
    """(H, nb, Q + 1): tiles of a block before those of each cluster"""
    query_tile_begin: Tensor
    """(H, nb, tiles): the first place of each tile"""
    query_tile_info: Tensor
    """(H, nb, tiles): its cluster times 256, plus its rows; 0 where there is no tile"""
    keys: Tensor
    """(G, seen blocks, room): the position of the key at each place; -1 for none"""
    key_starts: Tensor
    """(G, seen blocks, K): the first place of each bucket, a multiple of `PIECE`"""
    key_sizes: Tensor
    """(G, seen blocks, K): its keys"""
    key_tile_begin: Tensor
    """(G, seen blocks, tiles)"""
    key_tile_info: Tensor
    """(G, seen blocks, tiles)"""

    @staticmethod
    def shapes(geometry: Geometry) -> list[tuple[int, ...]]:
        heads, key_heads, blocks, seen = geometry.heads, geometry.key_heads, geometry.blocks, geometry.seen_blocks
        config = geometry.config
        return [
            (heads, blocks * config.block_size),
            (heads, blocks, config.query_clusters + 1),
            (heads, blocks, geometry.query_tiles),
            (heads, blocks, geometry.query_tiles),
            (key_heads, seen, geometry.key_room),
            (key_heads, seen, config.key_clusters),
            (key_heads, seen, config.key_clusters),
            (key_heads, seen, geometry.key_tiles),
            (key_heads, seen, geometry.key_tiles),
        ]

    @staticmethod
    def size(geometry: Geometry) -> int:
        """Integers that have room for all of it."""
        return size_of_tables(Order.shapes(geometry))

    @classmethod
    def of(cls, memory: Tensor, geometry: Geometry) -> Order:
        """Views of a tensor of that size."""
        return cls(*tables_in(memory, cls.shapes(geometry)))

    @property
    def of_queries(self) -> dict[str, Any]:
        """As kernels take what tells the rows of a tile of queries."""
        return {
            "query_order_ptr": self.queries,
            "tile_begin_ptr": self.query_tile_begin,
            "tile_info_ptr": self.query_tile_info,
        }

    @property
    def of_buckets(self) -> dict[str, Any]:
        """As kernels take what tells the keys of a bucket."""
        return {"key_order_ptr": self.keys, "key_starts_ptr": self.key_starts, "key_sizes_ptr": self.key_sizes}
