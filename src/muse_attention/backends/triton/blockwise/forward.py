"""Attention to all that lies beyond the own block, added to its output and lse: one pass for each tile of queries."""

from __future__ import annotations

import triton
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
from muse_attention.backends.triton.blockwise.summaries import Columns
from muse_attention.backends.triton.device_functions import LOG2_E, add_dot, dot, exp_of_less, load_rows, store_rows
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.core.expected_error import LARGEST_GROWTH
from muse_attention.core.structures import Partial

TO_COLUMNS = {
    128: {"COLUMNS": 64, "num_warps": 4, "num_stages": 1, "maxnreg": 128},
    256: {"COLUMNS": 64, "num_warps": 4, "num_stages": 1, "maxnreg": 168},
    512: {"COLUMNS": 32, "num_warps": 4, "num_stages": 1},
}
TO_KEYS = {
    128: {"KEYS": 128, "num_warps": 4, "num_stages": 2, "maxnreg": 168},
    256: {"KEYS": 32, "num_warps": 4, "num_stages": 2},
    512: {"KEYS": 32, "num_warps": 4, "num_stages": 1},
}
TO_COLUMNS_BY_REGISTERS = {128: {"COLUMNS": 32}, 256: {"num_warps": 8}}
TO_KEYS_BY_REGISTERS = {128: {"KEYS": 64}}
"""What is different where matrix units read operands from registers."""


def attend(
    merged: Partial,
    heads: Heads,
    residuals: Residuals,
    columns: Columns,
    slopes: Slopes,
    first_rows: Tensor,
    *,
    is_chosen: bool,
) -> None:
    """Add the far field to `merged`, the own block's (H, N, Dv) output and (H, N) lse.

    `first_rows` is the selection, (H, nb, tiles, seen blocks K) uint8: read if it `is_chosen`, else written.
    """
    order, geometry = heads.order, heads.geometry
    config = geometry.config
    tiles = geometry.blocks * geometry.query_tiles
    assert config.tolerance is not None
    shared = {"out_ptr": merged.out, "lse_ptr": merged.lse, "ROWS": geometry.rows, **heads.compiled}
    _attend_to_columns[(tiles, geometry.heads)](
        **residuals.arguments, **columns.arguments, **slopes.arguments, **order.of_queries, first_rows_ptr=first_rows,
        **geometry.sizes(*SIZES_OF_COLUMNS), tolerance=config.tolerance, CAUTION=config.caution,
        LARGEST_GROWTH=LARGEST_GROWTH, IS_CAUSAL=geometry.is_causal, IS_CHOSEN=is_chosen,
        FIRST_ORDER=config.uses_first_order, SECOND_ORDER=config.uses_second_order, **shared,
        **heads.fit(TO_COLUMNS, TO_COLUMNS_BY_REGISTERS),
    )  # fmt: skip
    for begin, end in ranges_of_columns(geometry):
        listed = list_pieces(first_rows, begin, end, order, geometry)
        _attend_to_keys[(tiles, geometry.heads)](
            queries_ptr=heads.queries, keys_ptr=heads.keys, values_ptr=heads.values, **order.of_queries,
            key_order_ptr=order.keys, **listed, **geometry.sizes(*SIZES_OF_KEYS), SCALE=heads.scale, **shared,
            **heads.fit(TO_KEYS, TO_KEYS_BY_REGISTERS),
        )  # fmt: skip


@triton.jit
def _expected_error(log_weight, sigma, CAUTION: tl.constexpr, LARGEST_GROWTH: tl.constexpr):
    """What a weight would gain for each deviation if its logit were `CAUTION` deviations above its estimate."""
    growth = tl.exp2(tl.minimum(CAUTION * sigma, LARGEST_GROWTH) * LOG2_E) - 1.0
    return tl.exp2(log_weight * LOG2_E) * growth / CAUTION


@triton.jit
def _include(logits, values, largest, total, weighted, ACC: tl.constexpr):
    """Terms into the running softmax: the largest logit and the total, [ROWS], and the weighted values, [ROWS, DV]."""
    larger = tl.maximum(largest, tl.max(logits, 1))  # [ROWS]
    weights = exp_of_less(logits, larger[:, None])  # [ROWS, COLUMNS]
    # (Of equal ones exactly 1: what is added without weight changes nothing.)
    kept = tl.exp2((largest - larger) * LOG2_E)  # [ROWS]
    total = total * kept + tl.sum(weights, 1)
    weighted = add_dot(weights.to(values.dtype), values, weighted * kept[:, None])
    return larger, total, weighted


