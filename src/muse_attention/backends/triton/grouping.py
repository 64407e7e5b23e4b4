"""Counting sorts of tokens by cluster and block, and of picks by bucket: groups become ranges.

The sorts are stable, and no atomics decide an order: the same inputs always give the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.device_functions import in_range
from muse_attention.backends.triton.numbers import cdiv, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.core.structures import Selection

_TOKENS = 128
"""Tokens in a tile."""
_ROWS = 256
"""Rows in a tile."""
_DIGIT = 4
"""Bits of a group's number that one pass sorts by."""
_COUNTS = 1024
"""Most counts summed at a time."""


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

    def __getitem__(self, sequences: slice) -> Groups:
        return Groups(self.order[sequences], self.starts[sequences])

    def ranges(self) -> tuple[Tensor, Tensor]:
        """Where the groups begin and end in `order`: views of `starts`."""
        return self.starts[:, :-1], self.starts[:, 1:]


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
    groups = fill_in or Groups(torch.empty_like(assignment), assignment.new_empty(sequences, clusters * blocks + 1))
    grid = (tiles_of_block, blocks, sequences)
    sizes = {"length": length, "block_size": block_size, "clusters": clusters, "TILE": _TOKENS}
    _count_clusters[grid](assignment_ptr=assignment, counts_ptr=counts, BINS=power_of_two(clusters + 1), **sizes)
    _sum_before_each(counts, counts, totals)
    _sum_before_each(totals, cluster_starts[:, :-1], cluster_starts[:, -1])
    _place_by_cluster[grid](
        assignment_ptr=assignment, counts_ptr=counts, cluster_starts_ptr=cluster_starts, order_ptr=groups.order,
        starts_ptr=groups.starts, STEP=32, CP=power_of_two(clusters), **sizes,
    )  # fmt: skip
    return groups


@kernel(stage="sorting", do_not_specialize=["length", "block_size", "clusters"])
def _count_clusters(assignment_ptr, counts_ptr, length, block_size, clusters, TILE: tl.constexpr, BINS: tl.constexpr):
    """Count the tokens of each cluster in a tile of a block.

    Grid: (tiles of a block, nb, S). `assignment_ptr`: (S, N) int32; `counts_ptr`: (S, C, tiles) int32.
    """
    tile, block, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    offs_place = tile * TILE + tl.arange(0, TILE)  # [TILE]
    offs_row = block * block_size + offs_place  # [TILE]
    mask_row = (offs_place < block_size) & (offs_row < length)  # [TILE]
    cluster = tl.load(assignment_ptr + sequence * length + offs_row, mask=mask_row, other=0)  # [TILE]
    cluster = tl.where(mask_row, in_range(cluster, clusters), clusters)
    offs_cluster = tl.arange(0, BINS)
    tiles = tl.num_programs(0) * tl.num_programs(1)
    offs = (sequence * clusters + offs_cluster) * tiles + block * tl.num_programs(0) + tile  # [BINS]
    tl.store(counts_ptr + offs, tl.histogram(cluster, BINS), mask=offs_cluster < clusters)


