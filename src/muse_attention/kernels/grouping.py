"""Sorting rows by group, by counting: groups become ranges, and ranges are cut into tiles of equal size.

The sort is stable and has no atomics in what decides an order, so the same inputs always give the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 256
"""Rows counted together."""
_MOST_COUNTERS = 1 << 25
"""Counters in all; with more groups than that allows, PyTorch sorts."""
_MOST_GROUPS = 8192
"""Counters of one tile fit into shared memory."""


@dataclass(frozen=True)
class Groups:
    """The rows of each of `S` sequences, sorted by the group they belong to."""

    order: Tensor
    """(S, L) int32: row numbers, group after group, ascending inside each; what follows the last group is undefined"""
    starts: Tensor
    """(S, M + 1) int32: where each of `M` groups begins in `order`, and where the last one ends"""

    @property
    def number(self) -> int:
        return self.starts.shape[1] - 1


@dataclass(frozen=True)
class Tiles:
    """All groups of `S` sequences in pieces of at most a fixed number of rows."""

    group: Tensor
    """(S, T) int32: the group each tile is a piece of; -1 where there are no more tiles"""
    begin: Tensor
    """(S, T) int32: the first place of `order`"""
    end: Tensor
    """(S, T) int32: the place after the last one"""

    @property
    def grid(self) -> tuple[int, int]:
        return self.group.shape[1], self.group.shape[0]


def group_rows(group_of_row: Tensor, number_of_groups: int) -> Groups:
    """Sort the rows of (S, L) int32 by group; rows of group -1 are left out."""
    sequences, length = group_of_row.shape
    tiles = triton.cdiv(length, _TILE)
    starts = group_of_row.new_empty(sequences, number_of_groups + 1)
    if number_of_groups > _MOST_GROUPS or sequences * tiles * number_of_groups > _MOST_COUNTERS:
        last = torch.where(group_of_row < 0, number_of_groups, group_of_row)
        ordered, order = torch.sort(last, dim=1, stable=True)
        number = torch.arange(number_of_groups + 1, device=last.device, dtype=last.dtype)
        starts.copy_(torch.searchsorted(ordered, number.expand(sequences, -1).contiguous()))
        return Groups(order.int(), starts)
    counts = group_of_row.new_empty(sequences, tiles, number_of_groups)
    totals = group_of_row.new_empty(sequences, number_of_groups)
    order = torch.empty_like(group_of_row)
    _count[(tiles, sequences)](
        group_of_row, counts, length, number_of_groups, TILE=_TILE, BINS=triton.next_power_of_2(number_of_groups + 1)
    )
    columns = min(32, triton.next_power_of_2(number_of_groups))
    _sum_over_tiles[(triton.cdiv(number_of_groups, columns), sequences)](
        counts, totals, tiles, number_of_groups, ROWS=min(128, triton.next_power_of_2(tiles)), COLUMNS=columns
    )
    _exclusive_sums(totals, starts, 1)
    _place[(tiles, sequences)](group_of_row, counts, starts, order, length, number_of_groups, TILE=_TILE, STEP=32)
    return Groups(order, starts)


def tiles(groups: Groups, most_rows: int) -> Tiles:
    """Cut every group into tiles of at most `most_rows` rows; tiles of a sequence follow its order."""
    sequences, length = groups.order.shape
    most_tiles = min(triton.cdiv(length, most_rows) + groups.number, length)
    tiles_before = torch.empty_like(groups.starts)
    _exclusive_sums(groups.starts, tiles_before, most_rows)
    found = Tiles(*(groups.starts.new_empty(sequences, most_tiles) for _ in range(3)))
    width = min(128, triton.next_power_of_2(most_tiles))
    _cut[(triton.cdiv(most_tiles, width), sequences)](
        groups.starts,
        tiles_before,
        found.group,
        found.begin,
        found.end,
        most_tiles,
        groups.number,
        most_rows,
        STEPS=groups.number.bit_length(),
        WIDTH=width,
    )
    return found


def _exclusive_sums(numbers: Tensor, sums: Tensor, most_rows: int) -> None:
    """Sums before each of M numbers, and of all. More than M numbers are starts: it is then tiles that are counted."""
    sequences, groups = sums.shape[0], sums.shape[1] - 1
    width = min(1024, triton.next_power_of_2(groups))
    _sum_before[(sequences,)](
        numbers, sums, groups, most_rows, ARE_STARTS=numbers.shape[1] > groups, WIDTH=width
    )


@triton.jit(do_not_specialize=["length", "groups"])
def _count(group_of_row, counts, length, groups, TILE: tl.constexpr, BINS: tl.constexpr):
    tile, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tile * TILE + tl.arange(0, TILE)
    group = tl.load(group_of_row + sequence * length + row, mask=row < length, other=-1)
    found = tl.histogram(tl.where(group < 0, groups, group), BINS)
    number = tl.arange(0, BINS)
    at = (sequence * tl.num_programs(0) + tile) * groups + number
    tl.store(counts + at, found, mask=number < groups)


@triton.jit(do_not_specialize=["tiles", "groups"])
def _sum_over_tiles(counts, totals, tiles, groups, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Replace the counts of a tile by those of all tiles before it."""
    sequence = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros([COLUMNS], tl.int32)
    for begin in range(0, tiles, ROWS):
        tile = begin + tl.arange(0, ROWS)
        at = counts + (sequence * tiles + tile)[:, None] * groups + group[None, :]
        inside = (tile < tiles)[:, None] & (group < groups)[None, :]
        count = tl.load(at, mask=inside, other=0)
        tl.store(at, tl.cumsum(count, 0) - count + before[None, :], mask=inside)
        before += tl.sum(count, 0)
    tl.store(totals + sequence * groups + group, before, mask=group < groups)


