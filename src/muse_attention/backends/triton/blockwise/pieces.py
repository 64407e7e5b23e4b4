"""Lists of the pieces of keys that each tile of queries retrieves, and of the queries that retrieve each bucket.

The pieces of a tile are sorted by the first row that wants them. Pieces that only later rows want come after all that
an earlier row attends to, so they do not change a bit of its sums.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import PIECE, Geometry
from muse_attention.backends.triton.blockwise.sorting import Order
from muse_attention.backends.triton.device_functions import load_once
from muse_attention.backends.triton.numbers import cdiv, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel

_MOST_LISTED = 1 << 24
"""Most pieces in the lists of a head. If more could be retrieved, there are several rounds. The limit is per head:
rounds order the sums, and a head's bits must not depend on other heads."""
_SIZES = ("blocks", "seen_blocks", "key_clusters", "query_tiles", "shared_by")
SIZES_OF_KEYS = ("length", "block_size", "blocks", "seen_blocks", "query_tiles", "key_room", "shared_by")
"""Sizes that a kernel needs to find the keys that a tile retrieves."""

LIST_PIECES = {"COLUMNS": 512, "WANTED": 16, "num_warps": 1}
LIST_STRIPS = {"COLUMNS": 8, "TILES": 128, "num_warps": 4}
STRIP = 16
"""Rows of a strip."""

PIECE_SIZE = tl.constexpr(PIECE)
STRIP_SIZE = tl.constexpr(STRIP)
NO_ROW = tl.constexpr(255)


