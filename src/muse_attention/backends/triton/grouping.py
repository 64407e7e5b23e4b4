"""Sorting rows by group, by counting: groups become ranges, and ranges are cut into tiles of equal size.

The sorts are stable and have no atomics in what decides an order, so the same inputs always give the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.numbers import cdiv, in_range, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel

_TOKENS = 128
"""Tokens of a block ranked together."""
_TILE = 256
"""Rows ranked together by the general sort."""
_DIGIT = 4
"""Bits of the group's number that one pass of the general sort looks at."""


@dataclass(frozen=True)
class Groups:
    """The rows of each of `S` sequences, sorted by the group they belong to."""

    order: Tensor
    """(S, L) int32: row numbers, group after group, ascending inside each; rows of no group come last"""
    starts: Tensor
    """(S, M + 1) int32: where each of `M` groups begins in `order`, and where the last one ends"""

    @property
    def number(self) -> int:
        return self.starts.shape[1] - 1

    def ranges(self) -> tuple[Tensor, Tensor]:
        """Where the groups begin and end in `order`: views of `starts`."""
        return self.starts[:, :-1], self.starts[:, 1:]


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
    """(S, M + 1) int32: how many tiles come before those of each range, and how many there are"""

    @property
    def grid(self) -> tuple[int, int]:
        return self.group.shape[1], self.group.shape[0]

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.group, self.begin, self.end


def group_by_cluster_and_block(
    assignment: Tensor, clusters: int, block_size: int, fill_in: Groups | None = None
) -> Groups:
    """Sort (S, N) tokens by cluster and then by position: group `cluster * nb + block` holds those of one block."""
    sequences, length = assignment.shape
    blocks = cdiv(length, block_size)
    tiles_of_block = cdiv(min(block_size, length), _TOKENS)
    tiles = blocks * tiles_of_block
    counts = assignment.new_empty(sequences, clusters, tiles)
    totals = assignment.new_empty(sequences, clusters)
    cluster_starts = assignment.new_empty(sequences, clusters + 1)
    found = fill_in or Groups(torch.empty_like(assignment), assignment.new_empty(sequences, clusters * blocks + 1))
    grid = (tiles_of_block, blocks, sequences)
    _count_clusters[grid](
        assignment, counts, length, block_size, clusters, TILE=_TOKENS, BINS=power_of_two(clusters + 1)
    )
    _sum_rows[(clusters, sequences)](counts, totals, tiles, WIDTH=min(1024, power_of_two(tiles)))
    _sum_before[(sequences,)](totals, cluster_starts, clusters, WIDTH=min(1024, power_of_two(clusters)))
    _place_by_cluster[grid](
        assignment, counts, cluster_starts, found.order, found.starts, length, block_size, clusters, TILE=_TOKENS,
        STEP=32, CP=power_of_two(clusters),
    )  # fmt: skip
    return found


def group_rows(group_of_row: Tensor, fill_in: Groups, used: Tensor | None = None) -> None:
    """Sort the rows of (S, L) int32 by group; rows of group -1 come after all groups.

    If only so many rows are `used`, (S,) int32, the order of the others is undefined, and all of these have a group.
    """
    sequences, length = group_of_row.shape
    limits = group_of_row if used is None else used
    limit = {"IS_LIMITED": used is not None}
    tiles = cdiv(length, _TILE)
    digits = 1 << _DIGIT
    counts = group_of_row.new_empty(sequences, digits, tiles)
    totals = group_of_row.new_empty(sequences, digits)
    number_of_groups = fill_in.number
    # Group and row travel together, in one integer.
    # (Rows of no group have a number after the last one's. Among those that are used there are none.)
    largest = number_of_groups if used is None else number_of_groups - 1
    bits, row_bits = max(1, largest.bit_length()), (length - 1).bit_length()
    dtype = torch.int32 if bits + row_bits < 32 else torch.int64
    packed = torch.empty_like(group_of_row, dtype=dtype)
    width = 1024
    _pack[(cdiv(length, width), sequences)](
        group_of_row, packed, length, number_of_groups, limits, ROW_BITS=row_bits, WIDTH=width, **limit
    )
    for shift in range(row_bits, row_bits + bits, _DIGIT):
        _count_digits[(tiles, sequences)](
            packed, counts, length, shift, tiles, limits, TILE=_TILE, DIGITS=digits, **limit
        )
        _sum_rows[(digits, sequences)](counts, totals, tiles, WIDTH=min(1024, power_of_two(tiles)))
        by_digit = torch.empty_like(packed)
        _place_by_digit[(tiles, sequences)](
            packed, counts, totals, by_digit, fill_in.order, length, shift, tiles, limits,
            IS_LAST=shift + _DIGIT >= row_bits + bits, ROW_BITS=row_bits, TILE=_TILE, DIGITS=digits, **limit,
        )  # fmt: skip
        packed = by_digit
    width = min(128, power_of_two(number_of_groups + 1))
    _find_starts[(cdiv(number_of_groups + 1, width), sequences)](
        packed, fill_in.starts, length, number_of_groups, limits, ROW_BITS=row_bits, STEPS=length.bit_length(),
        WIDTH=width, **limit,
    )  # fmt: skip


