"""Which pieces of keys a tile of queries retrieves, as a list in memory that a loop over tiles of keys reads.

A list is of a range of columns, in the order of the first rows that want them. What later rows want comes after all
that an earlier row attends to, so its sums do not depend on them, not in a bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from muse_attention.backends.triton.blockwise.geometry import PIECE

RANGE = 256
"""Columns whose pieces one list has."""
_AT_ONCE = 64

PIECE_SIZE = tl.constexpr(PIECE)
NO_ROW = tl.constexpr(255)


def room_of_list(key_room: int, key_clusters: int, seen_blocks: int) -> int:
    """Integers that a list may need: all pieces of all blocks that a range touches."""
    blocks = min(seen_blocks, (RANGE - 2) // key_clusters + 2)
    return blocks * (key_room // PIECE)


@triton.jit
def _load_pieces(first_rows_ptr, key_starts_ptr, key_sizes_ptr, begin, end, AT_ONCE: tl.constexpr):
    """Of columns from `begin` on, [AT_ONCE] each: the first row that wants them, their first piece, and how many."""
    offs_column = begin + tl.arange(0, AT_ONCE)  # [AT_ONCE]
    mask_column = offs_column < end  # [AT_ONCE]
    first_row = tl.load(first_rows_ptr + offs_column, mask=mask_column, other=255).to(tl.int32)  # [AT_ONCE]
    is_wanted = first_row < NO_ROW  # [AT_ONCE]
    piece = tl.load(key_starts_ptr + offs_column, mask=is_wanted, other=0) // PIECE_SIZE  # [AT_ONCE]
    size = tl.load(key_sizes_ptr + offs_column, mask=is_wanted, other=0)  # [AT_ONCE]
    return first_row, piece, tl.cdiv(size, PIECE_SIZE)


@triton.jit
def list_pieces(
    first_rows_ptr, key_starts_ptr, key_sizes_ptr, list_ptr, begin, end, ROWS: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Write the pieces that are wanted of columns `begin .. end - 1`, each times 256 plus the first row that wants it;
    how many they are.

    `first_rows_ptr`: (columns,) uint8 of the tile; `key_starts_ptr`, `key_sizes_ptr`: (columns,) int32.
    """
    offs_row, offs_column = tl.arange(0, ROWS), tl.arange(0, AT_ONCE)  # [ROWS], [AT_ONCE]
    count = tl.zeros([ROWS], tl.int32)
    for at in range(begin, end, AT_ONCE):
        first_row, _, number = _load_pieces(first_rows_ptr, key_starts_ptr, key_sizes_ptr, at, end, AT_ONCE)
        # [AT_ONCE, ROWS]
        count += tl.sum(tl.where(first_row[:, None] == offs_row[None, :], number[:, None], 0), 0)
    number_of_all = tl.sum(count, 0)
    if number_of_all > 0:
        place = tl.cumsum(count, 0) - count  # [ROWS]
        is_before = (offs_column[None, :] < offs_column[:, None]).to(tl.float16)  # [AT_ONCE, AT_ONCE]
        tl.debug_barrier()  # (Nobody reads the last list any more.)
        for at in range(begin, end, AT_ONCE):
            # [AT_ONCE] each
            first_row, piece, number = _load_pieces(first_rows_ptr, key_starts_ptr, key_sizes_ptr, at, end, AT_ONCE)
            if tl.sum(number, 0) > 0:
                is_of = first_row[:, None] == offs_row[None, :]  # [AT_ONCE, ROWS]
                pieces = tl.where(is_of, number[:, None], 0)  # [AT_ONCE, ROWS]
                # (Small integers: half precision is exact, and a product counts faster than a scan.)
                before = tl.dot(is_before, pieces.to(tl.float16), out_dtype=tl.float32).to(tl.int32)
                to = tl.sum(tl.where(is_of, before + place[None, :], 0), 1)  # [AT_ONCE]
                entry = piece * 256 + first_row  # [AT_ONCE]
                for extra in range(0, tl.max(number, 0)):
                    tl.store(list_ptr + to + extra, entry + extra * 256, mask=extra < number)
                place += tl.sum(pieces, 0)
        tl.debug_barrier()  # (What one thread writes, others read.)
    return number_of_all


@triton.jit
def load_listed(list_ptr, key_order_ptr, begin, number, KEYS: tl.constexpr):
    """Of the keys of listed pieces from `begin` on, [KEYS] each: their positions, whether they exist, and the first row
    that attends to them. `number` is that of all pieces."""
    offs_key = tl.arange(0, KEYS)  # [KEYS]
    offs_piece = begin + offs_key // PIECE_SIZE  # [KEYS]
    mask_piece = offs_piece < number  # [KEYS]
    entry = tl.load(list_ptr + offs_piece, mask=mask_piece, other=255)  # [KEYS]
    place = (entry >> 8) * PIECE_SIZE + offs_key % PIECE_SIZE  # [KEYS]
    position = tl.load(key_order_ptr + place, mask=mask_piece, other=-1)  # [KEYS]
    return position, position >= 0, entry & 255
