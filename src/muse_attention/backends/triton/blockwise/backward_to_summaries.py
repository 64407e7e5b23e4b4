"""Gradients of the summaries, from all queries that attend to them."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import first_summary
from muse_attention.backends.triton.blockwise.heads import Heads
from muse_attention.backends.triton.blockwise.rows import SIZES_OF_COLUMNS, Residuals, RowSoftmax
from muse_attention.backends.triton.blockwise.summaries import ColumnGradients, Columns, load_numbers
from muse_attention.backends.triton.device_functions import (
    add_dot,
    dot,
    exp_of_less,
    load_pairs,
    load_rows,
    store_rows,
)
from muse_attention.backends.triton.numbers import cdiv, padded
from muse_attention.backends.triton.runtime.launching import arguments_of, kernel

TO_SUMMARIES = {
    128: {"COLUMNS": 64, "ROWS": 64, "num_warps": 4, "num_stages": 1},
    256: {"COLUMNS": 64, "ROWS": 32, "num_warps": 4, "num_stages": 1},
    512: {"COLUMNS": 16, "ROWS": 64, "num_warps": 4, "num_stages": 1},
}
BY_REGISTERS = {128: {"COLUMNS": 32}, 256: {"COLUMNS": 32, "num_warps": 8}}
"""What differs where matrix units read operands from registers."""


def find_gradients_of_summaries(
    grad_out: Tensor, row_softmax: RowSoftmax, heads: Heads, residuals: Residuals, columns: Columns, first_rows: Tensor
) -> ColumnGradients:
    """`grad_out` is (H, N, Dv)."""
    order, geometry = heads.order, heads.geometry
    config = geometry.config
    gradients = ColumnGradients.new(columns)
    launch = heads.fit(TO_SUMMARIES, BY_REGISTERS)
    launch = {**launch, "ROWS": min(launch["ROWS"], geometry.rows)}
    centroids = geometry.generations.number * config.query_clusters
    _far_backward_to_summaries[(cdiv(geometry.columns, launch["COLUMNS"]), centroids, geometry.heads)](
        grad_out_ptr=grad_out, for_summaries_ptr=row_softmax.for_summaries, residuals_ptr=residuals.residuals,
        width_ptr=residuals.width, **arguments_of(columns), query_order_ptr=order.queries,
        tile_begin_ptr=order.query_tile_begin, tile_info_ptr=order.query_tile_info,
        tiles_before_ptr=order.query_tiles_before, first_rows_ptr=first_rows, **arguments_of(gradients, "grad_"),
        **geometry.sizes(*SIZES_OF_COLUMNS), IS_CAUSAL=geometry.is_causal, SECOND_ORDER=config.uses_second_order,
        IS_FROZEN=not config.differentiable_aggregation, TILE=config.tile, **heads.compiled, **launch,
    )  # fmt: skip
    return gradients


@kernel(stage="attention to summaries", do_not_specialize=SIZES_OF_COLUMNS)
def _far_backward_to_summaries(
    grad_out_ptr, for_summaries_ptr, residuals_ptr, width_ptr, numbers_ptr, key_mean_ptr, value_mean_ptr,
    query_order_ptr, tile_begin_ptr, tile_info_ptr, tiles_before_ptr, first_rows_ptr, grad_log_mass_ptr,
    grad_key_mean_ptr, grad_value_mean_ptr, length, block_size, blocks, seen_blocks, query_clusters, key_clusters,
    summarised, query_tiles, IS_CAUSAL: tl.constexpr, SECOND_ORDER: tl.constexpr, IS_FROZEN: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of some columns, as one query cluster of one generation sees them.

    Grid: (columns / COLUMNS, S Q, H). `for_summaries_ptr` as in `RowSoftmax`; `tiles_before_ptr`: (H, nb, Q + 1) int32;
    `grad_*_ptr` as the columns; the others as in `_columns_backward_to_queries`.
    """
    # (Generations with the most queries come first.)
    row, head = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2).to(tl.int64)
    generation, cluster = row // query_clusters, row % query_clusters
    first = tl.program_id(0) * COLUMNS
    if IS_CAUSAL:
        end_block = tl.minimum(2 << generation, blocks)
        first_block, columns = tl.maximum(first // key_clusters + 1, 1 << generation), (end_block - 1) * key_clusters
    else:
        first_block, end_block, columns = 0, blocks, blocks * key_clusters
    if first >= columns:
        return
    offs_column = first + tl.arange(0, COLUMNS)
    mask_column = offs_column < columns  # [COLUMNS]
    slot = first_summary(generation) if IS_CAUSAL else 0
    slot_base = ((head * query_clusters + cluster) * summarised + slot) * key_clusters
    means = load_rows(key_mean_ptr, slot_base, offs_column, mask_column, D)  # [COLUMNS, D]
    values = load_rows(value_mean_ptr, slot_base, offs_column, mask_column, DV)  # [COLUMNS, DV]
    # [COLUMNS] each
    masses, deviations, limits, _ = load_numbers(numbers_ptr, slot_base, offs_column, mask_column)
    d_means = tl.zeros([COLUMNS, padded(D)], ACC)  # [COLUMNS, D]
    d_values = tl.zeros([COLUMNS, padded(DV)], ACC)  # [COLUMNS, DV]
    d_mass = tl.zeros([COLUMNS], ACC)
    offs_row = tl.arange(0, ROWS)
    STEP: tl.constexpr = min(ROWS, TILE)
    for own_block in range(first_block, end_block):
        block_index = head * blocks + own_block
        before_ptr = tiles_before_ptr + block_index * (query_clusters + 1) + cluster
        first_tile, tiles = tl.load(before_ptr), tl.load(before_ptr + 1)
        tiles -= first_tile
        block = offs_column // key_clusters  # [COLUMNS]
        is_seen = block < own_block if IS_CAUSAL else block != own_block  # [COLUMNS]
        # (The tiles of a cluster are consecutive, and all but the last are full.)
        tile = block_index * query_tiles + first_tile
        place = head * blocks * block_size + tl.load(tile_begin_ptr + tile, mask=tiles > 0, other=0)
        rows_of_last = tl.load(tile_info_ptr + tile + tiles - 1, mask=tiles > 0, other=0) & 255
        rows = tl.maximum((tiles - 1) * TILE + rows_of_last, 0)
        # (The next rows' positions are loaded early.)
        next_mask = offs_row < tl.minimum(rows, STEP)  # [ROWS]
        next_position = tl.load(query_order_ptr + place + offs_row, mask=next_mask, other=0)  # [ROWS]
        for begin in range(0, rows, STEP):
            mask_row, position = next_mask, next_position
            next_mask = offs_row < tl.minimum(rows - begin - STEP, STEP)  # [ROWS]
            ptrs = query_order_ptr + place + begin + STEP + offs_row  # [ROWS]
            next_position = tl.load(ptrs, mask=next_mask, other=0)  # [ROWS]
            residual = load_rows(residuals_ptr, place + begin, offs_row, mask_row, D)  # [ROWS, D]
            grad_out = load_rows(grad_out_ptr, head * length, position, mask_row, DV)  # [ROWS, DV]
            # [ROWS] each
            lse, delta = load_pairs(for_summaries_ptr, place + begin, offs_row, mask_row, float("inf"), 0.0)
            wanted_ptrs = first_rows_ptr + (tile + begin // TILE) * seen_blocks * key_clusters + offs_column
            first_row = tl.load(wanted_ptrs, mask=mask_column & is_seen, other=0).to(tl.int32)  # [COLUMNS]
            # [COLUMNS, ROWS]
            logits = dot(means, tl.trans(residual), ACC) + masses[:, None]
            if SECOND_ORDER:
                width = tl.load(width_ptr + place + begin + offs_row, mask=mask_row, other=0.0)  # [ROWS]
                sigma = deviations[:, None] * width[None, :]  # [COLUMNS, ROWS]
                within = tl.minimum(sigma, limits[:, None])  # [COLUMNS, ROWS]
                logits += within * (sigma - 0.5 * within)
            logits = tl.where(begin % TILE + offs_row[None, :] < first_row[:, None], logits, float("-inf"))
            weights = exp_of_less(logits, lse[None, :])  # [COLUMNS, ROWS]
            response = dot(values, tl.trans(grad_out), ACC)  # [COLUMNS, ROWS]
            d_logits = weights * (response - delta[None, :])  # [COLUMNS, ROWS]
            d_mass += tl.sum(d_logits, 1)
            d_values = add_dot(weights.to(grad_out.dtype), grad_out, d_values)
            d_means = add_dot(d_logits.to(residual.dtype), residual, d_means)
    if not IS_FROZEN:
        d_mass -= tl.sum(means.to(ACC) * d_means, 1) + tl.sum(values.to(ACC) * d_values, 1)
    tl.store(grad_log_mass_ptr + slot_base + offs_column, d_mass, mask=mask_column)
    store_rows(grad_key_mean_ptr, slot_base, offs_column, mask_column, d_means, D)
    store_rows(grad_value_mean_ptr, slot_base, offs_column, mask_column, d_values, DV)
