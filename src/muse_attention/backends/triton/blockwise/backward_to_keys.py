"""Gradients of keys and values: through the summaries of their bucket, and from the queries that retrieve it."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import (
    KEYS_OF_TILE,
    Geometry,
    first_summary,
    log2_floor,
    widths,
)
from muse_attention.backends.triton.blockwise.order import Order
from muse_attention.backends.triton.blockwise.rows import load_tile_rows
from muse_attention.backends.triton.blockwise.summaries import ColumnGradients, Columns
from muse_attention.backends.triton.device_math import exp_of_less
from muse_attention.backends.triton.numbers import arithmetic, fitting
from muse_attention.backends.triton.row_tiles import load_rows, store_rows
from muse_attention.backends.triton.runtime.launching import kernel

TO_KEYS = {
    128: {"CENTROIDS": 16, "SCAN": 256, "num_warps": 4, "num_stages": 2},
    256: {"CENTROIDS": 16, "SCAN": 256, "num_warps": 8, "num_stages": 2},
    512: {"CENTROIDS": 16, "SCAN": 256, "num_warps": 8, "num_stages": 1},
}
_SIZES = (
    "length", "block_size", "blocks", "seen_blocks", "query_clusters", "key_clusters", "generations", "summarised",
    "query_tiles", "key_tiles", "key_room", "shared_by",
)  # fmt: skip


def add_to_keys(
    grad_keys: Tensor,
    grad_values: Tensor,
    gradients: ColumnGradients,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    centroids: Tensor,
    key_offset: Tensor,
    columns: Columns,
    order: Order,
    first_rows: Tensor,
    geometry: Geometry,
    *,
    scale: float,
) -> None:
    """Add to the (G, N, D) and (G, N, Dv) gradients of keys and values."""
    config = geometry.config
    head_dim, value_dim = queries.shape[-1], values.shape[-1]
    launch = fitting(TO_KEYS, head_dim, value_dim, queries.dtype)
    tiles = geometry.seen_blocks * geometry.key_tiles
    lists = order.queries.new_empty(geometry.key_heads, tiles, launch["SCAN"])
    _far_backward_to_keys[(tiles, geometry.key_heads)](
        grad_keys_ptr=grad_keys, grad_values_ptr=grad_values, **gradients.arguments, grad_out_ptr=grad_out,
        lse_ptr=lse, delta_ptr=delta, queries_ptr=queries, keys_ptr=keys, values_ptr=values, centroids_ptr=centroids,
        key_offset_ptr=key_offset, log_mass_ptr=columns.log_mass, **order.of_queries, key_order_ptr=order.keys,
        key_tile_begin_ptr=order.key_tile_begin, key_tile_info_ptr=order.key_tile_info, first_rows_ptr=first_rows,
        lists_ptr=lists, **geometry.sizes(*_SIZES), SCALE=scale, IS_CAUSAL=geometry.is_causal,
        IS_FROZEN=not config.differentiable_aggregation, ROWS=geometry.rows, KEYS=KEYS_OF_TILE,
        **widths(head_dim, value_dim), **arithmetic(queries.dtype), **launch,
    )  # fmt: skip


@kernel(stage="retrieval", do_not_specialize=_SIZES)
def _far_backward_to_keys(
    grad_keys_ptr, grad_values_ptr, grad_log_mass_ptr, grad_key_mean_ptr, grad_value_mean_ptr, grad_out_ptr, lse_ptr,
    delta_ptr, queries_ptr, keys_ptr, values_ptr, centroids_ptr, key_offset_ptr, log_mass_ptr, query_order_ptr,
    tile_begin_ptr, tile_info_ptr, key_order_ptr, key_tile_begin_ptr, key_tile_info_ptr, first_rows_ptr, lists_ptr,
    length, block_size, blocks, seen_blocks, query_clusters, key_clusters, generations, summarised, query_tiles,
    key_tiles, key_room, shared_by, SCALE: tl.constexpr, IS_CAUSAL: tl.constexpr, IS_FROZEN: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CENTROIDS: tl.constexpr, SCAN: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Up to `KEYS` keys of one bucket.

    Grid: (seen blocks tiles, G). `grad_keys_ptr`: (G, N, D) and `grad_values_ptr`: (G, N, DV); `key_tile_*_ptr`:
    (G, seen blocks, tiles) int32; `lists_ptr`: (G, seen blocks tiles, SCAN) int32; the others as in
    `_far_backward_to_summaries`.
    """
    tile_of_keys, key_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    of_tile = key_head * tl.num_programs(0) + tile_of_keys
    info = tl.load(key_tile_info_ptr + of_tile)
    number, key_cluster = info & 255, info >> 8
    if number == 0:
        return
    block = tile_of_keys // key_tiles
    offs_key, offs_d = tl.arange(0, KEYS), tl.arange(0, DP)  # [KEYS], [D]
    mask_key = offs_key < number  # [KEYS]
    ptrs = key_order_ptr + key_head * seen_blocks * key_room + tl.load(key_tile_begin_ptr + of_tile) + offs_key
    at = tl.load(ptrs, mask=mask_key, other=0)  # [KEYS]
    keys = load_rows(keys_ptr, key_head * length, at, mask_key, D, DP)  # [KEYS, D]
    values = load_rows(values_ptr, key_head * length, at, mask_key, DV, DVP)  # [KEYS, DV]
    d_keys = tl.zeros([KEYS, DP], ACC)  # [KEYS, D]
    d_values = tl.zeros([KEYS, DVP], ACC)  # [KEYS, DV]

    # 1. Through the summaries, some query centroids of each head at a time.
    offset = tl.load(key_offset_ptr + key_head * D + offs_d, mask=offs_d < D, other=0.0).to(ACC)  # [D]
    centred = (keys.to(ACC) - offset[None, :]).to(keys.dtype)  # [KEYS, D]
    all_rows = generations * query_clusters
    first_row_of_all = (log2_floor(block + 1) if IS_CAUSAL else 0) * query_clusters
    offs_centroid = tl.arange(0, CENTROIDS)
    for head_of_group in range(shared_by):
        head = key_head * shared_by + head_of_group
        of_head = head * query_clusters * summarised * key_clusters
        for begin in range(first_row_of_all, all_rows, CENTROIDS):
            row = begin + offs_centroid  # [CENTROIDS]
            mask_row = row < all_rows  # [CENTROIDS]
            centroid = load_rows(centroids_ptr, head * all_rows, row, mask_row, D, DP).to(keys.dtype)  # [CENTROIDS, D]
            generation = row // query_clusters  # [CENTROIDS]
            slot = block + (first_summary(generation) if IS_CAUSAL else generation * 0)  # [CENTROIDS]
            offs = (row % query_clusters * summarised + slot) * key_clusters + key_cluster  # [CENTROIDS]
            mass = tl.load(log_mass_ptr + of_head + offs, mask=mask_row, other=float("inf"))  # [CENTROIDS]
            d_mass = tl.load(grad_log_mass_ptr + of_head + offs, mask=mask_row, other=0.0)  # [CENTROIDS]
            d_key_mean = load_rows(grad_key_mean_ptr, of_head, offs, mask_row, D, DP)  # [CENTROIDS, D]
            d_value_mean = load_rows(grad_value_mean_ptr, of_head, offs, mask_row, DV, DVP)  # [CENTROIDS, DV]
            logits = tl.dot(keys, tl.trans(centroid), input_precision=PRECISION, out_dtype=ACC)  # [KEYS, CENTROIDS]
            weights = exp_of_less(logits, mass[None, :])  # [KEYS, CENTROIDS]
            d_logits = tl.zeros([KEYS, CENTROIDS], ACC) + d_mass[None, :]  # [KEYS, CENTROIDS]
            if not IS_FROZEN:
                d_logits += tl.dot(
                    centred.to(d_key_mean.dtype), tl.trans(d_key_mean), input_precision=PRECISION, out_dtype=ACC
                )
                d_logits += tl.dot(
                    values.to(d_key_mean.dtype), tl.trans(d_value_mean), input_precision=PRECISION, out_dtype=ACC
                )
            d_logits = (weights * d_logits).to(d_key_mean.dtype)  # [KEYS, CENTROIDS]
            weights = weights.to(d_key_mean.dtype)
            d_keys = tl.dot(weights, d_key_mean, d_keys, input_precision=PRECISION, out_dtype=ACC)
            d_keys = tl.dot(d_logits, centroid.to(d_key_mean.dtype), d_keys, input_precision=PRECISION, out_dtype=ACC)
            d_values = tl.dot(weights, d_value_mean, d_values, input_precision=PRECISION, out_dtype=ACC)

    # 2. From the tiles of queries that retrieve the bucket, listed some at a time.
    list_ptr = lists_ptr + of_tile * SCAN
    bucket = block * key_clusters + key_cluster
    columns = seen_blocks * key_clusters
    tiles = blocks * query_tiles
    offs_scan, offs_row = tl.arange(0, SCAN), tl.arange(0, ROWS)  # [SCAN], [ROWS]
    d_queries = tl.zeros([KEYS, DP], ACC)  # [KEYS, D], of scaled queries
    for head_of_group in range(shared_by):
        head = key_head * shared_by + head_of_group
        for begin in range((block + 1) * query_tiles if IS_CAUSAL else 0, tiles, SCAN):
            tile = begin + offs_scan  # [SCAN]
            wanted_ptrs = first_rows_ptr + (head * tiles + tile) * columns + bucket  # [SCAN]
            first_row = tl.load(wanted_ptrs, mask=tile < tiles, other=255).to(tl.int32)  # [SCAN]
            is_wanted = (first_row < 255).to(tl.int32)  # [SCAN]
            wanted = tl.sum(is_wanted, 0)
            if wanted > 0:
                tl.debug_barrier()  # (Nobody reads the last list any more.)
                to = tl.cumsum(is_wanted, 0) - 1  # [SCAN]
                tl.store(list_ptr + to, tile * 256 + first_row, mask=is_wanted > 0)
                tl.debug_barrier()  # (What one thread writes, others read.)
                for listed in range(wanted):
                    entry = tl.load(list_ptr + listed)
                    # [ROWS], scalar, scalar
                    position, rows, _ = load_tile_rows(
                        tile_begin_ptr, tile_info_ptr, query_order_ptr, head * tiles + (entry >> 8),
                        head * blocks * block_size, ROWS,
                    )  # fmt: skip
                    mask_row = (offs_row < rows) & (offs_row >= (entry & 255))  # [ROWS]
                    query = load_rows(queries_ptr, head * length, position, mask_row, D, DP)  # [ROWS, D]
                    grad_out = load_rows(grad_out_ptr, head * length, position, mask_row, DV, DVP)  # [ROWS, DV]
                    ptrs_row = head * length + position  # [ROWS]
                    lse = tl.load(lse_ptr + ptrs_row, mask=mask_row, other=float("inf"))  # [ROWS]
                    delta = tl.load(delta_ptr + ptrs_row, mask=mask_row, other=0.0)  # [ROWS]
                    logits = tl.dot(keys, tl.trans(query), input_precision=PRECISION, out_dtype=ACC)  # [KEYS, ROWS]
                    weights = exp_of_less(logits * SCALE, lse[None, :])  # [KEYS, ROWS]
                    response = tl.dot(values, tl.trans(grad_out), input_precision=PRECISION, out_dtype=ACC)
                    d_logits = weights * (response - delta[None, :])  # [KEYS, ROWS]
                    d_values = tl.dot(
                        weights.to(grad_out.dtype), grad_out, d_values, input_precision=PRECISION, out_dtype=ACC
                    )
                    d_queries = tl.dot(
                        d_logits.to(query.dtype), query, d_queries, input_precision=PRECISION, out_dtype=ACC
                    )
    d_keys += d_queries * SCALE
    d_keys += load_rows(grad_keys_ptr, key_head * length, at, mask_key, D, DP).to(ACC)
    store_rows(grad_keys_ptr, key_head * length, at, mask_key, d_keys, D, DP)
    d_values += load_rows(grad_values_ptr, key_head * length, at, mask_key, DV, DVP).to(ACC)
    store_rows(grad_values_ptr, key_head * length, at, mask_key, d_values, DV, DVP)
