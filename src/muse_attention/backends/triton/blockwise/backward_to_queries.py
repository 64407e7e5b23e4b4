"""Gradients of the queries from all that lies beyond their own block, and the one number per query that all share."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import Geometry, widths
from muse_attention.backends.triton.blockwise.order import Order
from muse_attention.backends.triton.blockwise.pieces import PIECE_SIZE, RANGE, list_pieces, load_listed, room_of_list
from muse_attention.backends.triton.blockwise.rows import (
    first_column,
    load_residuals,
    load_tile_rows,
    score_columns,
    visible_columns,
)
from muse_attention.backends.triton.blockwise.summaries import Columns
from muse_attention.backends.triton.device_math import exp_of_less
from muse_attention.backends.triton.numbers import arithmetic, cdiv, fitting, padded
from muse_attention.backends.triton.row_tiles import load_rows, store_rows
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.core.structures import Partial

TO_QUERIES = {
    128: {"COLUMNS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2},
    256: {"COLUMNS": 32, "KEYS": 64, "num_warps": 4, "num_stages": 2},
    512: {"COLUMNS": 16, "KEYS": 16, "num_warps": 4, "num_stages": 1},
}
_TILE = 64
_SIZES = (
    "length", "block_size", "blocks", "seen_blocks", "query_clusters", "key_clusters", "generations", "summarised",
    "query_tiles", "key_room", "shared_by",
)  # fmt: skip


def find_delta(merged: Partial, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """(H, N): `delta = sum(dO * O) - dL` of each query: with `L`, all that a term's backward needs to know of the
    others."""
    heads, length, value_dim = grad_out.shape
    delta = torch.empty_like(merged.lse)
    _find_delta_of_rows[(cdiv(length, _TILE), heads)](
        out_ptr=merged.out, grad_out_ptr=grad_out, grad_lse_ptr=merged.lse if grad_lse is None else grad_lse,
        delta_ptr=delta, length=length, HAS_GRAD_LSE=grad_lse is not None, DV=value_dim, DVP=padded(value_dim),
        TILE=_TILE, ACC=arithmetic(grad_out.dtype)["ACC"],
    )  # fmt: skip
    return delta


def add_to_queries(
    grad_queries: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    centroids: Tensor,
    key_offset: Tensor,
    key_spread: Tensor,
    columns: Columns,
    order: Order,
    first_rows: Tensor,
    geometry: Geometry,
    *,
    scale: float,
) -> None:
    """Add to the (H, N, D) gradients of queries. `lse` is that of the merged softmax."""
    config = geometry.config
    head_dim, value_dim = queries.shape[-1], values.shape[-1]
    room = room_of_list(geometry.key_room, config.key_clusters, geometry.seen_blocks)
    tiles = geometry.blocks * geometry.query_tiles
    launch = fitting(TO_QUERIES, head_dim, value_dim, queries.dtype)
    launch = {**launch, "COLUMNS": min(launch["COLUMNS"], padded(geometry.columns))}
    _far_backward_to_queries[(tiles, geometry.heads)](
        grad_queries_ptr=grad_queries, grad_out_ptr=grad_out, lse_ptr=lse, delta_ptr=delta, queries_ptr=queries,
        keys_ptr=keys, values_ptr=values, centroids_ptr=centroids, key_offset_ptr=key_offset,
        key_spread_ptr=key_spread, **columns.of_logits, **order.of_queries, **order.of_buckets,
        first_rows_ptr=first_rows, lists_ptr=order.queries.new_empty(geometry.heads, tiles, room), room=room,
        **geometry.sizes(*_SIZES), SCALE=scale, IS_CAUSAL=geometry.is_causal, SECOND_ORDER=config.uses_second_order,
        RANGE=RANGE, AT_ONCE=64, ROWS=geometry.rows, **widths(head_dim, value_dim), **arithmetic(queries.dtype),
        **launch,
    )  # fmt: skip


@kernel(stage="merging", do_not_specialize=["length"])
def _find_delta_of_rows(
    out_ptr, grad_out_ptr, grad_lse_ptr, delta_ptr, length, HAS_GRAD_LSE: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Grid: (N / TILE, H). `out_ptr`, `grad_out_ptr`: (H, N, DV); `grad_lse_ptr`, `delta_ptr`: (H, N)."""
    head = tl.program_id(1).to(tl.int64)
    offs_row = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    mask_row = offs_row < length  # [TILE]
    out = load_rows(out_ptr, head * length, offs_row, mask_row, DV, DVP).to(ACC)  # [TILE, DV]
    grad_out = load_rows(grad_out_ptr, head * length, offs_row, mask_row, DV, DVP).to(ACC)  # [TILE, DV]
    delta = tl.sum(out * grad_out, 1)  # [TILE]
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + head * length + offs_row, mask=mask_row, other=0.0)
    tl.store(delta_ptr + head * length + offs_row, delta, mask=mask_row)


