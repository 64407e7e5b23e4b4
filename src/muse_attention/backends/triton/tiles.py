"""Ranges of rows cut into tiles of equal size, and how a program finds its tile."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.grouping import Groups
from muse_attention.backends.triton.numbers import cdiv, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel


@dataclass(frozen=True)
class Tiles:
    """Ranges of `S` sequences in pieces of at most a fixed number of rows."""

    group: Tensor
    """(S, T) int32: the range each tile is a piece of; -1 where there are no more tiles"""
    begin: Tensor
    """(S, T) int32: the first row"""
    end: Tensor
    """(S, T) int32: the row after the last one"""
    before: Tensor
    """(S, M + 1) int32: the number of tiles before each range; last, the number of all tiles"""

    @property
    def grid(self) -> tuple[int, int]:
        return self.group.shape[1], self.group.shape[0]

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Arguments of kernels."""
        return {"tile_group_ptr": self.group, "tile_begin_ptr": self.begin, "tile_end_ptr": self.end}


def cut_ranges(begin: Tensor, end: Tensor, max_rows: int | Tensor, max_tiles: int) -> Tiles:
    """Cut (S, M) ranges into tiles of at most `max_rows` rows, all ranges in order.

    `max_tiles` bounds their number; `max_rows` may be an (S,) int32 tensor.
    """
    sequences, ranges = begin.shape
    before = begin.new_empty(sequences, ranges + 1)
    group, first, last = (begin.new_empty(sequences, max_tiles) for _ in range(3))
    tiles = Tiles(group, first, last, before)
    ranges_to_cut = {
        "begin_ptr": begin,
        "end_ptr": end,
        "sizes_ptr": begin if isinstance(max_rows, int) else max_rows,
        "before_ptr": before,
        "begin_stride": begin.stride(0),
        "end_stride": end.stride(0),
        "ranges": ranges,
        "size": max_rows if isinstance(max_rows, int) else 0,
    }
    _count_tiles[(sequences,)](WIDTH=min(1024, power_of_two(ranges)), **ranges_to_cut)
    width = min(128, power_of_two(max_tiles))
    _cut[(cdiv(max_tiles, width), sequences)](
        max_tiles=max_tiles, STEPS=ranges.bit_length(), WIDTH=width, **ranges_to_cut, **tiles.arguments
    )
    return tiles


def cut_groups(groups: Groups, max_rows: int) -> Tiles:
    length = groups.order.shape[1]
    max_tiles = min(cdiv(length, max_rows) + groups.number, length)
    return cut_ranges(*groups.ranges(), max_rows, max_tiles)


@triton.jit
def load_tile(tile_group_ptr):
    """The tile of this program: its sequence, its number among those of all sequences, and its group, which is negative
    where there are no more tiles. Programs have the `grid` of the tiles."""
    sequence = tl.program_id(1).to(tl.int64)
    tile = sequence * tl.num_programs(0) + tl.program_id(0)
    return sequence, tile, tl.load(tile_group_ptr + tile)


@triton.jit
def load_places(tile_begin_ptr, tile_end_ptr, tile, ROWS: tl.constexpr):
    """[ROWS]: the rows of a tile, counted from the first row of its sequence, and which of them exist."""
    offs_place = tl.load(tile_begin_ptr + tile) + tl.arange(0, ROWS)  # [ROWS]
    return offs_place, offs_place < tl.load(tile_end_ptr + tile)


@triton.jit
def load_places_from_begin(tile_begin_ptr, tile_end_ptr, tile, ROWS: tl.constexpr):
    """The first row of a tile; its rows, counted from there, and which of them exist: [ROWS]."""
    begin = tl.load(tile_begin_ptr + tile)
    offs_place = tl.arange(0, ROWS)
    return begin, offs_place, offs_place < tl.load(tile_end_ptr + tile) - begin


