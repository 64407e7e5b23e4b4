"""Rows sorted by any group, digit after digit of its number: a stable radix sort without atomics."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.grouping import Groups, sum_before
from muse_attention.backends.triton.numbers import cdiv, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel

_TILE = 256
"""Rows ranked together."""

_DIGIT = 4
"""Bits of the group's number that one pass looks at."""


def group_rows(group_of_row: Tensor, fill_in: Groups) -> None:
    """Sort the rows of (S, L) int32 by group; rows of group -1 come after all groups."""
    sequences, length = group_of_row.shape
    tiles = cdiv(length, _TILE)
    digits = 1 << _DIGIT
    counts = group_of_row.new_empty(sequences, digits, tiles)
    totals = group_of_row.new_empty(sequences, digits)
    number_of_groups = fill_in.number
    # Group and row travel together, in one integer.
    # (Rows of no group have a number after the last one's.)
    bits, row_bits = number_of_groups.bit_length(), (length - 1).bit_length()
    dtype = torch.int32 if bits + row_bits < 32 else torch.int64
    packed = torch.empty_like(group_of_row, dtype=dtype)
    width = 1024
    _pack[(cdiv(length, width), sequences)](
        group_of_row_ptr=group_of_row, packed_ptr=packed, length=length, groups=number_of_groups, ROW_BITS=row_bits,
        WIDTH=width,
    )  # fmt: skip
    for shift in range(row_bits, row_bits + bits, _DIGIT):
        digit = {"length": length, "shift": shift, "tiles": tiles, "TILE": _TILE, "DIGITS": digits}
        _count_digits[(tiles, sequences)](packed_ptr=packed, counts_ptr=counts, **digit)
        sum_before(counts, totals)
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


@kernel(stage="sorting", do_not_specialize=["length", "groups"])
def _pack(group_of_row_ptr, packed_ptr, length, groups, ROW_BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Group and row in one integer each. Rows of no group get the number after the last.

    Grid: (L / WIDTH, S). `group_of_row_ptr`: (S, L) int32; `packed_ptr`: (S, L).
    """
    sequence = tl.program_id(1).to(tl.int64)
    offs_row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)  # [WIDTH]
    group = tl.load(group_of_row_ptr + sequence * length + offs_row, mask=offs_row < length, other=0)  # [WIDTH]
    group = tl.where(group < 0, groups, group).to(packed_ptr.dtype.element_ty)
    tl.store(packed_ptr + sequence * length + offs_row, (group << ROW_BITS) | offs_row, mask=offs_row < length)


@kernel(stage="sorting", do_not_specialize=["length", "shift", "tiles"])
def _count_digits(packed_ptr, counts_ptr, length, shift, tiles, TILE: tl.constexpr, DIGITS: tl.constexpr):
    """Count the rows of a tile that have each digit.

    Grid: (tiles, S). `packed_ptr`: (S, L); `counts_ptr`: (S, DIGITS, tiles) int32.
    """
    tile, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_place, offs_digit = tile * TILE + tl.arange(0, TILE), tl.arange(0, DIGITS)  # [TILE], [DIGITS]
    both = tl.load(packed_ptr + sequence * length + offs_place, mask=offs_place < length, other=0)  # [TILE]
    digit = (both >> shift) & (DIGITS - 1)  # [TILE]
    member = (digit[:, None] == offs_digit[None, :]) & (offs_place < length)[:, None]  # [TILE, DIGITS]
    tl.store(counts_ptr + (sequence * DIGITS + offs_digit) * tiles + tile, tl.sum(member.to(tl.int32), 0))


@kernel(stage="sorting", do_not_specialize=["length", "shift", "tiles"])
def _place_by_digit(
    packed_ptr, counts_ptr, totals_ptr, by_digit_ptr, order_ptr, length, shift, tiles, IS_LAST: tl.constexpr,
    ROW_BITS: tl.constexpr, TILE: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """Write each row of a tile where those with its digit before it end: a stable sort by one digit.

    Grid: (tiles, S). `packed_ptr`, `by_digit_ptr`: (S, L); `counts_ptr`: (S, DIGITS, tiles) int32, of the tiles before;
    `totals_ptr`: (S, DIGITS) int32; `order_ptr`: (S, L) int32, written by the last pass.
    """
    tile, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_place, offs_digit = tile * TILE + tl.arange(0, TILE), tl.arange(0, DIGITS)  # [TILE], [DIGITS]
    mask_row = offs_place < length  # [TILE]
    both = tl.load(packed_ptr + sequence * length + offs_place, mask=mask_row, other=0)  # [TILE]
    # [DIGITS, TILE]
    member = ((((both >> shift) & (DIGITS - 1))[None, :] == offs_digit[:, None]) & mask_row[None, :]).to(tl.int32)
    total = tl.load(totals_ptr + sequence * DIGITS + offs_digit)  # [DIGITS]
    start = tl.cumsum(total, 0) - total  # [DIGITS]
    start += tl.load(counts_ptr + (sequence * DIGITS + offs_digit) * tiles + tile)
    to = tl.sum(member * (tl.cumsum(member, 1) - 1 + start[:, None]), 0)  # [TILE]
    tl.store(by_digit_ptr + sequence * length + to, both, mask=mask_row)
    if IS_LAST:
        tl.store(order_ptr + sequence * length + to, both & ((1 << ROW_BITS) - 1), mask=mask_row)


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