@kernel(stage="attention to summaries", do_not_specialize=[*_SIZES, "room"])
def _far_backward_to_queries(
    grad_queries_ptr, grad_out_ptr, lse_ptr, delta_ptr, queries_ptr, keys_ptr, values_ptr, centroids_ptr,
    key_offset_ptr, key_spread_ptr, log_mass_ptr, key_mean_ptr, value_mean_ptr, deviation_ptr, most_ptr,
    query_order_ptr, tile_begin_ptr, tile_info_ptr, key_order_ptr, key_starts_ptr, key_sizes_ptr, first_rows_ptr,
    lists_ptr, length, block_size, blocks, seen_blocks, query_clusters, key_clusters, generations, summarised,
    query_tiles, key_room, shared_by, room, SCALE: tl.constexpr, IS_CAUSAL: tl.constexpr, SECOND_ORDER: tl.constexpr,
    RANGE: tl.constexpr, AT_ONCE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile's queries, from all their terms beyond the own block.

    Grid: (nb tiles, H). `grad_queries_ptr`, `queries_ptr`: (H, N, D); `grad_out_ptr`: (H, N, DV); `lse_ptr`,
    `delta_ptr`: (H, N); the others as in `_attend_far`.
    """
    head = tl.program_id(1).to(tl.int64)
    # (Those that see most come first.)
    number_of_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = head * tl.num_programs(0) + number_of_tile
    own_block = number_of_tile // query_tiles
    columns = (own_block if IS_CAUSAL else blocks) * key_clusters
    # [ROWS], scalar, scalar
    position, rows, cluster = load_tile_rows(
        tile_begin_ptr, tile_info_ptr, query_order_ptr, tile, head * blocks * block_size, ROWS
    )
    if (rows == 0) | (columns == 0):
        return
    key_head = head // shared_by
    offs_row = tl.arange(0, ROWS)
    mask_row = offs_row < rows  # [ROWS]
    query = load_rows(queries_ptr, head * length, position, mask_row, D, DP)  # [ROWS, D]
    # [ROWS, D], [ROWS], [ROWS]
    residual, shift, width = load_residuals(
        query, centroids_ptr, key_offset_ptr, key_spread_ptr, head, key_head, own_block, cluster, query_clusters,
        generations, SCALE, IS_CAUSAL, D, DP, ACC,
    )  # fmt: skip
    of_cluster = first_column(head, own_block, cluster, query_clusters, key_clusters, summarised, IS_CAUSAL)
    of_buckets = key_head * seen_blocks * key_clusters
    first_rows_ptr += tile * seen_blocks * key_clusters
    grad_out = load_rows(grad_out_ptr, head * length, position, mask_row, DV, DVP)  # [ROWS, DV]
    # (Rows that do not exist have no weight anywhere.)
    lse = tl.load(lse_ptr + head * length + position, mask=mask_row, other=float("inf")) - shift  # [ROWS]
    delta = tl.load(delta_ptr + head * length + position, mask=mask_row, other=0.0)  # [ROWS]
    gradient = tl.zeros([ROWS, DP], ACC)  # [ROWS, D]
    of_offset = tl.zeros([ROWS], ACC)

    # 1. From the summaries. Their means of keys are less the offset.
    for first in range(0, columns, COLUMNS):
        offs_column, mask_column = visible_columns(first, columns, own_block, key_clusters, COLUMNS, IS_CAUSAL)
        # [COLUMNS, D], [ROWS, COLUMNS]
        means, logits = score_columns(
            residual, width, log_mass_ptr, key_mean_ptr, deviation_ptr, most_ptr, of_cluster, of_buckets, offs_column,
            mask_column, SECOND_ORDER, D, DP, ACC, PRECISION,
        )  # fmt: skip
        first_row = tl.load(first_rows_ptr + offs_column, mask=mask_column, other=255).to(tl.int32)  # [COLUMNS]
        logits = tl.where(offs_row[:, None] < first_row[None, :], logits, float("-inf"))
        values = load_rows(value_mean_ptr, of_cluster, offs_column, mask_column, DV, DVP)  # [COLUMNS, DV]
        response = tl.dot(grad_out, tl.trans(values), input_precision=PRECISION, out_dtype=ACC)  # [ROWS, COLUMNS]
        d_logits = exp_of_less(logits, lse[:, None]) * (response - delta[:, None])  # [ROWS, COLUMNS]
        of_offset += tl.sum(d_logits, 1)
        gradient = tl.dot(d_logits.to(means.dtype), means, gradient, input_precision=PRECISION, out_dtype=ACC)

    # 2. From the keys that are retrieved. What rounding does to their offset is taken back.
    list_ptr = lists_ptr + tile * room
    key_order_ptr += key_head * seen_blocks * key_room
    for first in range(0, columns, RANGE):
        pieces = list_pieces(
            first_rows_ptr, key_starts_ptr + of_buckets, key_sizes_ptr + of_buckets, list_ptr, first,
            tl.minimum(first + RANGE, columns), ROWS, AT_ONCE,
        )  # fmt: skip
        for begin in range(0, pieces, KEYS // PIECE_SIZE):
            # [KEYS] each
            at, mask_key, first_row = load_listed(list_ptr, key_order_ptr, begin, pieces, KEYS)
            key = load_rows(keys_ptr, key_head * length, at, mask_key, D, DP)  # [KEYS, D]
            value = load_rows(values_ptr, key_head * length, at, mask_key, DV, DVP)  # [KEYS, DV]
            logits = tl.dot(query, tl.trans(key), input_precision=PRECISION, out_dtype=ACC)  # [ROWS, KEYS]
            logits = logits * SCALE - shift[:, None]
            is_seen = (offs_row[:, None] >= first_row[None, :]) & mask_key[None, :]  # [ROWS, KEYS]
            weights = exp_of_less(tl.where(is_seen, logits, float("-inf")), lse[:, None])  # [ROWS, KEYS]
            response = tl.dot(grad_out, tl.trans(value), input_precision=PRECISION, out_dtype=ACC)  # [ROWS, KEYS]
            d_logits = weights * (response - delta[:, None])  # [ROWS, KEYS]
            rounded = d_logits.to(key.dtype)  # [ROWS, KEYS]
            of_offset += tl.sum(d_logits - rounded.to(ACC), 1)
            gradient = tl.dot(rounded, key, gradient, input_precision=PRECISION, out_dtype=ACC)

    offs_d = tl.arange(0, DP)  # [D]
    offset = tl.load(key_offset_ptr + key_head * D + offs_d, mask=offs_d < D, other=0.0).to(ACC)  # [D]
    gradient += of_offset[:, None] * offset[None, :]
    gradient = gradient * SCALE + load_rows(grad_queries_ptr, head * length, position, mask_row, D, DP).to(ACC)
    store_rows(grad_queries_ptr, head * length, position, mask_row, gradient, D, DP)