@kernel(stage="sorting", do_not_specialize=["length", "block_size", "clusters"])
def _place_by_cluster(
    assignment_ptr, counts_ptr, cluster_starts_ptr, order_ptr, starts_ptr, length, block_size, clusters,
    TILE: tl.constexpr, STEP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Write each token of a tile after the earlier tokens of its cluster.

    Grid: (tiles of a block, nb, S). `assignment_ptr`, `order_ptr`: (S, N) int32; `counts_ptr`: (S, C, tiles) int32, of
    the tiles before; `cluster_starts_ptr`: (S, C + 1) int32; `starts_ptr`: (S, C nb + 1) int32, which the first tile of
    a block fills in.
    """
    tile, block, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks, tiles = tl.num_programs(1), tl.num_programs(0) * tl.num_programs(1)
    assignment_ptr += sequence * length
    counts_ptr += sequence * clusters * tiles + block * tl.num_programs(0) + tile
    cluster_starts_ptr += sequence * (clusters + 1)
    offs_place = tile * TILE + tl.arange(0, TILE)  # [TILE]
    offs_row = block * block_size + offs_place  # [TILE]
    mask_row = (offs_place < block_size) & (offs_row < length)  # [TILE]
    cluster = in_range(tl.load(assignment_ptr + offs_row, mask=mask_row, other=0), clusters)  # [TILE]
    rank = tl.zeros([TILE], tl.int32)
    for begin in range(0, TILE, STEP):
        offs_other_place = tile * TILE + begin + tl.arange(0, STEP)  # [STEP]
        offs_other_row = block * block_size + offs_other_place  # [STEP]
        # (Rows outside of the block come after all inside.)
        mask_other = (offs_other_place < block_size) & (offs_other_row < length)  # [STEP]
        other = in_range(tl.load(assignment_ptr + offs_other_row, mask=mask_other, other=0), clusters)  # [STEP]
        earlier = (other[None, :] == cluster[:, None]) & (offs_other_row[None, :] < offs_row[:, None])  # [TILE, STEP]
        rank += tl.sum(earlier.to(tl.int32), 1)
    start = tl.load(cluster_starts_ptr + cluster, mask=mask_row, other=0)  # [TILE]
    start += tl.load(counts_ptr + cluster * tiles, mask=mask_row, other=0)
    tl.store(order_ptr + sequence * length + start + rank, offs_row, mask=mask_row)
    if tile == 0:
        offs_cluster = tl.arange(0, CP)
        first = tl.load(cluster_starts_ptr + offs_cluster, mask=offs_cluster < clusters, other=0)  # [CP]
        first += tl.load(counts_ptr + offs_cluster * tiles, mask=offs_cluster < clusters, other=0)
        block_starts_ptr = starts_ptr + sequence * (clusters * blocks + 1)
        tl.store(block_starts_ptr + offs_cluster * blocks + block, first, mask=offs_cluster < clusters)
        if block == 0:
            tl.store(block_starts_ptr + clusters * blocks, length)


def _sum_before_each(counts: Tensor, sums: Tensor, totals: Tensor) -> None:
    """Write to `sums` the sum of the int32 counts that come before each in its row, and to `totals` those of the rows.

    Rows are the last axis. `counts` are contiguous. `sums`, which may be the counts, and `totals` may be parts of
    tables, contiguous but for the distance of their rows."""
    number = counts.shape[-1]
    _sum_before[(counts.numel() // number,)](
        counts_ptr=counts, sums_ptr=sums, totals_ptr=totals, number=number, sums_stride=sums.stride(-2),
        totals_stride=totals.stride(-1), WIDTH=min(_COUNTS, power_of_two(number)),
    )  # fmt: skip


@kernel(stage="sorting", do_not_specialize=["number", "sums_stride", "totals_stride"])
def _sum_before(counts_ptr, sums_ptr, totals_ptr, number, sums_stride, totals_stride, WIDTH: tl.constexpr):
    """The sums of the counts before each of a row, and the sum of all.

    Grid: (rows,). `counts_ptr`: (rows, number) int32; `sums_ptr`: the same, `sums_stride` apart; `totals_ptr`: (rows,)
    int32, `totals_stride` apart.
    """
    row = tl.program_id(0).to(tl.int64)
    before = 0
    for begin in range(0, number, WIDTH):
        offs = begin + tl.arange(0, WIDTH)  # [WIDTH]
        count = tl.load(counts_ptr + row * number + offs, mask=offs < number, other=0)  # [WIDTH]
        tl.store(sums_ptr + row * sums_stride + offs, tl.cumsum(count, 0) - count + before, mask=offs < number)
        before += tl.sum(count, 0)
    tl.store(totals_ptr + row * totals_stride, before)


def sort_picks(selection: Selection, blocks: int, fill_in: Groups) -> None:
    """Sort the (S, L) picks of each key head by bucket, `cluster * nb + block`, digit by digit; those without a bucket
    come last."""
    sequences, length = fill_in.order.shape
    tiles = cdiv(length, _ROWS)
    digits = 1 << _DIGIT
    counts = fill_in.order.new_empty(sequences, digits, tiles)
    totals = fill_in.order.new_empty(sequences, digits)
    number_of_groups = fill_in.number
    # Group and row share one integer. (Rows of no group get the number after the last group.)
    bits, row_bits = number_of_groups.bit_length(), (length - 1).bit_length()
    dtype = torch.int32 if bits + row_bits < 32 else torch.int64
    packed = torch.empty_like(fill_in.order, dtype=dtype)
    width = 1024
    _pack[(cdiv(length, width), sequences)](
        opened_ptr=selection.opened, retrieved_ptr=selection.retrieved, packed_ptr=packed, length=length,
        groups=number_of_groups, retrieved_blocks=selection.retrieved.shape[-1], blocks=blocks, ROW_BITS=row_bits,
        WIDTH=width,
    )  # fmt: skip
    for shift in range(row_bits, row_bits + bits, _DIGIT):
        digit = {"length": length, "shift": shift, "tiles": tiles, "TILE": _ROWS, "DIGITS": digits}
        _count_digits[(tiles, sequences)](packed_ptr=packed, counts_ptr=counts, **digit)
        _sum_before_each(counts, counts, totals)
        by_digit = torch.empty_like(packed)
        _place_by_digit[(tiles, sequences)](
            packed_ptr=packed, counts_ptr=counts, totals_ptr=totals, by_digit_ptr=by_digit, order_ptr=fill_in.order,
            IS_LAST=shift + _DIGIT >= row_bits + bits, ROW_BITS=row_bits, **digit,
        )  # fmt: skip
        packed = by_digit
    width = min(128, power_of_two(number_of_groups + 1))
    _find_starts[(cdiv(number_of_groups + 1, width), sequences)](
        packed_ptr=packed, starts_ptr=fill_in.starts, length=length, groups=number_of_groups, ROW_BITS=row_bits,
        STEPS=length.bit_length(), WIDTH=width,
    )  # fmt: skip


@kernel(stage="sorting", do_not_specialize=["length", "groups", "retrieved_blocks", "blocks"])
def _pack(
    opened_ptr, retrieved_ptr, packed_ptr, length, groups, retrieved_blocks, blocks, ROW_BITS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The bucket and the number of each pick in one integer. Those without a bucket get the number after the last.

    Grid: (L / WIDTH, S). `opened_ptr`: (S, L / retrieved blocks) int32; `retrieved_ptr`: (S, L) int32; `packed_ptr`:
    (S, L).
    """
    sequence = tl.program_id(1).to(tl.int64)
    offs_row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)  # [WIDTH]
    mask_row = offs_row < length  # [WIDTH]
    opened_ptr += sequence * (length // retrieved_blocks)
    block = tl.load(retrieved_ptr + sequence * length + offs_row, mask=mask_row, other=-1)  # [WIDTH]
    cluster = tl.load(opened_ptr + offs_row // retrieved_blocks, mask=mask_row, other=-1)  # [WIDTH]
    group = tl.where((block < 0) | (cluster < 0), groups, cluster * blocks + block).to(packed_ptr.dtype.element_ty)
    tl.store(packed_ptr + sequence * length + offs_row, (group << ROW_BITS) | offs_row, mask=mask_row)


@kernel(stage="sorting", do_not_specialize=["length", "shift", "tiles"])
def _count_digits(packed_ptr, counts_ptr, length, shift, tiles, TILE: tl.constexpr, DIGITS: tl.constexpr):
    """Count the rows of a tile that have each digit.

    Grid: (tiles, S). `packed_ptr`: (S, L); `counts_ptr`: (S, DIGITS, tiles) int32.
    """
    tile, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_place, offs_digit = tile * TILE + tl.arange(0, TILE), tl.arange(0, DIGITS)  # [TILE], [DIGITS]
    packed = tl.load(packed_ptr + sequence * length + offs_place, mask=offs_place < length, other=0)  # [TILE]
    digit = (packed >> shift) & (DIGITS - 1)  # [TILE]
    member = (digit[:, None] == offs_digit[None, :]) & (offs_place < length)[:, None]  # [TILE, DIGITS]
    tl.store(counts_ptr + (sequence * DIGITS + offs_digit) * tiles + tile, tl.sum(member.to(tl.int32), 0))


@kernel(stage="sorting", do_not_specialize=["length", "shift", "tiles"])
def _place_by_digit(
    packed_ptr, counts_ptr, totals_ptr, by_digit_ptr, order_ptr, length, shift, tiles, IS_LAST: tl.constexpr,
    ROW_BITS: tl.constexpr, TILE: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """Write each row of a tile after the earlier rows with its digit: a stable sort by one digit.

    Grid: (tiles, S). `packed_ptr`, `by_digit_ptr`: (S, L); `counts_ptr`: (S, DIGITS, tiles) int32, of the tiles before;
    `totals_ptr`: (S, DIGITS) int32; `order_ptr`: (S, L) int32, written by the last pass.
    """
    tile, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_place, offs_digit = tile * TILE + tl.arange(0, TILE), tl.arange(0, DIGITS)  # [TILE], [DIGITS]
    mask_row = offs_place < length  # [TILE]
    packed = tl.load(packed_ptr + sequence * length + offs_place, mask=mask_row, other=0)  # [TILE]
    # [DIGITS, TILE]
    member = ((((packed >> shift) & (DIGITS - 1))[None, :] == offs_digit[:, None]) & mask_row[None, :]).to(tl.int32)
    total = tl.load(totals_ptr + sequence * DIGITS + offs_digit)  # [DIGITS]
    start = tl.cumsum(total, 0) - total  # [DIGITS]
    start += tl.load(counts_ptr + (sequence * DIGITS + offs_digit) * tiles + tile)
    target = tl.sum(member * (tl.cumsum(member, 1) - 1 + start[:, None]), 0)  # [TILE]
    tl.store(by_digit_ptr + sequence * length + target, packed, mask=mask_row)
    if IS_LAST:
        tl.store(order_ptr + sequence * length + target, packed & ((1 << ROW_BITS) - 1), mask=mask_row)


@kernel(stage="sorting", do_not_specialize=["length", "groups"])
def _find_starts(
    packed_ptr, starts_ptr, length, groups, ROW_BITS: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr
):
    """A group begins at the first place whose group is not smaller: a binary search.

    Grid: (groups / WIDTH, S). `packed_ptr`: (S, L), sorted; `starts_ptr`: (S, groups + 1) int32.
    """
    sequence = tl.program_id(1).to(tl.int64)
    offs_group = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)  # [WIDTH]
    packed_ptr += sequence * length
    low = tl.zeros([WIDTH], tl.int32)
    high = tl.zeros([WIDTH], tl.int32) + length
    for _ in range(STEPS):
        middle = (low + high) // 2  # [WIDTH]
        is_open = low < high  # [WIDTH]
        smaller = (tl.load(packed_ptr + middle, mask=is_open, other=0) >> ROW_BITS) < offs_group  # [WIDTH]
        low = tl.where(is_open & smaller, middle + 1, low)
        high = tl.where(is_open & (smaller == 0), middle, high)
    tl.store(starts_ptr + sequence * (groups + 1) + offs_group, low, mask=offs_group <= groups)