@kernel(stage="sorting", do_not_specialize=["begin_stride", "end_stride", "ranges", "size"])
def _count_tiles(
    begin_ptr, end_ptr, sizes_ptr, before_ptr, begin_stride, end_stride, ranges, size, WIDTH: tl.constexpr
):
    """The tiles before those of each range.

    Grid: (S,). `begin_ptr`, `end_ptr`: (S, ranges) int32, rows `begin_stride` and `end_stride` apart; `before_ptr`:
    (S, ranges + 1) int32. A tile has `size` rows, or, if that is 0, as many as `sizes_ptr`, (S,) int32, says.
    """
    sequence = tl.program_id(0).to(tl.int64)
    max_rows = size if size > 0 else tl.load(sizes_ptr + sequence)
    sum_before = 0
    for first in range(0, ranges, WIDTH):
        offs_range = first + tl.arange(0, WIDTH)  # [WIDTH]
        mask_range = offs_range < ranges  # [WIDTH]
        rows = tl.load(end_ptr + sequence * end_stride + offs_range, mask=mask_range, other=0)  # [WIDTH]
        rows -= tl.load(begin_ptr + sequence * begin_stride + offs_range, mask=mask_range, other=0)
        number = (rows + max_rows - 1) // max_rows  # [WIDTH]
        ptrs = before_ptr + sequence * (ranges + 1) + offs_range  # [WIDTH]
        tl.store(ptrs, tl.cumsum(number, 0) - number + sum_before, mask=mask_range)
        sum_before += tl.sum(number, 0)
    tl.store(before_ptr + sequence * (ranges + 1) + ranges, sum_before)


@kernel(stage="sorting", do_not_specialize=["begin_stride", "end_stride", "max_tiles", "ranges", "size"])
def _cut(
    begin_ptr, end_ptr, sizes_ptr, before_ptr, tile_group_ptr, tile_begin_ptr, tile_end_ptr, begin_stride, end_stride,
    max_tiles, ranges, size, STEPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The range of tile `t` is the last one with at most `t` tiles before it: a binary search.

    Grid: (tiles / WIDTH, S). As `_count_tiles`; `tile_group_ptr`, `tile_begin_ptr`, `tile_end_ptr`: (S, tiles) int32.
    """
    sequence = tl.program_id(1).to(tl.int64)
    max_rows = size if size > 0 else tl.load(sizes_ptr + sequence)
    offs_tile = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)  # [WIDTH]
    before_ptr += sequence * (ranges + 1)
    offs_range = tl.zeros([WIDTH], tl.int32)
    high = tl.zeros([WIDTH], tl.int32) + ranges
    for _ in range(STEPS):
        middle = (offs_range + high) // 2  # [WIDTH]
        is_open = offs_range < high  # [WIDTH]
        is_before = tl.load(before_ptr + middle + 1, mask=is_open, other=0) <= offs_tile  # [WIDTH]
        offs_range = tl.where(is_open & is_before, middle + 1, offs_range)
        high = tl.where(is_open & (is_before == 0), middle, high)
    mask_range = offs_range < ranges  # [WIDTH]
    first = tl.load(begin_ptr + sequence * begin_stride + offs_range, mask=mask_range, other=0)  # [WIDTH]
    first += (offs_tile - tl.load(before_ptr + offs_range, mask=mask_range, other=0)) * max_rows
    last = first + max_rows  # [WIDTH]
    last = tl.minimum(last, tl.load(end_ptr + sequence * end_stride + offs_range, mask=mask_range, other=0))
    offs = sequence * max_tiles + offs_tile  # [WIDTH]
    mask_tile = offs_tile < max_tiles  # [WIDTH]
    tl.store(tile_group_ptr + offs, tl.where(mask_range, offs_range, -1), mask=mask_tile)
    tl.store(tile_begin_ptr + offs, first, mask=mask_tile)
    tl.store(tile_end_ptr + offs, last, mask=mask_tile)
