"""Gradients of the queries from everything beyond their own block, and the number per query that all terms share."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.heads import Heads
from muse_attention.backends.triton.blockwise.pieces import (
    PIECE_SIZE,
    SIZES_OF_KEYS,
    begin_of_list,
    list_pieces,
    load_listed,
    ranges_of_columns,
)
from muse_attention.backends.triton.blockwise.rows import (
    SIZES_OF_COLUMNS,
    Residuals,
    RowSoftmax,
    first_column,
    load_tile,
    score_columns,
    visible_columns,
)
from muse_attention.backends.triton.blockwise.slopes import Slopes, load_slope
from muse_attention.backends.triton.blockwise.summaries import Columns, load_numbers
from muse_attention.backends.triton.device_functions import (
    add_dot,
    dot,
    exp_of_less,
    load_once,
    load_row,
    load_rows,
    store_rows,
)
from muse_attention.backends.triton.numbers import padded
from muse_attention.backends.triton.runtime.launching import arguments_of, kernel

FROM_COLUMNS = {
    128: {"COLUMNS": 32, "num_warps": 4, "num_stages": 2, "maxnreg": 128},
    256: {"COLUMNS": 64, "num_warps": 4, "num_stages": 1},
    512: {"COLUMNS": 16, "num_warps": 4, "num_stages": 1},
}
FROM_KEYS = {
    128: {"KEYS": 32, "num_warps": 4, "num_stages": 2, "maxnreg": 128},
    256: {"KEYS": 32, "num_warps": 4, "num_stages": 2, "maxnreg": 168},
    512: {"KEYS": 16, "num_warps": 4, "num_stages": 1},
}
FROM_COLUMNS_BY_REGISTERS = {256: {"COLUMNS": 32, "num_warps": 8}}
"""What differs where matrix units read operands from registers."""


def add_to_queries(
    grad_queries: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    heads: Heads,
    residuals: Residuals,
    columns: Columns,
    slopes: Slopes,
    first_rows: Tensor,
) -> RowSoftmax:
    """Add to the (H, N, D) gradients of queries. `grad_out` is (H, N, Dv); `lse` and `delta`, (H, N), are those of the
    merged softmax.

    Returns what the gradients of keys and of summaries need of each query, in the order of places.
    """
    order, geometry = heads.order, heads.geometry
    config = geometry.config
    tiles = geometry.blocks * geometry.query_tiles
    shared = {
        "grad_queries_ptr": grad_queries,
        "grad_out_ptr": grad_out,
        "lse_ptr": lse,
        "delta_ptr": delta,
        "key_offset_ptr": heads.key_offset,
        **order.query_arguments,
        "SCALE": heads.scale,
        "ROWS": geometry.rows,
        **heads.compiled,
    }
    row_softmax = RowSoftmax.new(residuals)
    _columns_backward_to_queries[(tiles, geometry.heads)](
        **shared, **arguments_of(residuals), **arguments_of(columns), **slopes.arguments, first_rows_ptr=first_rows,
        **arguments_of(row_softmax), **geometry.sizes(*SIZES_OF_COLUMNS, "shared_by"), IS_CAUSAL=geometry.is_causal,
        FIRST_ORDER=config.uses_first_order, SECOND_ORDER=config.uses_second_order,
        **heads.fit(FROM_COLUMNS, FROM_COLUMNS_BY_REGISTERS),
    )  # fmt: skip
    for begin, end in ranges_of_columns(geometry):
        listed = list_pieces(first_rows, begin, end, order, geometry)
        _keys_backward_to_queries[(tiles, geometry.heads)](
            **shared, queries_ptr=heads.queries, keys_ptr=heads.keys, values_ptr=heads.values, key_order_ptr=order.keys,
            **listed, **geometry.sizes(*SIZES_OF_KEYS), **heads.fit(FROM_KEYS),
        )  # fmt: skip
    return row_softmax


@kernel(stage="attention to summaries", do_not_specialize=[*SIZES_OF_COLUMNS, "shared_by"])
def _columns_backward_to_queries(
    grad_queries_ptr, grad_out_ptr, lse_ptr, delta_ptr, key_offset_ptr, residuals_ptr, shift_ptr, width_ptr,
    numbers_ptr, key_mean_ptr, value_mean_ptr, slope_ptr, slope_deviation_ptr,
    query_order_ptr, tile_begin_ptr, tile_info_ptr, first_rows_ptr, for_keys_ptr, for_summaries_ptr, length, block_size,
    blocks, seen_blocks, query_clusters, key_clusters, summarised, query_tiles, shared_by, LARGEST_REACH: tl.constexpr,
    SCALE: tl.constexpr, IS_CAUSAL: tl.constexpr, FIRST_ORDER: tl.constexpr, SECOND_ORDER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile's queries from the summaries.

    Grid: (nb tiles, H). `grad_queries_ptr`: (H, N, D); `grad_out_ptr`: (H, N, DV); `lse_ptr`, `delta_ptr`: (H, N);
    `key_offset_ptr`: (G, D); `for_keys_ptr`, `for_summaries_ptr` as in `RowSoftmax`; the others as in
    `_attend_to_columns`.
    """
    head = tl.program_id(1).to(tl.int64)
    # (Tiles that see the most come first.)
    number_of_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = head * tl.num_programs(0) + number_of_tile
    own_block = number_of_tile // query_tiles
    columns = (own_block if IS_CAUSAL else blocks) * key_clusters
    begin, rows, cluster = load_tile(tile_begin_ptr, tile_info_ptr, tile)
    if (rows == 0) | (columns == 0):
        return
    offs_row = tl.arange(0, ROWS)
    mask_row = offs_row < rows  # [ROWS]
    place = head * blocks * block_size + begin
    position = tl.load(query_order_ptr + place + offs_row, mask=mask_row, other=0)  # [ROWS]
    residual = load_rows(residuals_ptr, place, offs_row, mask_row, D)  # [ROWS, D]
    shift = tl.load(shift_ptr + place + offs_row, mask=mask_row, other=0.0)  # [ROWS]
    width = tl.load(width_ptr + place + offs_row, mask=mask_row, other=0.0)  # [ROWS]
    cluster_base = first_column(head, own_block, cluster, query_clusters, key_clusters, summarised, IS_CAUSAL)
    first_rows_ptr += tile * seen_blocks * key_clusters
    grad_out = load_rows(grad_out_ptr, head * length, position, mask_row, DV)  # [ROWS, DV]
    # (Rows that do not exist have no weight anywhere.)
    lse = tl.load(lse_ptr + head * length + position, mask=mask_row, other=float("inf"))  # [ROWS]
    delta = tl.load(delta_ptr + head * length + position, mask=mask_row, other=0.0)  # [ROWS]
    tl.store(for_keys_ptr + (place + offs_row) * 2, lse, mask=mask_row)
    tl.store(for_keys_ptr + (place + offs_row) * 2 + 1, delta, mask=mask_row)
    lse -= shift
    if FIRST_ORDER:
        slope, factor, gain = load_slope(
            slope_ptr, slope_deviation_ptr, head * blocks + own_block, residual, width, LARGEST_REACH, D, DV, ACC
        )
        delta -= tl.sum(gain * grad_out.to(ACC), 1)
    tl.store(for_summaries_ptr + (place + offs_row) * 2, lse, mask=mask_row)
    tl.store(for_summaries_ptr + (place + offs_row) * 2 + 1, delta, mask=mask_row)
    gradient = tl.zeros([ROWS, padded(D)], ACC)  # [ROWS, D]
    offset_factor, summary_weight = tl.zeros([ROWS], ACC), tl.zeros([ROWS], ACC)
    for first in range(0, columns, COLUMNS):
        offs_column, mask_column = visible_columns(first, columns, own_block, key_clusters, COLUMNS, IS_CAUSAL)
        means = load_rows(key_mean_ptr, cluster_base, offs_column, mask_column, D)  # [COLUMNS, D]
        masses, deviations, limits, _ = load_numbers(numbers_ptr, cluster_base, offs_column, mask_column)
        logits = score_columns(residual, width, means, masses, deviations, limits, SECOND_ORDER, ACC)
        first_row = load_once(first_rows_ptr + offs_column, mask_column, 255).to(tl.int32)  # [COLUMNS]
        logits = tl.where(offs_row[:, None] < first_row[None, :], logits, float("-inf"))
        values = load_rows(value_mean_ptr, cluster_base, offs_column, mask_column, DV)  # [COLUMNS, DV]
        response = dot(grad_out, tl.trans(values), ACC)  # [ROWS, COLUMNS]
        weights = exp_of_less(logits, lse[:, None])  # [ROWS, COLUMNS]
        d_logits = weights * (response - delta[:, None])  # [ROWS, COLUMNS]
        offset_factor += tl.sum(d_logits, 1)
        summary_weight += tl.sum(weights, 1)
        gradient = add_dot(d_logits.to(means.dtype), means, gradient)
    if FIRST_ORDER:
        to_residual = dot(grad_out, tl.trans(slope), ACC)  # [ROWS, D]
        gradient += (summary_weight * factor)[:, None] * to_residual
    # (Means of keys are stored without the offset.)
    offset = load_row(key_offset_ptr, head // shared_by, D).to(ACC)  # [D]
    gradient += offset_factor[:, None] * offset[None, :]
    gradient = gradient * SCALE + load_rows(grad_queries_ptr, head * length, position, mask_row, D).to(ACC)
    store_rows(grad_queries_ptr, head * length, position, mask_row, gradient, D)


@kernel(stage="retrieval", do_not_specialize=[*SIZES_OF_KEYS, "room"])
def _keys_backward_to_queries(
    grad_queries_ptr, grad_out_ptr, lse_ptr, delta_ptr, key_offset_ptr, queries_ptr, keys_ptr, values_ptr,
    query_order_ptr, tile_begin_ptr, tile_info_ptr, key_order_ptr, lists_ptr, listed_ptr, length, block_size, blocks,
    seen_blocks, query_tiles, key_room, shared_by, room, SCALE: tl.constexpr, GROWS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile's queries from the keys they retrieve, with the rounding of the keys' offset taken out.

    Grid: (nb tiles, H). `queries_ptr`: (H, N, D); `keys_ptr`: (G, N, D); `values_ptr`: (G, N, DV); lists as
    `list_pieces` returns them; the others as in `_columns_backward_to_queries`.
    """
    head = tl.program_id(1).to(tl.int64)
    number_of_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = head * tl.num_programs(0) + number_of_tile
    pieces = tl.load(listed_ptr + tile)
    if pieces == 0:
        return
    begin, rows, _ = load_tile(tile_begin_ptr, tile_info_ptr, tile)
    offs_row = tl.arange(0, ROWS)
    mask_row = offs_row < rows  # [ROWS]
    place = head * blocks * block_size + begin
    position = tl.load(query_order_ptr + place + offs_row, mask=mask_row, other=0)  # [ROWS]
    query = load_rows(queries_ptr, head * length, position, mask_row, D)  # [ROWS, D]
    grad_out = load_rows(grad_out_ptr, head * length, position, mask_row, DV)  # [ROWS, DV]
    # (Rows that do not exist have no weight anywhere.)
    lse = tl.load(lse_ptr + head * length + position, mask=mask_row, other=float("inf"))  # [ROWS]
    delta = tl.load(delta_ptr + head * length + position, mask=mask_row, other=0.0)  # [ROWS]
    gradient = tl.zeros([ROWS, padded(D)], ACC)  # [ROWS, D]
    offset_factor = tl.zeros([ROWS], ACC)
    rounded = tl.zeros([ROWS, 16], ACC)  # [ROWS, 16], all columns equal
    key_head = head // shared_by
    key_order_ptr += key_head * seen_blocks * key_room
    list_ptr = lists_ptr + begin_of_list(head, number_of_tile, blocks, query_tiles, room, GROWS)
    # [KEYS] each. (The next keys' positions are loaded early.)
    next_position, next_first_row = load_listed(list_ptr, key_order_ptr, 0, pieces, KEYS)
    for first in range(0, pieces, KEYS // PIECE_SIZE):
        key_position, first_row = next_position, next_first_row
        mask_key = key_position >= 0  # [KEYS]
        key = load_rows(keys_ptr, key_head * length, key_position, mask_key, D)  # [KEYS, D]
        value = load_rows(values_ptr, key_head * length, key_position, mask_key, DV)  # [KEYS, DV]
        next_position, next_first_row = load_listed(list_ptr, key_order_ptr, first + KEYS // PIECE_SIZE, pieces, KEYS)
        logits = dot(query, tl.trans(key), ACC)  # [ROWS, KEYS]
        logits = tl.where(offs_row[:, None] >= first_row[None, :], logits, float("-inf"))
        response = dot(grad_out, tl.trans(value), ACC) - delta[:, None]  # [ROWS, KEYS]
        d_logits = exp_of_less(logits, lse[:, None], SCALE) * response  # [ROWS, KEYS]
        offset_factor += tl.sum(d_logits, 1)
        d_logits = d_logits.to(key.dtype)
        gradient = add_dot(d_logits, key, gradient)
        # (Matrix units add up the rounded gradients: converting them back takes as long as the exponentials.)
        rounded = add_dot(d_logits, tl.full([KEYS, 16], 1.0, key.dtype), rounded)
    offset = load_row(key_offset_ptr, key_head, D).to(ACC)  # [D]
    offset_factor -= tl.max(rounded, 1)
    gradient += offset_factor[:, None] * offset[None, :]
    gradient = gradient * SCALE + load_rows(grad_queries_ptr, head * length, position, mask_row, D).to(ACC)
    store_rows(grad_queries_ptr, head * length, position, mask_row, gradient, D)
