"""Functions that kernels call: rows of a table as a tile, products, exponentials, scores that carry their column."""

from __future__ import annotations

import triton
import triton.language as tl

from muse_attention.backends.triton.numbers import padded

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(table_ptr, first, offs_row, mask_row, X: tl.constexpr):
    """[ROWS, X]: rows `first + offs_row` of a table with `X` columns, padded with zeros. `first` may need 64 bits,
    `offs_row` not."""
    XP: tl.constexpr = padded(X)
    offs_x = tl.arange(0, XP)  # [X]
    ptrs = table_ptr + first * X + offs_row[:, None] * X + offs_x[None, :]  # [ROWS, X]
    if X == XP:
        return tl.load(ptrs, mask=mask_row[:, None], other=0.0)
    else:
        return tl.load(ptrs, mask=mask_row[:, None] & (offs_x < X)[None, :], other=0.0)


@triton.jit
def load_row(table_ptr, row, X: tl.constexpr):
    """[X]: a row of a table with `X` columns, padded with zeros."""
    offs_x = tl.arange(0, padded(X))  # [X]
    return tl.load(table_ptr + row * X + offs_x, mask=offs_x < X, other=0.0)


@triton.jit
def store_rows(table_ptr, first, offs_row, mask_row, tile, X: tl.constexpr):
    """Write a tile [ROWS, X] to rows `first + offs_row` of a table with `X` columns."""
    XP: tl.constexpr = padded(X)
    offs_x = tl.arange(0, XP)  # [X]
    ptrs = table_ptr + first * X + offs_row[:, None] * X + offs_x[None, :]  # [ROWS, X]
    if X == XP:
        tl.store(ptrs, tile, mask=mask_row[:, None])
    else:
        tl.store(ptrs, tile, mask=mask_row[:, None] & (offs_x < X)[None, :])


@triton.jit
def load_once(ptrs, mask, OTHER):
    """[N]: a vector that is loaded once and then exchanged between threads where another layout is needed.

    Triton loads a vector shorter than the threads of a program anew for each layout, number by number, with an address
    and a mask for each: most of the instructions of a loop. A tile of two equal columns is long enough to avoid it.
    """
    if ptrs.shape[0] >= 128:
        return tl.load(ptrs, mask=mask, other=OTHER)
    else:
        ptrs = tl.broadcast_to(ptrs[:, None], (ptrs.shape[0], 2))  # [N, 2]
        return tl.max(tl.load(ptrs, mask=mask[:, None], other=OTHER), 1).to(ptrs.dtype.element_ty)


@triton.jit
def load_pairs(table_ptr, first, offs_row, mask_row, FIRST, SECOND):
    """[ROWS] twice: both numbers of rows `first + offs_row` of a table of pairs, or `FIRST` and `SECOND`.

    Loaded once, as by `load_once`.
    """
    offs = tl.arange(0, 2)[None, :]  # [1, 2]
    ptrs = table_ptr + first * 2 + offs_row[:, None] * 2 + offs  # [ROWS, 2]
    other = tl.where(offs == 0, FIRST, SECOND).to(table_ptr.dtype.element_ty)  # [1, 2]
    other = tl.broadcast_to(other, (offs_row.shape[0], 2))
    return tl.split(tl.load(ptrs, mask=mask_row[:, None], other=other))


@triton.jit
def dot(left, right, ACC: tl.constexpr):
    """[M, N]: the product of [M, K] and [K, N], in the precision of `ACC`; float32 is multiplied as such."""
    return tl.dot(left, right, input_precision="ieee", out_dtype=ACC)


@triton.jit
def add_dot(left, right, total):
    """[M, N]: the product of [M, K] and [K, N], added to a total."""
    return tl.dot(left, right, total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def exp_of_less(logits, shift, SCALE: tl.constexpr = 1.0):
    """`exp(SCALE logits - shift)`: a multiplication and addition in one, then a power of two.

    Rounding `shift` in between costs a relative error of about `|shift|` units in the last place, as much as the
    rounding of logits of that size does.
    """
    return tl.exp2(logits * (SCALE * LOG2_E) - shift * LOG2_E)


@triton.jit
def weigh(logits, largest, SCALE: tl.constexpr = 1.0, MAY_BE_EMPTY: tl.constexpr = True):
    """A step of a running softmax over logits, [ROWS, COLUMNS], still to be scaled by `SCALE`, above 0: the largest so
    far, [ROWS], which is scaled, weights relative to it, [ROWS, COLUMNS], and the factor for all sums before, [ROWS].

    The factor is exactly 1 if the largest stays, so that terms without weight change nothing. `MAY_BE_EMPTY`: all
    logits so far may be -inf.
    """
    larger = tl.maximum(largest, tl.max(logits, 1) * SCALE)  # [ROWS]
    shift = tl.where(larger == float("-inf"), 0.0, larger) if MAY_BE_EMPTY else larger  # [ROWS]
    return larger, exp_of_less(logits, shift[:, None], SCALE), tl.exp2((largest - shift) * LOG2_E)


@triton.jit
def include(logits, values, largest, total, weighted, SCALE: tl.constexpr = 1.0, MAY_BE_EMPTY: tl.constexpr = True):
    """Add terms to the running softmax of `weigh`: to the total, [ROWS], and to the weighted values, [ROWS, DV]."""
    largest, weights, kept = weigh(logits, largest, SCALE, MAY_BE_EMPTY)
    total = total * kept + tl.sum(weights, 1)
    return largest, total, add_dot(weights.to(values.dtype), values, weighted * kept[:, None])


@triton.jit
def index_in_order(scores, COLUMNS: tl.constexpr):
    """Integers that order like float32 scores, with the column in their low bits: a maximum is also an argmax.

    The low bits of the score are lost. Of equal scores the first column has the largest integer.
    """
    bits = scores.to(tl.int32, bitcast=True)  # [ROWS, COLUMNS]
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits & -COLUMNS) | (COLUMNS - 1 - tl.arange(0, COLUMNS))[None, :]


@triton.jit
def in_range(number, size):
    """`number` clamped to `0 .. size - 1`: an assignment from the caller must not lead to memory out of bounds."""
    return tl.minimum(tl.maximum(number, 0), size - 1)


@triton.jit
def finite_square(square):
    """A sum of squares after rounding: 0 if it is negative, infinite or NaN."""
    return tl.where((square > 0) & (square < float("inf")), square, 0.0)


@triton.jit
def log2_floor(number):
    """Of an integer from 1 to 2^24, read from the exponent of its float32."""
    return (number.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
