"""Queries and keys of each block in the order of their clusters, cut into tiles.

The forward pass writes them and the backward pass reads them, in one tensor of integers, an output of the operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import KEYS_OF_TILE, PIECE, Geometry
from muse_attention.backends.triton.device_functions import in_range
from muse_attention.backends.triton.integer_tables import size_of_tables, tables_in
from muse_attention.backends.triton.numbers import cdiv, padded, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel


@dataclass(frozen=True)
class Order:
    """Tables of int32. A *place* is an index into the vectors of a head, sorted by block, cluster and position."""

    queries: Tensor
    """(H, nb B): the position of the query at each place"""
    query_tiles_before: Tensor
    """(H, nb, Q + 1): the number of tiles of a block before those of each cluster"""
    query_tile_begin: Tensor
    """(H, nb, tiles): the first place of each tile"""
    query_tile_info: Tensor
    """(H, nb, tiles): its cluster times 256, plus its rows; 0 where there is no tile"""
    keys: Tensor
    """(G, seen blocks, room): the position of the key at each place; -1 for none"""
    key_starts: Tensor
    """(G, seen blocks, K): the first place of each bucket, a multiple of `PIECE`"""
    key_sizes: Tensor
    """(G, seen blocks, K): the number of keys of each bucket"""
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
        """The number of integers that all of it needs."""
        return size_of_tables(Order.shapes(geometry))

    @classmethod
    def of(cls, memory: Tensor, geometry: Geometry) -> Order:
        """Views of a tensor of that many integers."""
        return cls(*tables_in(memory, cls.shapes(geometry)))

    @property
    def query_arguments(self) -> dict[str, Any]:
        """Arguments of kernels: the rows of each tile of queries."""
        return {
            "query_order_ptr": self.queries,
            "tile_begin_ptr": self.query_tile_begin,
            "tile_info_ptr": self.query_tile_info,
        }

    @property
    def bucket_arguments(self) -> dict[str, Any]:
        """Arguments of kernels: the keys of each bucket."""
        return {"key_order_ptr": self.keys, "key_starts_ptr": self.key_starts, "key_sizes_ptr": self.key_sizes}


_ROWS_OF_PART = 256
"""Vectors of a block that one program counts and sorts."""


def sort_queries(assignment: Tensor, geometry: Geometry, order: Order, *, first_block: int) -> None:
    """Sort by the (H, N) assignment. Blocks before `first_block` are left empty, without tiles."""
    config = geometry.config
    _sort(
        assignment, geometry.blocks, geometry, first_block=first_block, clusters=config.query_clusters,
        order_ptr=order.queries, starts_ptr=order.queries, sizes_ptr=order.queries,
        tiles_before_ptr=order.query_tiles_before, tile_begin_ptr=order.query_tile_begin,
        tile_info_ptr=order.query_tile_info, room=config.block_size, tiles=geometry.query_tiles, ARE_KEYS=False,
        PIECE=1, ROWS=config.tile,
    )  # fmt: skip


def sort_keys(assignment: Tensor, geometry: Geometry, order: Order) -> None:
    """Sort the seen blocks by the (G, N) assignment."""
    _sort(
        assignment, geometry.seen_blocks, geometry, first_block=0, clusters=geometry.config.key_clusters,
        order_ptr=order.keys, starts_ptr=order.key_starts, sizes_ptr=order.key_sizes, tiles_before_ptr=order.keys,
        tile_begin_ptr=order.key_tile_begin, tile_info_ptr=order.key_tile_info, room=geometry.key_room,
        tiles=geometry.key_tiles, ARE_KEYS=True, PIECE=PIECE, ROWS=KEYS_OF_TILE,
    )  # fmt: skip


def _sort(assignment: Tensor, blocks: int, geometry: Geometry, *, first_block: int, clusters: int, **out: Any) -> None:
    heads, length = assignment.shape
    size = geometry.config.block_size
    parts = cdiv(size, _ROWS_OF_PART)
    counts = assignment.new_empty(heads, blocks, parts, clusters)
    shared: dict[str, Any] = {
        "assignment_ptr": assignment,
        "counts_ptr": counts,
        "length": length,
        "block_size": size,
        "first_block": first_block,
        "clusters": clusters,
        "PART": _ROWS_OF_PART,
        "CP": padded(clusters),
        "TILE": max(16, min(64, 8192 // padded(clusters))),
    }
    _count_members[(parts, blocks, heads)](**shared)
    _put_in_order[(parts, blocks, heads)](**shared, **out, PARTS=power_of_two(parts))


@triton.jit
def _load_members(assignment_ptr, begin, end, clusters, CP: tl.constexpr, TILE: tl.constexpr):
    """[TILE, CP]: which cluster each vector from `begin` to `end` belongs to."""
    offs_row = begin + tl.arange(0, TILE)  # [TILE]
    cluster = in_range(tl.load(assignment_ptr + offs_row, mask=offs_row < end, other=0), clusters)  # [TILE]
    return (cluster[:, None] == tl.arange(0, CP)[None, :]) & (offs_row < end)[:, None]


@kernel(stage="sorting", do_not_specialize=["length", "block_size", "first_block", "clusters"])
def _count_members(
    assignment_ptr, counts_ptr, length, block_size, first_block, clusters, PART: tl.constexpr, CP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The number of vectors of each cluster in a part of a block.

    Grid: (parts, blocks, heads). `assignment_ptr`: (heads, N) int32; `counts_ptr`: (heads, blocks, parts, C) int32.
    """
    part, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = block * block_size
    number = tl.where(block < first_block, 0, tl.minimum(block_size, length - first))
    assignment_ptr += head * length + first
    count = tl.zeros([CP], tl.int32)
    for begin in range(part * PART, tl.minimum((part + 1) * PART, number), TILE):
        count += tl.sum(_load_members(assignment_ptr, begin, number, clusters, CP, TILE).to(tl.int32), 0)
    offs_cluster = tl.arange(0, CP)
    base = ((head * tl.num_programs(1) + block) * tl.num_programs(0) + part) * clusters
    tl.store(counts_ptr + base + offs_cluster, count, mask=offs_cluster < clusters)