@kernel(stage="attention to summaries", do_not_specialize=[*SIZES_OF_COLUMNS, "tolerance"])
def _attend_to_columns(
    residuals_ptr, shift_ptr, width_ptr, log_mass_ptr, key_mean_ptr, value_mean_ptr, deviation_ptr, feared_ptr,
    most_ptr, worth_ptr, slope_ptr, slope_deviation_ptr, query_order_ptr, tile_begin_ptr, tile_info_ptr, first_rows_ptr,
    out_ptr, lse_ptr, length, block_size, blocks, seen_blocks, query_clusters, key_clusters, summarised, query_tiles,
    shared_by, tolerance, LARGEST_REACH: tl.constexpr, CAUTION: tl.constexpr, LARGEST_GROWTH: tl.constexpr,
    IS_CAUSAL: tl.constexpr, IS_CHOSEN: tl.constexpr, FIRST_ORDER: tl.constexpr, SECOND_ORDER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Decide what a tile's queries retrieve, and attend to the summaries of all the rest.

    Grid: (nb tiles, H). Residuals, columns, slopes, orders and tiles as in the classes of these names;
    `first_rows_ptr`: (H, nb, tiles, seen blocks K) uint8; `out_ptr`: (H, N, DV) and `lse_ptr`: (H, N), in the order of
    the inputs, read and written.
    """
    head = tl.program_id(1).to(tl.int64)
    # (Those that see most come first.)
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
    of_cluster = first_column(head, own_block, cluster, query_clusters, key_clusters, summarised, IS_CAUSAL)
    of_buckets = head // shared_by * seen_blocks * key_clusters
    first_rows_ptr += tile * seen_blocks * key_clusters

    # The running softmax begins with the own block. What the key offset adds is left out until the end.
    own_lse = tl.load(lse_ptr + head * length + position, mask=mask_row, other=0.0) - shift  # [ROWS]

    # 1. The lse with all summaries, which the weight of each is judged by.
    if not IS_CHOSEN:
        top, mass = own_lse, tl.full([ROWS], 1.0, ACC)  # [ROWS], [ROWS]
        for first in range(0, columns, COLUMNS):
            offs_column, mask_column = visible_columns(first, columns, own_block, key_clusters, COLUMNS, IS_CAUSAL)
            _, logits = score_columns(
                residual, width, log_mass_ptr, key_mean_ptr, deviation_ptr, most_ptr, of_cluster, of_buckets,
                offs_column, mask_column, SECOND_ORDER, D, ACC,
            )  # fmt: skip
            larger = tl.maximum(top, tl.max(logits, 1))  # [ROWS]
            mass = mass * tl.exp2((top - larger) * LOG2_E) + tl.sum(exp_of_less(logits, larger[:, None]), 1)
            top = larger
        judged_by = top + tl.log(mass)  # [ROWS]
        # Without caution, `exp(logit - lse) * sigma` reaches the tolerance where its logarithm does.
        least = judged_by + tl.log(tolerance) - tl.log(width)  # [ROWS]
        least = tl.where(tolerance > 0, least, float("-inf"))

    # 2. Decide on each, and attend to those that stay.
    largest, total = own_lse, tl.full([ROWS], 1.0, ACC)  # [ROWS], [ROWS]
    weighted = load_rows(out_ptr, head * length, position, mask_row, DV).to(ACC)  # [ROWS, DV]
    for first in range(0, columns, COLUMNS):
        offs_column, mask_column = visible_columns(first, columns, own_block, key_clusters, COLUMNS, IS_CAUSAL)
        _, logits = score_columns(
            residual, width, log_mass_ptr, key_mean_ptr, deviation_ptr, most_ptr, of_cluster, of_buckets, offs_column,
            mask_column, SECOND_ORDER, D, ACC,
        )  # fmt: skip
        if IS_CHOSEN:
            first_row = tl.load(first_rows_ptr + offs_column, mask=mask_column, other=255).to(tl.int32)  # [COLUMNS]
        else:
            feared = tl.load(feared_ptr + of_cluster + offs_column, mask=mask_column, other=0.0)  # [COLUMNS]
            worth = tl.load(worth_ptr + of_buckets + offs_column, mask=mask_column, other=0.0)  # [COLUMNS]
            if CAUTION > 0:
                # [ROWS, COLUMNS]
                error = _expected_error(
                    logits - judged_by[:, None], width[:, None] * feared[None, :], CAUTION, LARGEST_GROWTH
                )
                is_wanted = error * worth[None, :] >= tolerance  # [ROWS, COLUMNS]
            else:
                is_wanted = logits + tl.log(feared * worth)[None, :] >= least[:, None]  # [ROWS, COLUMNS]
            is_wanted &= (logits > float("-inf")) & mask_row[:, None]
            first_row = tl.min(tl.where(is_wanted, offs_row[:, None], 255), 0)  # [COLUMNS]
            tl.store(first_rows_ptr + offs_column, first_row.to(tl.uint8), mask=offs_column < columns)
        logits = tl.where(offs_row[:, None] < first_row[None, :], logits, float("-inf"))
        values = load_rows(value_mean_ptr, of_cluster, offs_column, mask_column, DV)  # [COLUMNS, DV]
        largest, total, weighted = _include(logits, values, largest, total, weighted, ACC)
    if FIRST_ORDER:
        _, _, gain = load_slope(
            slope_ptr, slope_deviation_ptr, head * blocks + own_block, residual, width, LARGEST_REACH, D, DV, ACC
        )
        of_summaries = total - tl.exp2((own_lse - largest) * LOG2_E)  # [ROWS]
        weighted += of_summaries[:, None] * gain
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
        at, mask_key, first_row = load_listed(list_ptr, key_order_ptr, first, pieces, KEYS)
        key = load_rows(keys_ptr, key_head * length, at, mask_key, D)  # [KEYS, D]
        value = load_rows(values_ptr, key_head * length, at, mask_key, DV)  # [KEYS, DV]
        logits = dot(query, tl.trans(key), ACC) * SCALE  # [ROWS, KEYS]
        # (Keys that do not exist have no row that attends to them.)
        first_row = tl.where(mask_key, first_row, 255)  # [KEYS]
        logits = tl.where(offs_row[:, None] >= first_row[None, :], logits, float("-inf"))
        largest, total, weighted = _include(logits, value, largest, total, weighted, ACC)
    store_rows(out_ptr, head * length, position, mask_row, weighted / total[:, None], DV)
    tl.store(lse_ptr + head * length + position, largest + tl.log(total), mask=mask_row)