def ranges_of_columns(geometry: Geometry) -> list[tuple[int, int]]:
    """Ranges of columns, in whole blocks, small enough to list all their pieces; one range if that is possible."""
    blocks, columns = geometry.seen_blocks, geometry.config.key_clusters
    pieces_per_block = geometry.blocks * geometry.query_tiles * (geometry.key_room // PIECE)
    at_once = max(1, min(blocks, _MOST_LISTED // pieces_per_block))
    if geometry.is_causal and 2 * at_once >= blocks:
        at_once = blocks
    return [(begin * columns, min(begin + at_once, blocks) * columns) for begin in range(0, blocks, at_once)]


def list_pieces(first_rows: Tensor, begin: int, end: int, order: Order, geometry: Geometry) -> dict[str, Any]:
    """Arguments of kernels: what each tile of queries retrieves of the columns `begin .. end - 1`, from
    (H, nb, tiles, seen blocks K) first rows.

    `lists_ptr`: (H, room of all tiles) int32, each piece times 256 plus the first row that attends to it; `listed_ptr`:
    (H, nb tiles) int32, their number. `room` is that of a tile; if it `GROWS`, that of each block that the tile sees.
    """
    blocks, tiles = geometry.blocks, geometry.query_tiles
    pieces = geometry.key_room // PIECE
    grows = geometry.is_causal and end - begin == geometry.columns
    room = pieces if grows else (end - begin) // geometry.config.key_clusters * pieces
    entries = tiles * room * (blocks * (blocks - 1) // 2 if grows else blocks)
    lists = {
        "lists_ptr": order.queries.new_empty(geometry.heads, entries),
        "listed_ptr": order.queries.new_empty(geometry.heads, blocks * tiles),
        "room": room,
        "GROWS": grows,
    }
    wanted = order.queries.new_empty(geometry.heads, blocks * tiles, geometry.columns)
    _list_pieces_of_tile[(blocks * tiles, geometry.heads)](
        first_rows_ptr=first_rows, tile_info_ptr=order.query_tile_info, key_starts_ptr=order.key_starts,
        key_sizes_ptr=order.key_sizes, wanted_ptr=wanted, **lists, begin=begin, end=end, **geometry.sizes(*_SIZES),
        IS_CAUSAL=geometry.is_causal, ROWS=geometry.rows, **LIST_PIECES,
    )  # fmt: skip
    return lists


@triton.jit
def begin_of_list(head, tile, blocks, query_tiles, room, GROWS: tl.constexpr):
    """The index at which the list of a tile begins."""
    block = tile // query_tiles
    if GROWS:
        before = block * (block - 1) // 2 * query_tiles + block * (tile % query_tiles)
        return (head * (blocks * (blocks - 1) // 2 * query_tiles) + before) * room
    else:
        return (head * blocks * query_tiles + tile) * room


@triton.jit
def _load_wanted(columns_ptr, first_rows_ptr, key_starts_ptr, key_sizes_ptr, begin, number, WANTED: tl.constexpr):
    """For listed columns from `begin` on, [WANTED] each: the first row that wants them, first piece, number of
    pieces."""
    offs = begin + tl.arange(0, WANTED)  # [WANTED]
    mask = offs < number  # [WANTED]
    column = tl.load(columns_ptr + offs, mask=mask, other=0)  # [WANTED]
    first_row = tl.load(first_rows_ptr + column, mask=mask, other=255).to(tl.int32)  # [WANTED]
    piece = tl.load(key_starts_ptr + column, mask=mask, other=0) // PIECE_SIZE  # [WANTED]
    size = tl.load(key_sizes_ptr + column, mask=mask, other=0)  # [WANTED]
    return first_row, piece, tl.cdiv(size, PIECE_SIZE)


@kernel(stage="selection", do_not_specialize=[*_SIZES, "begin", "end", "room"])
def _list_pieces_of_tile(
    first_rows_ptr, tile_info_ptr, key_starts_ptr, key_sizes_ptr, wanted_ptr, lists_ptr, listed_ptr, begin, end, room,
    blocks, seen_blocks, key_clusters, query_tiles, shared_by, GROWS: tl.constexpr, IS_CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    """List the columns that a tile wants, then sort their pieces by first rows.

    Grid: (nb tiles, H). `first_rows_ptr`: (H, nb tiles, seen blocks K) uint8; `tile_info_ptr`: (H, nb tiles) int32;
    `key_starts_ptr`, `key_sizes_ptr`: (G, seen blocks K) int32; `wanted_ptr`: (H, nb tiles, seen blocks K) int32, for
    the listed columns; the others as `list_pieces` returns them.
    """
    head = tl.program_id(1).to(tl.int64)
    tile = head * tl.num_programs(0) + tl.program_id(0)
    own_block = tl.program_id(0) // query_tiles
    end = tl.minimum(end, (own_block if IS_CAUSAL else blocks) * key_clusters)
    end = tl.where(tl.load(tile_info_ptr + tile) == 0, begin, end)
    columns = seen_blocks * key_clusters
    first_rows_ptr += tile * columns
    wanted_ptr += tile * columns
    key_starts_ptr += head // shared_by * columns
    key_sizes_ptr += head // shared_by * columns
    lists_ptr += begin_of_list(head, tl.program_id(0), blocks, query_tiles, room, GROWS)
    offs_row, offs_wanted = tl.arange(0, ROWS), tl.arange(0, WANTED)  # [ROWS], [WANTED]

    # 1. The columns.
    wanted = 0
    for first in range(begin, end, COLUMNS):
        offs_column = first + tl.arange(0, COLUMNS)  # [COLUMNS]
        first_row = tl.load(first_rows_ptr + offs_column, mask=offs_column < end, other=255).to(tl.int32)  # [COLUMNS]
        is_wanted = (first_row < NO_ROW).to(tl.int32)  # [COLUMNS]
        tl.store(wanted_ptr + wanted + tl.cumsum(is_wanted, 0) - 1, offs_column, mask=is_wanted > 0)
        wanted += tl.sum(is_wanted, 0)
    if wanted == 0:
        tl.store(listed_ptr + tile, 0)
        return
    tl.debug_barrier()  # (What one thread writes, others read.)

    # 2. How many pieces begin at each row.
    count = tl.zeros([ROWS], tl.int32)
    for first in range(0, wanted, WANTED):
        # [WANTED] each
        first_row, _, number = _load_wanted(
            wanted_ptr, first_rows_ptr, key_starts_ptr, key_sizes_ptr, first, wanted, WANTED
        )
        # [WANTED, ROWS]
        count += tl.sum(tl.where(first_row[:, None] == offs_row[None, :], number[:, None], 0), 0)
    tl.store(listed_ptr + tile, tl.sum(count, 0))

    # 3. Where each piece goes.
    place = tl.cumsum(count, 0) - count  # [ROWS]
    is_before = (offs_wanted[None, :] < offs_wanted[:, None]).to(tl.float16)  # [WANTED, WANTED]
    for first in range(0, wanted, WANTED):
        # [WANTED] each
        first_row, piece, number = _load_wanted(
            wanted_ptr, first_rows_ptr, key_starts_ptr, key_sizes_ptr, first, wanted, WANTED
        )
        is_first_row = first_row[:, None] == offs_row[None, :]  # [WANTED, ROWS]
        pieces = tl.where(is_first_row, number[:, None], 0)  # [WANTED, ROWS]
        # (Small integers: half precision is exact, and a product counts faster than a scan.)
        before = tl.dot(is_before, pieces.to(tl.float16), out_dtype=tl.float32).to(tl.int32)  # [WANTED, ROWS]
        target = tl.sum(tl.where(is_first_row, before + place[None, :], 0), 1)  # [WANTED]
        entry = piece * 256 + first_row  # [WANTED]
        for extra in range(0, tl.max(number, 0)):
            tl.store(lists_ptr + target + extra, entry + extra * 256, mask=extra < number)
        place += tl.sum(pieces, 0)


@triton.jit
def load_listed(list_ptr, key_order_ptr, begin, number, KEYS: tl.constexpr):
    """For the keys of listed pieces from `begin` on, [KEYS] each: their positions, negative where there is no key, and
    the first row that attends to them, 255 for none. `number` is the number of pieces."""
    offs_key = tl.arange(0, KEYS)  # [KEYS]
    offs_piece = begin + offs_key // PIECE_SIZE  # [KEYS]
    mask_piece = offs_piece < number  # [KEYS]
    entry = tl.load(list_ptr + offs_piece, mask=mask_piece, other=255)  # [KEYS]
    place = (entry >> 8) * PIECE_SIZE + offs_key % PIECE_SIZE  # [KEYS]
    position = load_once(key_order_ptr + place, mask_piece, -1)  # [KEYS]
    return position, tl.where(position >= 0, entry & 255, 255)


def list_strips(first_rows: Tensor, order: Order, geometry: Geometry) -> dict[str, Any]:
    """Arguments of kernels: the strips of queries that retrieve each bucket, from (H, nb, tiles, seen blocks K) first
    rows. A strip is up to `STRIP_SIZE` rows of a tile; those before the first row that wants the bucket are left out.

    `strips_ptr`: (H, room) int32, the first place of each strip times 256, plus the first of its rows that attends to
    the bucket times 16, plus the last; `listed_ptr`: (H, seen blocks K) int32, their number. `tile_room` is the most
    strips that the tiles of a block have. The room is for the case that every tile retrieves every bucket it sees.
    """
    blocks = geometry.blocks
    tile_room = geometry.query_tiles * (geometry.rows // STRIP)
    seen = blocks * (blocks - 1) // (2 if geometry.is_causal else 1)
    room = geometry.config.key_clusters * tile_room * seen
    arguments = {
        "strips_ptr": order.queries.new_empty(geometry.heads, room),
        "listed_ptr": order.queries.new_empty(geometry.heads, geometry.columns),
        "tile_room": tile_room,
        "IS_CAUSAL": geometry.is_causal,
    }
    columns = min(LIST_STRIPS["COLUMNS"], power_of_two(geometry.columns))
    _list_strips_of_buckets[(cdiv(geometry.columns, columns), geometry.heads)](
        first_rows_ptr=first_rows, tile_begin_ptr=order.query_tile_begin, tile_info_ptr=order.query_tile_info,
        **arguments, columns=geometry.columns, **geometry.sizes("blocks", "key_clusters", "query_tiles"),
        MOST=geometry.rows // STRIP, **{**LIST_STRIPS, "COLUMNS": columns},
    )  # fmt: skip
    return arguments


@triton.jit
def begin_of_strips(head, block, key_cluster, blocks, key_clusters, tile_room, IS_CAUSAL: tl.constexpr):
    """The index at which the list of a bucket begins. It has room for the tiles of all blocks that see the bucket."""
    if IS_CAUSAL:
        before = block * (2 * blocks - 1 - block) // 2 * key_clusters + key_cluster * (blocks - 1 - block)
        return (head * (blocks * (blocks - 1) // 2 * key_clusters) + before) * tile_room
    else:
        return ((head * blocks + block) * key_clusters + key_cluster) * (blocks - 1) * tile_room


@kernel(stage="selection", do_not_specialize=["tile_room", "columns", "blocks", "key_clusters", "query_tiles"])
def _list_strips_of_buckets(
    first_rows_ptr, tile_begin_ptr, tile_info_ptr, strips_ptr, listed_ptr, tile_room, columns, blocks, key_clusters,
    query_tiles, IS_CAUSAL: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """List the strips that want each of some columns, in order. A tile has at most `MOST`.

    Grid: (columns / COLUMNS, H). `first_rows_ptr`: (H, nb tiles, columns) uint8; `tile_begin_ptr`, `tile_info_ptr`:
    (H, nb tiles) int32; the others as `list_strips` returns them.
    """
    head = tl.program_id(1).to(tl.int64)
    tiles = blocks * query_tiles
    offs_column, offs_tile = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, TILES)
    mask_column = offs_column < columns  # [COLUMNS]
    block, key_cluster = offs_column // key_clusters, offs_column % key_clusters  # [COLUMNS] each
    next_strip = begin_of_strips(head, block, key_cluster, blocks, key_clusters, tile_room, IS_CAUSAL)  # [COLUMNS]
    count = tl.zeros([COLUMNS], tl.int32)
    # (Blocks up to that of the first column do not see any.)
    begin = (tl.program_id(0) * COLUMNS // key_clusters + 1) * query_tiles if IS_CAUSAL else 0
    for first in range(begin, tiles, TILES):
        tile = head * tiles + first + offs_tile  # [TILES]
        mask_tile = first + offs_tile < tiles  # [TILES]
        # (A selection that is handed in may name buckets that a block does not see: there is no room for these.)
        own_block = ((first + offs_tile) // query_tiles)[:, None]  # [TILES, 1]
        is_seen = block[None, :] < own_block if IS_CAUSAL else block[None, :] != own_block  # [TILES, COLUMNS]
        mask = mask_tile[:, None] & mask_column[None, :] & is_seen  # [TILES, COLUMNS]
        ptrs = first_rows_ptr + tile[:, None] * columns + offs_column[None, :]  # [TILES, COLUMNS]
        first_row = tl.load(ptrs, mask=mask, other=255).to(tl.int32)  # [TILES, COLUMNS]
        rows = tl.load(tile_info_ptr + tile, mask=mask_tile, other=0) & 255  # [TILES]
        # [TILES, COLUMNS]
        number = tl.maximum(tl.cdiv(rows, STRIP_SIZE)[:, None] - first_row // STRIP_SIZE, 0)
        total = tl.sum(number, 0)  # [COLUMNS]
        if tl.max(total, 0) > 0:
            place = tl.load(tile_begin_ptr + tile, mask=mask_tile, other=0)  # [TILES]
            target = (next_strip + count)[None, :] + tl.cumsum(number, 0) - number  # [TILES, COLUMNS]
            for strip in range(0, MOST):
                row = (first_row // STRIP_SIZE + strip) * STRIP_SIZE  # [TILES, COLUMNS]
                last = tl.minimum(rows[:, None] - 1 - row, STRIP_SIZE - 1)  # [TILES, COLUMNS]
                entry = (place[:, None] + row) * 256 + tl.maximum(first_row - row, 0) * STRIP_SIZE + last
                tl.store(strips_ptr + target + strip, entry, mask=strip < number)
            count += total
    tl.store(listed_ptr + head * columns + offs_column, count, mask=mask_column)


@triton.jit
def load_strips(strips_ptr, begin, number, ROWS: tl.constexpr):
    """The entry of a strip for each of its rows, for strips from `begin` on, [ROWS]. Those from `number` on are left
    out."""
    offs_strip = begin + tl.arange(0, ROWS) // STRIP_SIZE  # [ROWS]
    return load_once(strips_ptr + offs_strip, offs_strip < number, (STRIP_SIZE - 1) * STRIP_SIZE)


@triton.jit
def load_rows_of_strips(query_order_ptr, entry):
    """Places and positions of the rows of listed strips, [ROWS] each; a position is negative where there is no row."""
    offs_row = tl.arange(0, entry.shape[0]) % STRIP_SIZE  # [ROWS]
    place = ((entry >> 8) & 0xFFFFFF) + offs_row  # [ROWS]
    mask_row = (offs_row >= ((entry >> 4) & 15)) & (offs_row <= (entry & 15))  # [ROWS]
    return place, load_once(query_order_ptr + place, mask_row, -1)