@triton.jit(do_not_specialize=["groups", "most_rows"])
def _sum_before(numbers, sums, groups, most_rows, ARE_STARTS: tl.constexpr, WIDTH: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    before = 0
    for begin in range(0, groups, WIDTH):
        group = begin + tl.arange(0, WIDTH)
        inside = group < groups
        if ARE_STARTS:
            at = numbers + sequence * (groups + 1) + group
            size = tl.load(at + 1, mask=inside, other=0) - tl.load(at, mask=inside, other=0)
            number = (size + most_rows - 1) // most_rows
        else:
            number = tl.load(numbers + sequence * groups + group, mask=inside, other=0)
        tl.store(sums + sequence * (groups + 1) + group, tl.cumsum(number, 0) - number + before, mask=inside)
        before += tl.sum(number, 0)
    tl.store(sums + sequence * (groups + 1) + groups, before)


@triton.jit(do_not_specialize=["length", "groups"])
def _place(group_of_row, counts, starts, order, length, groups, TILE: tl.constexpr, STEP: tl.constexpr):
    tile, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group_of_row += sequence * length
    row = tile * TILE + tl.arange(0, TILE)
    group = tl.load(group_of_row + row, mask=row < length, other=-1)
    rank = tl.zeros([TILE], tl.int32)
    for begin in range(0, TILE, STEP):
        other_row = tile * TILE + begin + tl.arange(0, STEP)
        other = tl.load(group_of_row + other_row, mask=other_row < length, other=-1)
        earlier = (other[None, :] == group[:, None]) & (other_row[None, :] < row[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)
    grouped = group >= 0
    before = tl.load(counts + (sequence * tl.num_programs(0) + tile) * groups + group, mask=grouped, other=0)
    start = tl.load(starts + sequence * (groups + 1) + group, mask=grouped, other=0)
    tl.store(order + sequence * length + start + before + rank, row, mask=grouped)


@triton.jit(do_not_specialize=["most_tiles", "groups", "most_rows"])
def _cut(
    starts, tiles_before, tile_group, tile_begin, tile_end, most_tiles, groups, most_rows,
    STEPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The group of tile `t` is the last one with at most `t` tiles before it."""
    sequence = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    starts += sequence * (groups + 1)
    tiles_before += sequence * (groups + 1)
    low = tl.zeros([WIDTH], tl.int32)
    high = tl.zeros([WIDTH], tl.int32) + groups
    for _ in range(STEPS):
        middle = (low + high) // 2
        is_before = tl.load(tiles_before + middle + 1, mask=middle < groups, other=0) <= tile
        low = tl.where((low < high) & is_before, middle + 1, low)
        high = tl.where((low < high) & ~is_before, middle, high)
    found = low < groups
    begin = tl.load(starts + low, mask=found, other=0)
    begin += (tile - tl.load(tiles_before + low, mask=found, other=0)) * most_rows
    end = tl.minimum(begin + most_rows, tl.load(starts + low + 1, mask=found, other=0))
    at = sequence * most_tiles + tile
    inside = tile < most_tiles
    tl.store(tile_group + at, tl.where(found, low, -1), mask=inside)
    tl.store(tile_begin + at, begin, mask=inside)
    tl.store(tile_end + at, end, mask=inside)