@kernel(stage="sorting", do_not_specialize=["length", "block_size", "first_block", "clusters", "room", "tiles"])
def _put_in_order(
    assignment_ptr, counts_ptr, order_ptr, starts_ptr, sizes_ptr, tiles_before_ptr, tile_begin_ptr, tile_info_ptr,
    length, block_size, first_block, clusters, room, tiles, ARE_KEYS: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, CP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sort a part of a block by cluster, stably, with clusters padded to pieces; the first part also writes the tables.

    Grid: (parts, blocks, heads). `assignment_ptr`: (heads, N) int32; `counts_ptr`: (heads, blocks, parts, C) int32;
    `order_ptr`: (heads, blocks, room) int32; `starts_ptr`, `sizes_ptr`: (heads, blocks, C) int32, of keys;
    `tiles_before_ptr`: (heads, blocks, C + 1) int32, of queries; `tile_begin_ptr`, `tile_info_ptr`: (heads, blocks,
    tiles) int32.
    """
    part, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    block_index = head * tl.num_programs(1) + block
    first = block * block_size
    number = tl.where(block < first_block, 0, tl.minimum(block_size, length - first))
    assignment_ptr += head * length + first
    order_ptr += block_index * room
    offs_cluster, offs_part, offs_row = tl.arange(0, CP), tl.arange(0, PARTS), tl.arange(0, TILE)
    mask_cluster = offs_cluster < clusters  # [CP]

    # 1. Where clusters begin, and where this part begins in each.
    parts = tl.num_programs(0)
    ptrs = counts_ptr + (block_index * parts + offs_part)[:, None] * clusters + offs_cluster[None, :]  # [PARTS, CP]
    counts = tl.load(ptrs, mask=(offs_part < parts)[:, None] & mask_cluster[None, :], other=0)  # [PARTS, CP]
    count = tl.sum(counts, 0)  # [CP]
    taken = tl.cdiv(count, PIECE) * PIECE  # [CP]
    start = tl.cumsum(taken, 0) - taken  # [CP]
    place = start + tl.sum(tl.where((offs_part < part)[:, None], counts, 0), 0)  # [CP]

    # 2. Each vector goes after those of its cluster that come before it. (A product counts faster than a scan.)
    is_before = (offs_row[None, :] < offs_row[:, None]).to(tl.float16)  # [TILE, TILE]
    for begin in range(part * PART, tl.minimum((part + 1) * PART, number), TILE):
        member = _load_members(assignment_ptr, begin, number, clusters, CP, TILE)  # [TILE, CP]
        before = tl.dot(is_before, member.to(tl.float16), out_dtype=tl.float32).to(tl.int32)  # [TILE, CP]
        target = tl.sum(tl.where(member, before + place[None, :], 0), 1)  # [TILE]
        tl.store(order_ptr + target, first + begin + offs_row, mask=begin + offs_row < number)
        place += tl.sum(member.to(tl.int32), 0)
    if part > 0:
        return

    # 3. Tables of the block.
    if ARE_KEYS:
        tl.store(starts_ptr + block_index * clusters + offs_cluster, block * room + start, mask=mask_cluster)
        tl.store(sizes_ptr + block_index * clusters + offs_cluster, count, mask=mask_cluster)
        # (Padding is at the end of a piece.)
        for back in range(1, PIECE):
            is_padding = mask_cluster & (taken - back >= count)  # [CP]
            tl.store(order_ptr + start + taken - back, tl.full([CP], -1, tl.int32), mask=is_padding)
    cut = tl.cdiv(count, ROWS)  # [CP]
    before_cluster = tl.cumsum(cut, 0) - cut  # [CP]
    if not ARE_KEYS:
        tiles_before_ptr += block_index * (clusters + 1)
        tl.store(tiles_before_ptr + offs_cluster, before_cluster, mask=mask_cluster)
        tl.store(tiles_before_ptr + clusters, tl.sum(cut, 0))
    for begin in range(0, tiles, TILE):
        offs_tile = begin + offs_row  # [TILE]
        # [TILE, CP]
        is_in = (before_cluster[None, :] <= offs_tile[:, None]) & (offs_tile[:, None] < (before_cluster + cut)[None, :])
        number_in_cluster = offs_tile - tl.sum(tl.where(is_in, before_cluster[None, :], 0), 1)  # [TILE]
        cluster_start = tl.sum(tl.where(is_in, start[None, :], 0), 1)  # [TILE]
        rows = tl.sum(tl.where(is_in, count[None, :], 0), 1) - number_in_cluster * ROWS  # [TILE]
        rows = tl.minimum(rows, ROWS)
        exists = tl.sum(is_in.to(tl.int32), 1) > 0  # [TILE]
        info = tl.sum(tl.where(is_in, offs_cluster[None, :], 0), 1) * 256 + rows  # [TILE]
        mask_tile = offs_tile < tiles  # [TILE]
        tile_begin = block * room + cluster_start + number_in_cluster * ROWS  # [TILE]
        tl.store(tile_begin_ptr + block_index * tiles + offs_tile, tl.where(exists, tile_begin, 0), mask=mask_tile)
        tl.store(tile_info_ptr + block_index * tiles + offs_tile, tl.where(exists, info, 0), mask=mask_tile)
