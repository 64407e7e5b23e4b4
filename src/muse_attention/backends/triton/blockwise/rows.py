"""The queries of a tile as kernels read them, and their logits against columns."""

from __future__ import annotations

import triton
import triton.language as tl

from muse_attention.backends.triton.blockwise.geometry import generation_of_block
from muse_attention.backends.triton.row_tiles import load_rows


@triton.jit
def load_tile_rows(tile_begin_ptr, tile_info_ptr, query_order_ptr, tile, of_head, ROWS: tl.constexpr):
    """Positions of the queries of a tile, [ROWS], how many they are, and their cluster.

    `of_head` is where the places of the head begin.
    """
    info = tl.load(tile_info_ptr + tile)
    number, cluster = info & 255, info >> 8
    offs_row = tl.arange(0, ROWS)
    ptrs = query_order_ptr + of_head + tl.load(tile_begin_ptr + tile) + offs_row  # [ROWS]
    return tl.load(ptrs, mask=offs_row < number, other=0), number, cluster


@triton.jit
def load_residuals(
    query, centroids_ptr, key_offset_ptr, key_spread_ptr, head, key_head, block, cluster, query_clusters, generations,
    SCALE: tl.constexpr, IS_CAUSAL: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of queries [ROWS, D]: residuals from their centroid in the queries' dtype, what the key offset adds to their
    logits, [ROWS], and their norms in units of the spread of keys, [ROWS]."""
    generation, _ = generation_of_block(block, IS_CAUSAL)
    offs_d = tl.arange(0, DP)  # [D]
    mask_d = offs_d < D  # [D]
    row = (head * generations + generation) * query_clusters + cluster
    centroid = tl.load(centroids_ptr + row * D + offs_d, mask=mask_d, other=0.0).to(ACC)  # [D]
    residual = query.to(ACC) * SCALE - centroid[None, :]  # [ROWS, D]
    offset = tl.load(key_offset_ptr + key_head * D + offs_d, mask=mask_d, other=0.0).to(ACC)  # [D]
    ptrs = key_spread_ptr + (key_head * generations + generation) * D + offs_d  # [D]
    metric = tl.load(ptrs, mask=mask_d, other=0.0).to(ACC)  # [D]
    shift = tl.sum(residual * offset[None, :], 1)  # [ROWS]
    width = tl.sqrt(tl.sum(residual * residual * metric[None, :], 1))  # [ROWS]
    return residual.to(query.dtype), shift, width


@triton.jit
def first_column(head, block, cluster, query_clusters, key_clusters, summarised, IS_CAUSAL: tl.constexpr):
    """Where the columns of a query cluster begin that its queries of a block see."""
    _, slot = generation_of_block(block, IS_CAUSAL)
    return ((head * query_clusters + cluster) * summarised + slot) * key_clusters


@triton.jit
def visible_columns(first, columns, own_block, key_clusters, COLUMNS: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """Of so many columns from `first` on, [COLUMNS]: their numbers, and whether a block sees them."""
    offs_column = first + tl.arange(0, COLUMNS)  # [COLUMNS]
    mask_column = offs_column < columns  # [COLUMNS]
    if not IS_CAUSAL:
        mask_column &= offs_column // key_clusters != own_block
    return offs_column, mask_column


@triton.jit
def score_columns(
    residual, width, log_mass_ptr, key_mean_ptr, deviation_ptr, most_ptr, of_cluster, of_buckets, offs_column,
    mask_column, SECOND_ORDER: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Means of the keys of columns, [COLUMNS, D], and the logits of the queries against them, [ROWS, COLUMNS], without
    what the key offset adds."""
    means = load_rows(key_mean_ptr, of_cluster, offs_column, mask_column, D, DP)  # [COLUMNS, D]
    masses = tl.load(log_mass_ptr + of_cluster + offs_column, mask=mask_column, other=float("-inf"))  # [COLUMNS]
    # [ROWS, COLUMNS]
    logits = tl.dot(residual, tl.trans(means), input_precision=PRECISION, out_dtype=ACC) + masses[None, :]
    if SECOND_ORDER:
        deviations = tl.load(deviation_ptr + of_cluster + offs_column, mask=mask_column, other=0.0)  # [COLUMNS]
        most = tl.load(most_ptr + of_buckets + offs_column, mask=mask_column, other=0.0)  # [COLUMNS]
        # `sigma^2 / 2` up to `most`, and from there on the line that continues it: so few keys cannot have more.
        sigma = width[:, None] * deviations[None, :]  # [ROWS, COLUMNS]
        within = tl.minimum(sigma, most[None, :])  # [ROWS, COLUMNS]
        logits += within * (sigma - 0.5 * within)
    return means, logits