def sum_before(counts: Tensor, totals: Tensor) -> None:
    """Replace each of (S, L) int32 counts by the sum of those before it; `totals` (S,) are the sums of all."""
    sequences, length = counts.shape
    _sum_rows[(1, sequences)](counts, totals, length, WIDTH=min(1024, power_of_two(length)))


def tiles(begin: Tensor, end: Tensor, most_rows: int | Tensor, most_tiles: int) -> Tiles:
    """Cut (S, M) ranges into tiles of at most `most_rows` rows, all ranges in order.

    `most_tiles` bounds their number; `most_rows` may be an (S,) int32 tensor.
    """
    sequences, ranges = begin.shape
    before = begin.new_empty(sequences, ranges + 1)
    group, first, last = (begin.new_empty(sequences, most_tiles) for _ in range(3))
    found = Tiles(group, first, last, before)
    rows = begin if isinstance(most_rows, int) else most_rows
    size = most_rows if isinstance(most_rows, int) else 0
    width = min(1024, power_of_two(ranges))
    _count_tiles[(sequences,)](begin, end, rows, before, begin.stride(0), end.stride(0), ranges, size, WIDTH=width)
    width = min(128, power_of_two(most_tiles))
    _cut[(cdiv(most_tiles, width), sequences)](
        begin, end, rows, before, *found.parts(), begin.stride(0), end.stride(0), most_tiles, ranges, size,
        STEPS=ranges.bit_length(), WIDTH=width,
    )  # fmt: skip
    return found


def tiles_of_groups(groups: Groups, most_rows: int) -> Tiles:
    length = groups.order.shape[1]
    most_tiles = min(cdiv(length, most_rows) + groups.number, length)
    return tiles(*groups.ranges(), most_rows, most_tiles)


@kernel(do_not_specialize=["length", "block_size", "clusters"])
def _count_clusters(assignment, counts, length, block_size, clusters, TILE: tl.constexpr, BINS: tl.constexpr):
    tile, block, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    place = tile * TILE + tl.arange(0, TILE)
    row = block * block_size + place
    inside = (place < block_size) & (row < length)
    cluster = in_range(tl.load(assignment + sequence * length + row, mask=inside, other=0), clusters)
    cluster = tl.where(inside, cluster, clusters)
    number = tl.arange(0, BINS)
    tiles = tl.num_programs(0) * tl.num_programs(1)
    at = (sequence * clusters + number) * tiles + block * tl.num_programs(0) + tile
    tl.store(counts + at, tl.histogram(cluster, BINS), mask=number < clusters)


@kernel(do_not_specialize=["tiles"])
def _sum_rows(counts, totals, tiles, WIDTH: tl.constexpr):
    """Replace the counts of a tile by those of all tiles before it."""
    line = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    before = 0
    for begin in range(0, tiles, WIDTH):
        tile = begin + tl.arange(0, WIDTH)
        count = tl.load(counts + line * tiles + tile, mask=tile < tiles, other=0)
        tl.store(counts + line * tiles + tile, tl.cumsum(count, 0) - count + before, mask=tile < tiles)
        before += tl.sum(count, 0)
    tl.store(totals + line, before)


