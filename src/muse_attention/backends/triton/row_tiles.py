"""Rows of a table as a tile: how kernels load and store them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(table_ptr, first, offs_row, mask_row, X: tl.constexpr, XP: tl.constexpr):
    """[ROWS, X]: rows `first + offs_row` of a table with `X` columns, padded with zeros. `first` may need 64 bits,
    `offs_row` not."""
    offs_x = tl.arange(0, XP)  # [X]
    ptrs = table_ptr + first * X + offs_row[:, None] * X + offs_x[None, :]  # [ROWS, X]
    if X == XP:
        return tl.load(ptrs, mask=mask_row[:, None], other=0.0)
    else:
        return tl.load(ptrs, mask=mask_row[:, None] & (offs_x < X)[None, :], other=0.0)


@triton.jit
def store_rows(table_ptr, first, offs_row, mask_row, tile, X: tl.constexpr, XP: tl.constexpr):
    """Write a tile [ROWS, X] to rows `first + offs_row` of a table with `X` columns."""
    offs_x = tl.arange(0, XP)  # [X]
    ptrs = table_ptr + first * X + offs_row[:, None] * X + offs_x[None, :]  # [ROWS, X]
    if X == XP:
        tl.store(ptrs, tile, mask=mask_row[:, None])
    else:
        tl.store(ptrs, tile, mask=mask_row[:, None] & (offs_x < X)[None, :])
