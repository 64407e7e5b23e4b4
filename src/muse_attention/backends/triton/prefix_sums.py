"""Sums of all counts before each."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.numbers import power_of_two
from muse_attention.backends.triton.runtime.launching import kernel

_WIDTH = 1024
"""Counts summed at a time, at most."""


def sum_before(counts: Tensor, totals: Tensor) -> None:
    """Replace each of (S, ..., T) int32 counts by the sum of those before it; `totals` (S, ...) are the sums of all."""
    sequences, tiles = counts.shape[0], counts.shape[-1]
    grid = (totals.numel() // sequences, sequences)
    _sum_rows[grid](counts_ptr=counts, totals_ptr=totals, tiles=tiles, WIDTH=min(_WIDTH, power_of_two(tiles)))


def sum_to_starts(totals: Tensor, starts: Tensor) -> None:
    """Where groups of (S, M) int32 sizes begin, and where the last one ends: (S, M + 1)."""
    sequences, number = totals.shape
    _sum_before[(sequences,)](
        totals_ptr=totals, sums_ptr=starts, number=number, WIDTH=min(_WIDTH, power_of_two(number))
    )


@kernel(stage="sorting", do_not_specialize=["tiles"])
def _sum_rows(counts_ptr, totals_ptr, tiles, WIDTH: tl.constexpr):
    """Replace the counts of a tile by those of all tiles before it.

    Grid: (C, S). `counts_ptr`: (S, C, tiles) int32, in place; `totals_ptr`: (S, C) int32.
    """
    line = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    before = 0
    for begin in range(0, tiles, WIDTH):
        offs_tile = begin + tl.arange(0, WIDTH)  # [WIDTH]
        count = tl.load(counts_ptr + line * tiles + offs_tile, mask=offs_tile < tiles, other=0)  # [WIDTH]
        tl.store(counts_ptr + line * tiles + offs_tile, tl.cumsum(count, 0) - count + before, mask=offs_tile < tiles)
        before += tl.sum(count, 0)
    tl.store(totals_ptr + line, before)


@kernel(stage="sorting", do_not_specialize=["number"])
def _sum_before(totals_ptr, sums_ptr, number, WIDTH: tl.constexpr):
    """The sums of all totals before each, and of all.

    Grid: (S,). `totals_ptr`: (S, number) int32; `sums_ptr`: (S, number + 1) int32.
    """
    sequence = tl.program_id(0).to(tl.int64)
    before = 0
    for begin in range(0, number, WIDTH):
        offs = begin + tl.arange(0, WIDTH)  # [WIDTH]
        total = tl.load(totals_ptr + sequence * number + offs, mask=offs < number, other=0)  # [WIDTH]
        tl.store(sums_ptr + sequence * (number + 1) + offs, tl.cumsum(total, 0) - total + before, mask=offs < number)
        before += tl.sum(total, 0)
    tl.store(sums_ptr + sequence * (number + 1) + number, before)
