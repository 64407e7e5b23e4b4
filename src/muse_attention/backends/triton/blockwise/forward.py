"""Attention to everything beyond the own block, added to its output and lse, tile of queries by tile."""

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
    first_column,
    load_tile,
    score_columns,
    visible_columns,
)
from muse_attention.backends.triton.blockwise.slopes import Slopes, load_slope
from muse_attention.backends.triton.blockwise.summaries import Columns, load_numbers
from muse_attention.backends.triton.device_functions import (
    LOG2_E,
    dot,
    include,
    load_once,
    load_rows,
    store_rows,
)
from muse_attention.backends.triton.runtime.launching import arguments_of, kernel
from muse_attention.core.structures import Partial

TO_COLUMNS = {
    128: {"COLUMNS": 32, "num_warps": 4, "num_stages": 2, "maxnreg": 128},
    256: {"COLUMNS": 64, "num_warps": 4, "num_stages": 1, "maxnreg": 168},
    512: {"COLUMNS": 32, "num_warps": 4, "num_stages": 1},
}
TO_KEYS = {
    128: {"KEYS": 128, "num_warps": 4, "num_stages": 2, "maxnreg": 168},
    256: {"KEYS": 64, "num_warps": 4, "num_stages": 2},
    512: {"KEYS": 32, "num_warps": 4, "num_stages": 1},
}
TO_COLUMNS_BY_REGISTERS = {256: {"num_warps": 8}}
TO_KEYS_BY_REGISTERS = {128: {"KEYS": 64}}
"""What differs where matrix units read operands from registers."""


def attend(
    merged: Partial,
    heads: Heads,
    residuals: Residuals,
    columns: Columns,
    slopes: Slopes,
    first_rows: Tensor,
) -> None:
    """Add the far field to `merged`, the own block's (H, N, Dv) output and (H, N) lse.

    `first_rows` is the selection, (H, nb, tiles, seen blocks K) uint8.
    """
    order, geometry = heads.order, heads.geometry
    config = geometry.config
    tiles = geometry.blocks * geometry.query_tiles
    shared = {"out_ptr": merged.out, "lse_ptr": merged.lse, "ROWS": geometry.rows, **heads.compiled}
    _attend_to_columns[(tiles, geometry.heads)](
        **arguments_of(residuals), **arguments_of(columns), **slopes.arguments, **order.query_arguments,
        first_rows_ptr=first_rows, **geometry.sizes(*SIZES_OF_COLUMNS), IS_CAUSAL=geometry.is_causal,
        FIRST_ORDER=config.uses_first_order, SECOND_ORDER=config.uses_second_order, **shared,
        **heads.fit(TO_COLUMNS, TO_COLUMNS_BY_REGISTERS),
    )  # fmt: skip
    for begin, end in ranges_of_columns(geometry):
        listed = list_pieces(first_rows, begin, end, order, geometry)
        _attend_to_keys[(tiles, geometry.heads)](
            queries_ptr=heads.queries, keys_ptr=heads.keys, values_ptr=heads.values, **order.query_arguments,
            key_order_ptr=order.keys, **listed, **geometry.sizes(*SIZES_OF_KEYS), SCALE=heads.scale, **shared,
            **heads.fit(TO_KEYS, TO_KEYS_BY_REGISTERS),
        )  # fmt: skip


