"""Vectors of each block into the order of their clusters, and tiles of them: one program for each block."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import KEYS_OF_TILE, PIECE, Geometry
from muse_attention.backends.triton.blockwise.order import Order
from muse_attention.backends.triton.device_math import in_range
from muse_attention.backends.triton.numbers import padded
from muse_attention.backends.triton.runtime.launching import kernel


def sort_queries(assignment: Tensor, geometry: Geometry, order: Order) -> None:
    """By (H, N) clusters."""
    config = geometry.config
    _sort_block[(geometry.blocks, geometry.heads)](
        assignment_ptr=assignment, order_ptr=order.queries, starts_ptr=order.queries, sizes_ptr=order.queries,
        tiles_before_ptr=order.query_tiles_before, tile_begin_ptr=order.query_tile_begin,
        tile_info_ptr=order.query_tile_info, length=geometry.length, block_size=config.block_size,
        clusters=config.query_clusters, room=config.block_size, tiles=geometry.query_tiles, ARE_KEYS=False, PIECE=1,
        ROWS=config.tile, **_tiles(config.query_clusters),
    )  # fmt: skip


def sort_keys(assignment: Tensor, geometry: Geometry, order: Order) -> None:
    """By (G, N) clusters: the blocks that are seen."""
    config = geometry.config
    _sort_block[(geometry.seen_blocks, geometry.key_heads)](
        assignment_ptr=assignment, order_ptr=order.keys, starts_ptr=order.key_starts, sizes_ptr=order.key_sizes,
        tiles_before_ptr=order.keys, tile_begin_ptr=order.key_tile_begin, tile_info_ptr=order.key_tile_info,
        length=geometry.length, block_size=config.block_size, clusters=config.key_clusters, room=geometry.key_room,
        tiles=geometry.key_tiles, ARE_KEYS=True, PIECE=PIECE, ROWS=KEYS_OF_TILE, **_tiles(config.key_clusters),
    )  # fmt: skip


def _tiles(clusters: int) -> dict[str, int]:
    every = padded(clusters)
    return {"CP": every, "TILE": max(16, min(128, 8192 // every)), "num_warps": 8}


@kernel(stage="sorting", do_not_specialize=["length", "block_size", "clusters", "room", "tiles"])
def _sort_block(
    assignment_ptr, order_ptr, starts_ptr, sizes_ptr, tiles_before_ptr, tile_begin_ptr, tile_info_ptr, length,
    block_size, clusters, room, tiles, ARE_KEYS: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr,
    CP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A stable sort of the vectors of a block by cluster, each cluster padded to pieces, and its tiles.

    Grid: (blocks, heads). `assignment_ptr`: (heads, N) int32; `order_ptr`: (heads, blocks, room) int32; `starts_ptr`,
    `sizes_ptr`: (heads, blocks, C) int32, of keys; `tiles_before_ptr`: (heads, blocks, C + 1) int32, of queries;
    `tile_begin_ptr`, `tile_info_ptr`: (heads, blocks, tiles) int32.
    """
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    of_block = head * tl.num_programs(0) + block
    first = block * block_size
    number = tl.minimum(block_size, length - first)
    assignment_ptr += head * length + first
    order_ptr += of_block * room
    offs_cluster, offs_row = tl.arange(0, CP), tl.arange(0, TILE)  # [CP], [TILE]
    mask_cluster = offs_cluster < clusters  # [CP]

    # 1. How many each cluster has.
    count = tl.zeros([CP], tl.int32)
    for begin in range(0, number, TILE):
        mask_row = begin + offs_row < number  # [TILE]
        cluster = in_range(tl.load(assignment_ptr + begin + offs_row, mask=mask_row, other=0), clusters)  # [TILE]
        member = (cluster[:, None] == offs_cluster[None, :]) & mask_row[:, None]  # [TILE, CP]
        count += tl.sum(member.to(tl.int32), 0)
    taken = tl.cdiv(count, PIECE) * PIECE  # [CP]
    start = tl.cumsum(taken, 0) - taken  # [CP]
    if ARE_KEYS:
        tl.store(starts_ptr + of_block * clusters + offs_cluster, block * room + start, mask=mask_cluster)
        tl.store(sizes_ptr + of_block * clusters + offs_cluster, count, mask=mask_cluster)
        # (Every place that is padding is among the last of a piece.)
        for back in range(1, PIECE):
            is_padding = mask_cluster & (taken - back >= count)  # [CP]
            tl.store(order_ptr + start + taken - back, tl.full([CP], -1, tl.int32), mask=is_padding)

    # 2. Where each goes: after all of its cluster that come before it. (A product counts faster than a scan.)
    place = start  # [CP]
    is_before = (offs_row[None, :] < offs_row[:, None]).to(tl.float16)  # [TILE, TILE]
    for begin in range(0, number, TILE):
        mask_row = begin + offs_row < number  # [TILE]
        cluster = in_range(tl.load(assignment_ptr + begin + offs_row, mask=mask_row, other=0), clusters)  # [TILE]
        member = (cluster[:, None] == offs_cluster[None, :]) & mask_row[:, None]  # [TILE, CP]
        before = tl.dot(is_before, member.to(tl.float16), out_dtype=tl.float32).to(tl.int32)  # [TILE, CP]
        to = tl.sum(tl.where(member, before + place[None, :], 0), 1)  # [TILE]
        tl.store(order_ptr + to, first + begin + offs_row, mask=mask_row)
        place += tl.sum(member.to(tl.int32), 0)

    # 3. Tiles, cluster after cluster.
    cut = tl.cdiv(count, ROWS)  # [CP]
    before = tl.cumsum(cut, 0) - cut  # [CP]
    if not ARE_KEYS:
        tiles_before_ptr += of_block * (clusters + 1)
        tl.store(tiles_before_ptr + offs_cluster, before, mask=mask_cluster)
        tl.store(tiles_before_ptr + clusters, tl.sum(cut, 0))
    for begin in range(0, tiles, TILE):
        offs_tile = begin + offs_row  # [TILE]
        # [TILE, CP]
        is_of = (before[None, :] <= offs_tile[:, None]) & (offs_tile[:, None] < (before + cut)[None, :])
        number_in_cluster = offs_tile - tl.sum(tl.where(is_of, before[None, :], 0), 1)  # [TILE]
        of_cluster = tl.sum(tl.where(is_of, start[None, :], 0), 1)  # [TILE]
        rows = tl.sum(tl.where(is_of, count[None, :], 0), 1) - number_in_cluster * ROWS  # [TILE]
        rows = tl.minimum(rows, ROWS)
        exists = tl.sum(is_of.to(tl.int32), 1) > 0  # [TILE]
        info = tl.sum(tl.where(is_of, offs_cluster[None, :], 0), 1) * 256 + rows  # [TILE]
        mask_tile = offs_tile < tiles  # [TILE]
        begins = block * room + of_cluster + number_in_cluster * ROWS  # [TILE]
        tl.store(tile_begin_ptr + of_block * tiles + offs_tile, tl.where(exists, begins, 0), mask=mask_tile)
        tl.store(tile_info_ptr + of_block * tiles + offs_tile, tl.where(exists, info, 0), mask=mask_tile)
