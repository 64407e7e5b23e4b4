"""Residuals of the queries, stored tile by tile, and their logits against columns."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import generation_of_block
from muse_attention.backends.triton.blockwise.heads import Heads
from muse_attention.backends.triton.device_functions import dot, load_row, load_rows, store_rows
from muse_attention.backends.triton.numbers import accumulator
from muse_attention.backends.triton.runtime.launching import arguments_of, kernel
from muse_attention.core.precision import compute_dtype

_SIZES = ("length", "block_size", "blocks", "query_clusters", "generations", "query_tiles", "shared_by")
SIZES_OF_COLUMNS = (
    "length", "block_size", "blocks", "seen_blocks", "query_clusters", "key_clusters", "summarised", "query_tiles",
)  # fmt: skip
"""Sizes that a kernel needs to find the columns of a tile."""


@dataclass(frozen=True)
class Residuals:
    """The residuals of all queries, in the order of places."""

    residuals: Tensor
    """(H, nb B, D)"""
    shift: Tensor
    """(H, nb B): what the key offset adds to all logits of a query"""
    width: Tensor
    """(H, nb B): norms of the residuals in units of the spread of keys"""


@dataclass(frozen=True)
class RowSoftmax:
    """What the gradients of keys and of summaries need of each query, in the order of places: pairs of lse and `delta`.
    Not written where a query sees no other block."""

    for_keys: Tensor
    """(H, nb B, 2)"""
    for_summaries: Tensor
    """(H, nb B, 2): the lse less the shift; `delta` less what the slope adds to every summary"""

    @classmethod
    def new(cls, residuals: Residuals) -> RowSoftmax:
        shape = (*residuals.width.shape, 2)
        return cls(residuals.width.new_empty(shape), residuals.width.new_empty(shape))


def take_residuals(heads: Heads, key_spread: Tensor) -> Residuals:
    """`key_spread` is (G, S, D)."""
    queries, order, geometry = heads.queries, heads.order, heads.geometry
    places = order.queries.shape
    wide = compute_dtype(queries.dtype)
    residuals = Residuals(
        queries.new_empty(*places, queries.shape[-1]),
        queries.new_empty(places, dtype=wide),
        queries.new_empty(places, dtype=wide),
    )
    _take_residuals_of_tile[(geometry.blocks * geometry.query_tiles, geometry.heads)](
        queries_ptr=queries, centroids_ptr=heads.centroids, key_offset_ptr=heads.key_offset, key_spread_ptr=key_spread,
        **order.query_arguments, **arguments_of(residuals), **geometry.sizes(*_SIZES), SCALE=heads.scale,
        IS_CAUSAL=geometry.is_causal, ROWS=geometry.rows, D=queries.shape[-1], ACC=accumulator(queries.dtype),
    )  # fmt: skip
    return residuals


@kernel(stage="sorting", do_not_specialize=_SIZES)
def _take_residuals_of_tile(
    queries_ptr, centroids_ptr, key_offset_ptr, key_spread_ptr, query_order_ptr, tile_begin_ptr, tile_info_ptr,
    residuals_ptr, shift_ptr, width_ptr, length, block_size, blocks, query_clusters, generations, query_tiles,
    shared_by, SCALE: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Grid: (nb tiles, H). `queries_ptr`: (H, N, D); `centroids_ptr`: (H, S, Q, D); `key_offset_ptr`: (G, D);
    `key_spread_ptr`: (G, S, D); orders and tiles as in `Order`; the others as in `Residuals`."""
    head = tl.program_id(1).to(tl.int64)
    head_base = head * blocks * block_size
    # scalar, scalar, scalar
    begin, rows, cluster = load_tile(tile_begin_ptr, tile_info_ptr, head * tl.num_programs(0) + tl.program_id(0))
    if rows == 0:
        return
    offs_row = tl.arange(0, ROWS)
    mask_row = offs_row < rows  # [ROWS]
    position = tl.load(query_order_ptr + head_base + begin + offs_row, mask=mask_row, other=0)  # [ROWS]
    query = load_rows(queries_ptr, head * length, position, mask_row, D)  # [ROWS, D]
    generation, _ = generation_of_block(tl.program_id(0) // query_tiles, IS_CAUSAL)
    row = (head * generations + generation) * query_clusters + cluster
    # (Summaries are taken at the rounded centroid.)
    centroid = load_row(centroids_ptr, row, D).to(queries_ptr.dtype.element_ty).to(ACC)  # [D]
    residual = query.to(ACC) * SCALE - centroid[None, :]  # [ROWS, D]
    key_head = head // shared_by
    offset = load_row(key_offset_ptr, key_head, D).to(ACC)  # [D]
    metric = load_row(key_spread_ptr, key_head * generations + generation, D).to(ACC)  # [D]
    places = head_base + begin + offs_row  # [ROWS]
    tl.store(shift_ptr + places, tl.sum(residual * offset[None, :], 1), mask=mask_row)
    tl.store(width_ptr + places, tl.sqrt(tl.sum(residual * residual * metric[None, :], 1)), mask=mask_row)
    store_rows(residuals_ptr, head_base + begin, offs_row, mask_row, residual, D)


@triton.jit
def load_tile(tile_begin_ptr, tile_info_ptr, tile):
    """The first place of a tile of queries, its rows, and its cluster."""
    info = tl.load(tile_info_ptr + tile)
    return tl.load(tile_begin_ptr + tile), info & 255, info >> 8


@triton.jit
def first_column(head, block, cluster, query_clusters, key_clusters, summarised, IS_CAUSAL: tl.constexpr):
    """The first column that the queries of a cluster and block see."""
    _, slot = generation_of_block(block, IS_CAUSAL)
    return ((head * query_clusters + cluster) * summarised + slot) * key_clusters


@triton.jit
def visible_columns(first, columns, own_block, key_clusters, COLUMNS: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """The columns from `first` on, [COLUMNS]: their numbers, and whether a block sees them."""
    offs_column = first + tl.arange(0, COLUMNS)  # [COLUMNS]
    mask_column = offs_column < columns  # [COLUMNS]
    if not IS_CAUSAL:
        mask_column &= offs_column // key_clusters != own_block
    return offs_column, mask_column


@triton.jit
def score_columns(
    residual, width, means, masses, deviations, limits, SECOND_ORDER: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """[ROWS, COLUMNS]: logits of the queries against columns, without what the key offset adds, from the means of their
    keys, [COLUMNS, D], and what `load_numbers` returns."""
    logits = dot(residual, tl.trans(means), ACC) + masses[None, :]
    if SECOND_ORDER:
        # `sigma^2 / 2` up to the limit, then the line that continues it: so few keys cannot have more.
        sigma = width[:, None] * deviations[None, :]  # [ROWS, COLUMNS]
        within = tl.minimum(sigma, limits[None, :])  # [ROWS, COLUMNS]
        logits += within * (sigma - 0.5 * within)
    return logits