@kernel(do_not_specialize=["number"])
def _sum_before(totals, sums, number, WIDTH: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    before = 0
    for begin in range(0, number, WIDTH):
        index = begin + tl.arange(0, WIDTH)
        total = tl.load(totals + sequence * number + index, mask=index < number, other=0)
        tl.store(sums + sequence * (number + 1) + index, tl.cumsum(total, 0) - total + before, mask=index < number)
        before += tl.sum(total, 0)
    tl.store(sums + sequence * (number + 1) + number, before)


@kernel(do_not_specialize=["length", "block_size", "clusters"])
def _place_by_cluster(
    assignment, counts, cluster_starts, order, starts, length, block_size, clusters, TILE: tl.constexpr,
    STEP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    tile, block, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks, tiles = tl.num_programs(1), tl.num_programs(0) * tl.num_programs(1)
    assignment += sequence * length
    counts += sequence * clusters * tiles + block * tl.num_programs(0) + tile
    cluster_starts += sequence * (clusters + 1)
    place = tile * TILE + tl.arange(0, TILE)
    row = block * block_size + place
    inside = (place < block_size) & (row < length)
    cluster = in_range(tl.load(assignment + row, mask=inside, other=0), clusters)
    rank = tl.zeros([TILE], tl.int32)
    for begin in range(0, TILE, STEP):
        other_place = tile * TILE + begin + tl.arange(0, STEP)
        other_row = block * block_size + other_place
        # (Those outside of the block come after all that are inside.)
        other = tl.load(assignment + other_row, mask=(other_place < block_size) & (other_row < length), other=0)
        other = in_range(other, clusters)
        earlier = (other[None, :] == cluster[:, None]) & (other_row[None, :] < row[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)
    start = tl.load(cluster_starts + cluster, mask=inside, other=0)
    start += tl.load(counts + cluster * tiles, mask=inside, other=0)
    tl.store(order + sequence * length + start + rank, row, mask=inside)
    if tile == 0:
        number = tl.arange(0, CP)
        first = tl.load(cluster_starts + number, mask=number < clusters, other=0)
        first += tl.load(counts + number * tiles, mask=number < clusters, other=0)
        starts_here = starts + sequence * (clusters * blocks + 1)
        tl.store(starts_here + number * blocks + block, first, mask=number < clusters)
        if block == 0:
            tl.store(starts_here + clusters * blocks, length)


@kernel(do_not_specialize=["length", "groups"])
def _pack(
    group_of_row, packed, length, groups, limits, ROW_BITS: tl.constexpr, WIDTH: tl.constexpr, IS_LIMITED: tl.constexpr
):
    """Rows of no group get the number after the last."""
    sequence = tl.program_id(1).to(tl.int64)
    limit = tl.load(limits + sequence) if IS_LIMITED else length
    row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    group = tl.load(group_of_row + sequence * length + row, mask=row < limit, other=0)
    group = tl.where(group < 0, groups, group).to(packed.dtype.element_ty)
    tl.store(packed + sequence * length + row, (group << ROW_BITS) | row, mask=row < limit)


@kernel(do_not_specialize=["length", "shift", "tiles"])
def _count_digits(
    packed, counts, length, shift, tiles, limits, TILE: tl.constexpr, DIGITS: tl.constexpr, IS_LIMITED: tl.constexpr
):
    tile, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    limit = tl.load(limits + sequence) if IS_LIMITED else length
    place, number = tile * TILE + tl.arange(0, TILE), tl.arange(0, DIGITS)
    if tile * TILE >= limit:
        tl.store(counts + (sequence * DIGITS + number) * tiles + tile, tl.zeros([DIGITS], tl.int32))
        return
    digit = (tl.load(packed + sequence * length + place, mask=place < limit, other=0) >> shift) & (DIGITS - 1)
    member = (digit[:, None] == number[None, :]) & (place < limit)[:, None]
    tl.store(counts + (sequence * DIGITS + number) * tiles + tile, tl.sum(member.to(tl.int32), 0))


@kernel(do_not_specialize=["length", "shift", "tiles"])
def _place_by_digit(
    packed, counts, totals, by_digit, order, length, shift, tiles, limits, IS_LAST: tl.constexpr,
    ROW_BITS: tl.constexpr, TILE: tl.constexpr, DIGITS: tl.constexpr, IS_LIMITED: tl.constexpr,
):  # fmt: skip
    tile, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    limit = tl.load(limits + sequence) if IS_LIMITED else length
    if tile * TILE >= limit:
        return
    place, number = tile * TILE + tl.arange(0, TILE), tl.arange(0, DIGITS)
    inside = place < limit
    both = tl.load(packed + sequence * length + place, mask=inside, other=0)
    member = ((((both >> shift) & (DIGITS - 1))[None, :] == number[:, None]) & inside[None, :]).to(tl.int32)
    total = tl.load(totals + sequence * DIGITS + number)
    start = tl.cumsum(total, 0) - total
    start += tl.load(counts + (sequence * DIGITS + number) * tiles + tile)
    to = tl.sum(member * (tl.cumsum(member, 1) - 1 + start[:, None]), 0)
    tl.store(by_digit + sequence * length + to, both, mask=inside)
    if IS_LAST:
        tl.store(order + sequence * length + to, both & ((1 << ROW_BITS) - 1), mask=inside)


@kernel(do_not_specialize=["length", "groups"])
def _find_starts(
    packed, starts, length, groups, limits, ROW_BITS: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr,
    IS_LIMITED: tl.constexpr,
):  # fmt: skip
    """A group begins at the first place whose group is not smaller."""
    sequence = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    packed += sequence * length
    low = tl.zeros([WIDTH], tl.int32)
    high = tl.zeros([WIDTH], tl.int32) + (tl.load(limits + sequence) if IS_LIMITED else length)
    for _ in range(STEPS):
        middle = (low + high) // 2
        is_open = low < high
        smaller = (tl.load(packed + middle, mask=is_open, other=0) >> ROW_BITS) < group
        low = tl.where(is_open & smaller, middle + 1, low)
        high = tl.where(is_open & (smaller == 0), middle, high)
    tl.store(starts + sequence * (groups + 1) + group, low, mask=group <= groups)


@kernel(do_not_specialize=["begin_stride", "end_stride", "ranges", "size"])
def _count_tiles(begin, end, sizes, before, begin_stride, end_stride, ranges, size, WIDTH: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    most_rows = size if size > 0 else tl.load(sizes + sequence)
    sum_before = 0
    for first in range(0, ranges, WIDTH):
        index = first + tl.arange(0, WIDTH)
        inside = index < ranges
        rows = tl.load(end + sequence * end_stride + index, mask=inside, other=0)
        rows -= tl.load(begin + sequence * begin_stride + index, mask=inside, other=0)
        number = (rows + most_rows - 1) // most_rows
        at = before + sequence * (ranges + 1) + index
        tl.store(at, tl.cumsum(number, 0) - number + sum_before, mask=inside)
        sum_before += tl.sum(number, 0)
    tl.store(before + sequence * (ranges + 1) + ranges, sum_before)


@kernel(do_not_specialize=["begin_stride", "end_stride", "most_tiles", "ranges", "size"])
def _cut(
    begin, end, sizes, before, tile_group, tile_begin, tile_end, begin_stride, end_stride, most_tiles, ranges, size,
    STEPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The range of tile `t` is the last one with at most `t` tiles before it."""
    sequence = tl.program_id(1).to(tl.int64)
    most_rows = size if size > 0 else tl.load(sizes + sequence)
    tile = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    before += sequence * (ranges + 1)
    low = tl.zeros([WIDTH], tl.int32)
    high = tl.zeros([WIDTH], tl.int32) + ranges
    for _ in range(STEPS):
        middle = (low + high) // 2
        is_open = low < high
        is_before = tl.load(before + middle + 1, mask=is_open, other=0) <= tile
        low = tl.where(is_open & is_before, middle + 1, low)
        high = tl.where(is_open & (is_before == 0), middle, high)
    found = low < ranges
    first = tl.load(begin + sequence * begin_stride + low, mask=found, other=0)
    first += (tile - tl.load(before + low, mask=found, other=0)) * most_rows
    last = tl.minimum(first + most_rows, tl.load(end + sequence * end_stride + low, mask=found, other=0))
    at = sequence * most_tiles + tile
    inside = tile < most_tiles
    tl.store(tile_group + at, tl.where(found, low, -1), mask=inside)
    tl.store(tile_begin + at, first, mask=inside)
    tl.store(tile_end + at, last, mask=inside)
