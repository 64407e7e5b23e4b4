"""Rows of the inputs in the order of their groups, and what is computed row by row on the way."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.grouping import Groups
from muse_attention.backends.triton.numbers import arithmetic, cdiv, in_range, load_rows, padded
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.core.precision import compute_dtype

_TILE = 64
WIDEST = tl.constexpr(1e18)


def take_rows(table: Tensor, groups: Groups) -> Tensor:
    """(S, N, X) rows in the order of their groups."""
    _, length, columns = table.shape
    taken = torch.empty_like(table)
    _take_rows[_grid(table)](table, groups.order, taken, length, X=columns, XP=padded(columns), TILE=_TILE)
    return taken


def square_distances(keys: Tensor, buckets: Groups, assignment: Tensor, block_size: int) -> Tensor:
    """(G, N): squares of the distances of keys, in the order of their buckets, from the first one of their bucket.

    About that point little of a second moment cancels. `assignment` is in the order of the inputs.
    """
    _, length, head_dim = keys.shape
    squares = keys.new_empty(keys.shape[:2], dtype=compute_dtype(keys.dtype))
    _square_distances[_grid(keys)](
        keys, buckets.order, buckets.starts, assignment, squares, length, block_size, cdiv(length, block_size),
        buckets.number, D=head_dim, DP=padded(head_dim), TILE=_TILE, ACC=arithmetic(keys.dtype)["ACC"],
    )  # fmt: skip
    return squares


def take_residuals(
    queries: Tensor,
    centroids: Tensor,
    assignment: Tensor,
    key_offset: Tensor,
    key_spread: Tensor | None,
    segments: Groups,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(H, N, D): scaled queries less the centroid of their cluster, in the order of `segments`, and (H, N): their
    products with the (G, D) `key_offset`, from before the residuals are rounded.

    With the (G, D) `key_spread` also their widths, (H, N): the norms of residuals in units of it.
    """
    heads, length, head_dim = queries.shape
    residuals, shift = torch.empty_like(queries), key_offset.new_empty(heads, length)
    width = None if key_spread is None else torch.empty_like(shift)
    _take_residuals[_grid(queries)](
        queries, centroids, assignment, segments.order, key_offset, key_offset if key_spread is None else key_spread,
        residuals, shift, shift if width is None else width, length, centroids.shape[1], heads // key_offset.shape[0],
        HAS_WIDTH=width is not None, SCALE=scale, D=head_dim, DP=padded(head_dim), TILE=_TILE,
        ACC=arithmetic(queries.dtype)["ACC"],
    )  # fmt: skip
    return residuals, shift, width


def _grid(table: Tensor) -> tuple[int, int]:
    return cdiv(table.shape[1], _TILE), table.shape[0]


@kernel(do_not_specialize=["length"])
def _take_rows(table, order, taken, length, X: tl.constexpr, XP: tl.constexpr, TILE: tl.constexpr):
    sequence = tl.program_id(1).to(tl.int64)
    place, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, XP)
    inside = (place < length)[:, None] & (column < X)[None, :]
    row = tl.load(order + sequence * length + place, mask=place < length, other=0)
    rows = tl.load(table + (sequence * length + row)[:, None] * X + column[None, :], mask=inside)
    tl.store(taken + (sequence * length + place)[:, None] * X + column[None, :], rows, mask=inside)


@kernel(do_not_specialize=["length", "clusters", "shared_by"])
def _take_residuals(
    queries, centroids, assignment, order, key_offset, key_spread, residuals, shift, width, length, clusters, shared_by,
    HAS_WIDTH: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    place, dim = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DP)
    inside = (place < length)[:, None] & (dim < D)[None, :]
    row = tl.load(order + head * length + place, mask=place < length, other=0)
    cluster = in_range(tl.load(assignment + head * length + row, mask=place < length, other=0), clusters)
    cluster = head * clusters + cluster
    scaled = tl.load(queries + (head * length + row)[:, None] * D + dim[None, :], mask=inside, other=0.0).to(ACC)
    centroid = tl.load(centroids + cluster[:, None] * D + dim[None, :], mask=inside, other=0.0).to(ACC)
    residual = scaled * SCALE - centroid
    tl.store(residuals + (head * length + place)[:, None] * D + dim[None, :], residual, mask=inside)
    offset = tl.load(key_offset + head // shared_by * D + dim, mask=dim < D, other=0.0)
    tl.store(shift + head * length + place, tl.sum(residual * offset[None, :], 1), mask=place < length)
    if HAS_WIDTH:
        spread = tl.load(key_spread + head // shared_by * D + dim, mask=dim < D, other=0.0).to(ACC)
        norm = tl.sqrt(tl.sum(residual * residual * spread[None, :], 1))
        # (The square of a gigantic residual is infinite.)
        tl.store(width + head * length + place, tl.where(norm < WIDEST, norm, WIDEST), mask=place < length)


@kernel(do_not_specialize=["length", "block_size", "blocks", "buckets"])
def _square_distances(
    keys, order, starts, assignment, squares, length, block_size, blocks, buckets, D: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = place < length
    row = tl.load(order + head * length + place, mask=inside, other=0)
    cluster = in_range(tl.load(assignment + head * length + row, mask=inside, other=0), buckets // blocks)
    bucket = cluster * blocks + row // block_size
    first = tl.load(starts + head * (buckets + 1) + bucket, mask=inside, other=0)
    point = load_rows(keys, head * length, first, inside, D, DP).to(ACC)
    # A key that is not finite must poison what attends to it, not the spread of its bucket.
    point = tl.where(tl.abs(point) < float("inf"), point, 0.0)
    off = load_rows(keys, head * length, place, inside, D, DP).to(ACC) - point
    tl.store(squares + head * length + place, tl.sum(off * off, 1), mask=inside)