@kernel(stage="attention to summaries", do_not_specialize=SIZES_OF_COLUMNS)
def _attend_to_columns(
    residuals_ptr, shift_ptr, width_ptr, numbers_ptr, key_mean_ptr, value_mean_ptr, slope_ptr, slope_deviation_ptr,
    query_order_ptr, tile_begin_ptr, tile_info_ptr, first_rows_ptr, out_ptr, lse_ptr, length, block_size, blocks,
    seen_blocks, query_clusters, key_clusters, summarised, query_tiles, LARGEST_REACH: tl.constexpr,
    IS_CAUSAL: tl.constexpr, FIRST_ORDER: tl.constexpr, SECOND_ORDER: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Attend to the summaries of what a tile's queries do not retrieve.

    Grid: (nb tiles, H). Residuals, columns, slopes, orders and tiles as in the classes of these names;
    `first_rows_ptr`: (H, nb, tiles, seen blocks K) uint8; `out_ptr`: (H, N, DV) and `lse_ptr`: (H, N), in the order of
    the inputs, read and written.
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

    # The running softmax begins with the own block. What the key offset adds is left out until the end.
    own_lse = tl.load(lse_ptr + head * length + position, mask=mask_row, other=0.0) - shift  # [ROWS]
    largest, total = own_lse, tl.full([ROWS], 1.0, ACC)  # [ROWS], [ROWS]
    weighted = load_rows(out_ptr, head * length, position, mask_row, DV).to(ACC)  # [ROWS, DV]
    for first in range(0, columns, COLUMNS):
        offs_column, mask_column = visible_columns(first, columns, own_block, key_clusters, COLUMNS, IS_CAUSAL)
        means = load_rows(key_mean_ptr, cluster_base, offs_column, mask_column, D)  # [COLUMNS, D]
        masses, deviations, limits, _ = load_numbers(numbers_ptr, cluster_base, offs_column, mask_column)
        logits = score_columns(residual, width, means, masses, deviations, limits, SECOND_ORDER, ACC)
        first_row = load_once(first_rows_ptr + offs_column, mask_column, 255).to(tl.int32)  # [COLUMNS]
        logits = tl.where(offs_row[:, None] < first_row[None, :], logits, float("-inf"))
        values = load_rows(value_mean_ptr, cluster_base, offs_column, mask_column, DV)  # [COLUMNS, DV]
        largest, total, weighted = include(logits, values, largest, total, weighted, MAY_BE_EMPTY=False)
    if FIRST_ORDER:
        _, _, gain = load_slope(
            slope_ptr, slope_deviation_ptr, head * blocks + own_block, residual, width, LARGEST_REACH, D, DV, ACC
        )
        summary_total = total - tl.exp2((own_lse - largest) * LOG2_E)  # [ROWS]
        weighted += summary_total[:, None] * gain
    store_rows(out_ptr, head * length, position, mask_row, weighted / total[:, None], DV)
    tl.store(lse_ptr + head * length + position, largest + tl.log(total) + shift, mask=mask_row)


@kernel(stage="retrieval", do_not_specialize=[*SIZES_OF_KEYS, "room"])
def _attend_to_keys(
    queries_ptr, keys_ptr, values_ptr, query_order_ptr, tile_begin_ptr, tile_info_ptr, key_order_ptr, lists_ptr,
    listed_ptr, out_ptr, lse_ptr, length, block_size, blocks, seen_blocks, query_tiles, key_room, shared_by, room,
    SCALE: tl.constexpr, GROWS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Attend to the keys that a tile's queries retrieve.

    Grid: (nb tiles, H). `queries_ptr`: (H, N, D); `keys_ptr`: (G, N, D); `values_ptr`: (G, N, DV); lists as
    `list_pieces` returns them; the others as in `_attend_to_columns`.
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
    largest = tl.load(lse_ptr + head * length + position, mask=mask_row, other=0.0)  # [ROWS]
    total = tl.full([ROWS], 1.0, ACC)
    weighted = load_rows(out_ptr, head * length, position, mask_row, DV).to(ACC)  # [ROWS, DV]
    key_head = head // shared_by
    key_order_ptr += key_head * seen_blocks * key_room
    list_ptr = lists_ptr + begin_of_list(head, number_of_tile, blocks, query_tiles, room, GROWS)
    for first in range(0, pieces, KEYS // PIECE_SIZE):
        # [KEYS] each
        key_position, first_row = load_listed(list_ptr, key_order_ptr, first, pieces, KEYS)
        mask_key = key_position >= 0  # [KEYS]
        key = load_rows(keys_ptr, key_head * length, key_position, mask_key, D)  # [KEYS, D]
        value = load_rows(values_ptr, key_head * length, key_position, mask_key, DV)  # [KEYS, DV]
        logits = dot(query, tl.trans(key), ACC)  # [ROWS, KEYS]
        logits = tl.where(offs_row[:, None] >= first_row[None, :], logits, float("-inf"))
        largest, total, weighted = include(logits, value, largest, total, weighted, SCALE, MAY_BE_EMPTY=False)
    store_rows(out_ptr, head * length, position, mask_row, weighted / total[:, None], DV)
    tl.store(lse_ptr + head * length + position, largest + tl.log(total), mask=mask_row)
