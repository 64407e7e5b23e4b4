"""Rows of the inputs in the order of their groups, and what is computed row by row on the way."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.device_math import in_range
from muse_attention.backends.triton.grouping import Groups
from muse_attention.backends.triton.numbers import arithmetic, cdiv, padded
from muse_attention.backends.triton.runtime.launching import kernel

_TILE = 64


def take_rows(table: Tensor, groups: Groups) -> Tensor:
    """(S, N, X) rows in the order of their groups."""
    _, length, columns = table.shape
    taken = torch.empty_like(table)
    _take_rows[_grid(table)](
        table_ptr=table, order_ptr=groups.order, taken_ptr=taken, length=length, X=columns, XP=padded(columns),
        TILE=_TILE,
    )  # fmt: skip
    return taken


def take_residuals(
    queries: Tensor,
    centroids: Tensor,
    assignment: Tensor,
    key_offset: Tensor,
    segments: Groups,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(H, N, D): scaled queries less the centroid of their cluster, in the order of `segments`, and (H, N): their
    products with the (G, D) `key_offset`, from before the residuals are rounded."""
    heads, length, head_dim = queries.shape
    residuals, shift = torch.empty_like(queries), key_offset.new_empty(heads, length)
    _take_residuals[_grid(queries)](
        queries_ptr=queries, centroids_ptr=centroids, assignment_ptr=assignment, order_ptr=segments.order,
        key_offset_ptr=key_offset, residuals_ptr=residuals, shift_ptr=shift, length=length,
        clusters=centroids.shape[1], shared_by=heads // key_offset.shape[0], SCALE=scale, D=head_dim,
        DP=padded(head_dim), TILE=_TILE, ACC=arithmetic(queries.dtype)["ACC"],
    )  # fmt: skip
    return residuals, shift


def _grid(table: Tensor) -> tuple[int, int]:
    return cdiv(table.shape[1], _TILE), table.shape[0]


@kernel(stage="sorting", do_not_specialize=["length"])
def _take_rows(table_ptr, order_ptr, taken_ptr, length, X: tl.constexpr, XP: tl.constexpr, TILE: tl.constexpr):
    """Rows into the order of their groups.

    Grid: (N / TILE, S). `table_ptr`, `taken_ptr`: (S, N, X); `order_ptr`: (S, N) int32.
    """
    sequence = tl.program_id(1).to(tl.int64)
    offs_place, offs_x = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, XP)  # [TILE], [X]
    mask = (offs_place < length)[:, None] & (offs_x < X)[None, :]  # [TILE, X]
    offs_row = tl.load(order_ptr + sequence * length + offs_place, mask=offs_place < length, other=0)  # [TILE]
    rows = tl.load(table_ptr + (sequence * length + offs_row)[:, None] * X + offs_x[None, :], mask=mask)  # [TILE, X]
    tl.store(taken_ptr + (sequence * length + offs_place)[:, None] * X + offs_x[None, :], rows, mask=mask)


@kernel(stage="sorting", do_not_specialize=["length", "clusters", "shared_by"])
def _take_residuals(
    queries_ptr, centroids_ptr, assignment_ptr, order_ptr, key_offset_ptr, residuals_ptr, shift_ptr, length, clusters,
    shared_by, SCALE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Scaled queries less the centroid of their cluster, in the order of the segments.

    Grid: (N / TILE, H). `queries_ptr`, `residuals_ptr`: (H, N, D); `centroids_ptr`: (H, Q, D); `assignment_ptr`,
    `order_ptr`: (H, N) int32; `key_offset_ptr`: (G, D); `shift_ptr`: (H, N).
    """
    head = tl.program_id(1).to(tl.int64)
    offs_place, offs_d = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DP)  # [TILE], [D]
    mask_row = offs_place < length  # [TILE]
    mask = mask_row[:, None] & (offs_d < D)[None, :]  # [TILE, D]
    offs_row = tl.load(order_ptr + head * length + offs_place, mask=mask_row, other=0)  # [TILE]
    cluster = tl.load(assignment_ptr + head * length + offs_row, mask=mask_row, other=0)  # [TILE]
    cluster = in_range(cluster, clusters)
    cluster = head * clusters + cluster
    query_ptrs = queries_ptr + (head * length + offs_row)[:, None] * D + offs_d[None, :]  # [TILE, D]
    queries = tl.load(query_ptrs, mask=mask, other=0.0).to(ACC)  # [TILE, D]
    centroid_ptrs = centroids_ptr + cluster[:, None] * D + offs_d[None, :]  # [TILE, D]
    residual = queries * SCALE - tl.load(centroid_ptrs, mask=mask, other=0.0).to(ACC)  # [TILE, D]
    tl.store(residuals_ptr + (head * length + offs_place)[:, None] * D + offs_d[None, :], residual, mask=mask)
    offset = tl.load(key_offset_ptr + head // shared_by * D + offs_d, mask=offs_d < D, other=0.0)  # [D]
    tl.store(shift_ptr + head * length + offs_place, tl.sum(residual * offset[None, :], 1), mask=mask_row)
