"""Rows of the inputs in the order of their groups, and what is computed row by row on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.kernels.grouping import Groups
from muse_attention.kernels.numbers import arithmetic, padded

_TILE = 64


def take_rows(table: Tensor, groups: Groups) -> Tensor:
    """(S, N, X) rows in the order of their groups."""
    _, length, columns = table.shape
    taken = torch.empty_like(table)
    _take_rows[_grid(table)](table, groups.order, taken, length, X=columns, XP=padded(columns), TILE=_TILE)
    return taken


def take_residuals(queries: Tensor, centroids: Tensor, assignment: Tensor, segments: Groups, *, scale: float) -> Tensor:
    """(H, N, D): scaled queries less the centroid of their cluster, in the order of `segments`."""
    _, length, head_dim = queries.shape
    residuals = torch.empty_like(queries)
    _take_residuals[_grid(queries)](
        queries, centroids, assignment, segments.order, residuals, length, centroids.shape[1], SCALE=scale,
        D=head_dim, DP=padded(head_dim), TILE=_TILE, ACC=arithmetic(queries.dtype)["ACC"],
    )  # fmt: skip
    return residuals


def _grid(table: Tensor) -> tuple[int, int]:
    return triton.cdiv(table.shape[1], _TILE), table.shape[0]


@triton.jit(do_not_specialize=["length"])
def _take_rows(table, order, taken, length, X: tl.constexpr, XP: tl.constexpr, TILE: tl.constexpr):
    sequence = tl.program_id(1).to(tl.int64)
    place, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, XP)
    inside = (place < length)[:, None] & (column < X)[None, :]
    row = tl.load(order + sequence * length + place, mask=place < length, other=0)
    rows = tl.load(table + (sequence * length + row)[:, None] * X + column[None, :], mask=inside)
    tl.store(taken + (sequence * length + place)[:, None] * X + column[None, :], rows, mask=inside)


@triton.jit(do_not_specialize=["length", "clusters"])
def _take_residuals(
    queries, centroids, assignment, order, residuals, length, clusters, SCALE: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    place, dim = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DP)
    inside = (place < length)[:, None] & (dim < D)[None, :]
    row = tl.load(order + head * length + place, mask=place < length, other=0)
    cluster = head * clusters + tl.load(assignment + head * length + row, mask=place < length, other=0)
    scaled = tl.load(queries + (head * length + row)[:, None] * D + dim[None, :], mask=inside, other=0.0).to(ACC)
    centroid = tl.load(centroids + cluster[:, None] * D + dim[None, :], mask=inside, other=0.0).to(ACC)
    tl.store(residuals + (head * length + place)[:, None] * D + dim[None, :], scaled * SCALE - centroid, mask=inside)
