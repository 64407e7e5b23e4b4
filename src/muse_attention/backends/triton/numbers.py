"""What a dtype of the inputs means inside a kernel, and how head dimensions are padded."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def cdiv(number: int, size: int) -> int:
    """How many of a size hold a number. (Triton's functions of that kind take longer than a launch should.)"""
    return -(-number // size)


def power_of_two(size: int) -> int:
    """The smallest that holds `size`."""
    return 1 << max(0, size - 1).bit_length()


def padded(size: int) -> int:
    """The power of two, at least 16, that holds `size`: what matrix units and ranges want."""
    return max(16, power_of_two(size))


def fitting(launch: dict[int, dict[str, int]], head_dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """How to launch a kernel: what was tuned for rows of at most so many bytes."""
    width = max(padded(head_dim), padded(value_dim)) * dtype.itemsize
    return launch[next(most for most in sorted(launch) if width <= most or most == max(launch))]


def arithmetic(dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments: sums are kept in float32 (float64 for float64), float32 is multiplied as such."""
    return {"ACC": tl.float64 if dtype == torch.float64 else tl.float32, "PRECISION": "ieee"}


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """What gradients of summaries are stored in: float16 would overflow, bfloat16 is as precise as its inputs."""
    return torch.float32 if dtype == torch.float16 else dtype


LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp_of_less(logits, shift):
    """`exp(logits - shift)`: a multiplication and addition in one, then a power of two.

    Rounding `shift` in between costs a relative error of about `|shift|` units in the last place, as much as the
    rounding of logits of that size does.
    """
    return tl.exp2(logits * LOG2_E - shift * LOG2_E)


@triton.jit
def index_in_order(scores, COLUMNS: tl.constexpr):
    """Integers that order like float32 scores, with the column in their low bits: a maximum is also an argmax.

    The low bits of the score are lost, the first of equal columns is the largest.
    """
    bits = scores.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits & -COLUMNS) | (COLUMNS - 1 - tl.arange(0, COLUMNS))[None, :]


@triton.jit
def load_rows(table, first, offset, is_row, X: tl.constexpr, XP: tl.constexpr):
    """Rows `first + offset` of a table with `X` columns, padded with zeros. `first` may need 64 bits, `offset` not."""
    column = tl.arange(0, XP)
    at = table + first * X + offset[:, None] * X + column[None, :]
    if X == XP:
        return tl.load(at, mask=is_row[:, None], other=0.0)
    else:
        return tl.load(at, mask=is_row[:, None] & (column < X)[None, :], other=0.0)


@triton.jit
def store_rows(table, first, offset, is_row, rows, X: tl.constexpr, XP: tl.constexpr):
    """Write rows `first + offset` of a table with `X` columns."""
    column = tl.arange(0, XP)
    at = table + first * X + offset[:, None] * X + column[None, :]
    if X == XP:
        tl.store(at, rows, mask=is_row[:, None])
    else:
        tl.store(at, rows, mask=is_row[:, None] & (column < X)[None, :])


@triton.jit
def in_range(number, size):
    """The nearest of `0 .. size - 1`: an assignment that was handed in must not lead outside of memory."""
    return tl.minimum(tl.maximum(number, 0), size - 1)


@triton.jit
def count_bits(words):
    """Of int32: how many bits are set."""
    rest = words.to(tl.uint32, bitcast=True)
    rest = rest - ((rest >> 1) & 0x55555555)
    rest = (rest & 0x33333333) + ((rest >> 2) & 0x33333333)
    rest = (rest + (rest >> 4)) & 0x0F0F0F0F
    return ((rest * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def lowest_bit(words):
    """Of int32: the number of the lowest bit that is set, 32 for none, and the words without it."""
    lowest = words & -words
    return count_bits(lowest - 1), words ^ lowest
