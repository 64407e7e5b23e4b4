"""Gradients of keys and values: through the summaries of their bucket, and from the queries that retrieve it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import KEYS_OF_TILE, first_summary
from muse_attention.backends.triton.blockwise.heads import Heads
from muse_attention.backends.triton.blockwise.pieces import (
    STRIP,
    STRIP_SIZE,
    begin_of_strips,
    list_strips,
    load_rows_of_strips,
    load_strips,
)
from muse_attention.backends.triton.blockwise.rows import RowSoftmax
from muse_attention.backends.triton.blockwise.summaries import ColumnGradients, Columns
from muse_attention.backends.triton.device_functions import (
    add_dot,
    dot,
    exp_of_less,
    load_pairs,
    load_row,
    load_rows,
    log2_floor,
    store_rows,
)
from muse_attention.backends.triton.filling import fill
from muse_attention.backends.triton.numbers import padded
from muse_attention.backends.triton.runtime.launching import arguments_of, kernel

FROM_SUMMARIES = {
    128: {"CENTROIDS": 16, "num_warps": 4, "num_stages": 1, "maxnreg": 128},
    256: {"CENTROIDS": 16, "num_warps": 4, "num_stages": 2},
    512: {"CENTROIDS": 16, "num_warps": 8, "num_stages": 1},
}
FROM_QUERIES = {
    128: {"ROWS": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 144},
    256: {"ROWS": 32, "num_warps": 4, "num_stages": 3},
    512: {"ROWS": 64, "num_warps": 8, "num_stages": 1},
}
FROM_SUMMARIES_BY_REGISTERS = {256: {"num_warps": 8}}
FROM_QUERIES_BY_REGISTERS = {256: {"num_warps": 8, "num_stages": 1}}
"""What differs where matrix units read operands from registers."""
_PARTS = 4
"""Programs that share the queries of a bucket that many retrieve, such as an attention sink."""
_LEAST_ROWS_OF_PART = 2048
"""Rows of strips, full or not, that each of them but the last has at least: every program rounds what it adds."""
_SUMMARY_SIZES = (
    "length", "seen_blocks", "query_clusters", "key_clusters", "generations", "summarised", "key_tiles", "key_room",
    "shared_by",
)  # fmt: skip
_QUERY_SIZES = ("length", "block_size", "blocks", "seen_blocks", "key_clusters", "key_tiles", "key_room", "shared_by")


def add_to_keys(
    grad_keys: Tensor,
    grad_values: Tensor,
    gradients: ColumnGradients,
    grad_out: Tensor,
    row_softmax: RowSoftmax,
    heads: Heads,
    columns: Columns,
    first_rows: Tensor,
) -> None:
    """Add to the (G, N, D) and (G, N, Dv) gradients of keys and values. `grad_out` is (H, N, Dv)."""
    order, geometry = heads.order, heads.geometry
    grid = (geometry.seen_blocks * geometry.key_tiles, geometry.key_heads)
    shared = {
        "grad_keys_ptr": grad_keys,
        "grad_values_ptr": grad_values,
        "keys_ptr": heads.keys,
        "values_ptr": heads.values,
        "key_order_ptr": order.keys,
        "key_tile_begin_ptr": order.key_tile_begin,
        "key_tile_info_ptr": order.key_tile_info,
        "KEYS": KEYS_OF_TILE,
        **heads.compiled,
    }
    _summaries_backward_to_keys[grid](
        **shared, **arguments_of(gradients, "grad_"), centroids_ptr=heads.centroids, key_offset_ptr=heads.key_offset,
        numbers_ptr=columns.numbers, **geometry.sizes(*_SUMMARY_SIZES), IS_CAUSAL=geometry.is_causal,
        IS_FROZEN=not geometry.config.differentiable_aggregation,
        **heads.fit(FROM_SUMMARIES, FROM_SUMMARIES_BY_REGISTERS),
    )  # fmt: skip
    turns = fill(order.queries.new_empty(geometry.key_heads, grid[0]), 0)
    _queries_backward_to_keys[(grid[0] * _PARTS, grid[1])](
        **shared, grad_out_ptr=grad_out, for_keys_ptr=row_softmax.for_keys, queries_ptr=heads.queries,
        query_order_ptr=order.queries, **list_strips(first_rows, order, geometry), turns_ptr=turns,
        **geometry.sizes(*_QUERY_SIZES), SCALE=heads.scale, LEAST_STRIPS=_LEAST_ROWS_OF_PART // STRIP, PARTS=_PARTS,
        **heads.fit(FROM_QUERIES, FROM_QUERIES_BY_REGISTERS),
    )  # fmt: skip


@triton.jit
def _load_keys_of_tile(
    keys_ptr, values_ptr, key_order_ptr, key_tile_begin_ptr, tile, key_head, number, length, seen_blocks, key_room,
    KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Positions of the keys of a tile and which of them exist, [KEYS]; keys [KEYS, D]; values [KEYS, DV]."""
    offs_key = tl.arange(0, KEYS)
    mask_key = offs_key < number  # [KEYS]
    ptrs = key_order_ptr + key_head * seen_blocks * key_room + tl.load(key_tile_begin_ptr + tile) + offs_key  # [KEYS]
    key_position = tl.load(ptrs, mask=mask_key, other=0)  # [KEYS]
    keys = load_rows(keys_ptr, key_head * length, key_position, mask_key, D)  # [KEYS, D]
    return key_position, mask_key, keys, load_rows(values_ptr, key_head * length, key_position, mask_key, DV)


@triton.jit
def _add_to_rows(gradient_ptr, first, key_position, mask_key, gradient, X: tl.constexpr, ACC: tl.constexpr):
    gradient += load_rows(gradient_ptr, first, key_position, mask_key, X).to(ACC)
    store_rows(gradient_ptr, first, key_position, mask_key, gradient, X)


@kernel(stage="summaries", do_not_specialize=_SUMMARY_SIZES)
def _summaries_backward_to_keys(
    grad_keys_ptr, grad_values_ptr, grad_log_mass_ptr, grad_key_mean_ptr, grad_value_mean_ptr, keys_ptr, values_ptr,
    centroids_ptr, key_offset_ptr, numbers_ptr, key_order_ptr, key_tile_begin_ptr, key_tile_info_ptr, length,
    seen_blocks, query_clusters, key_clusters, generations, summarised, key_tiles, key_room, shared_by,
    IS_CAUSAL: tl.constexpr, IS_FROZEN: tl.constexpr, KEYS: tl.constexpr, CENTROIDS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of up to `KEYS` keys of one bucket, from its summaries.

    Grid: (seen blocks tiles, G). `grad_keys_ptr`, `keys_ptr`: (G, N, D); `grad_values_ptr`, `values_ptr`: (G, N, DV);
    `centroids_ptr`: (H, S, Q, D); `key_offset_ptr`: (G, D); other gradients and `numbers_ptr` as in `Columns`;
    `key_order_ptr`: (G, seen blocks, room) int32; `key_tile_*_ptr`: (G, seen blocks, tiles) int32.
    """
    key_head = tl.program_id(1).to(tl.int64)
    tile = key_head * tl.num_programs(0) + tl.program_id(0)
    info = tl.load(key_tile_info_ptr + tile)
    if info == 0:
        return
    block, key_cluster = tl.program_id(0) // key_tiles, info >> 8
    key_position, mask_key, keys, values = _load_keys_of_tile(
        keys_ptr, values_ptr, key_order_ptr, key_tile_begin_ptr, tile, key_head, info & 255, length, seen_blocks,
        key_room, KEYS, D, DV,
    )  # fmt: skip
    offs_centroid = tl.arange(0, CENTROIDS)
    offset = load_row(key_offset_ptr, key_head, D).to(ACC)  # [D]
    centred = (keys.to(ACC) - offset[None, :]).to(keys.dtype)  # [KEYS, D]
    d_keys = tl.zeros([KEYS, padded(D)], ACC)  # [KEYS, D]
    d_values = tl.zeros([KEYS, padded(DV)], ACC)  # [KEYS, DV]
    all_rows = generations * query_clusters
    first = (log2_floor(block + 1) if IS_CAUSAL else 0) * query_clusters
    for head in range(key_head * shared_by, (key_head + 1) * shared_by):
        head_base = head * query_clusters * summarised * key_clusters
        for begin in range(first, all_rows, CENTROIDS):
            row = begin + offs_centroid  # [CENTROIDS]
            mask_row = row < all_rows  # [CENTROIDS]
            centroid = load_rows(centroids_ptr, head * all_rows, row, mask_row, D).to(keys.dtype)  # [CENTROIDS, D]
            generation = row // query_clusters  # [CENTROIDS]
            slot = block + (first_summary(generation) if IS_CAUSAL else generation * 0)  # [CENTROIDS]
            offs = (row % query_clusters * summarised + slot) * key_clusters + key_cluster  # [CENTROIDS]
            mass = tl.load(numbers_ptr + (head_base + offs) * 4, mask=mask_row, other=float("inf"))  # [CENTROIDS]
            d_mass = tl.load(grad_log_mass_ptr + head_base + offs, mask=mask_row, other=0.0)  # [CENTROIDS]
            d_key_mean = load_rows(grad_key_mean_ptr, head_base, offs, mask_row, D)  # [CENTROIDS, D]
            d_value_mean = load_rows(grad_value_mean_ptr, head_base, offs, mask_row, DV)  # [CENTROIDS, DV]
            logits = dot(keys, tl.trans(centroid), ACC)  # [KEYS, CENTROIDS]
            weights = exp_of_less(logits, mass[None, :])  # [KEYS, CENTROIDS]
            d_logits = tl.zeros([KEYS, CENTROIDS], ACC) + d_mass[None, :]  # [KEYS, CENTROIDS]
            if not IS_FROZEN:
                d_logits += dot(centred.to(d_key_mean.dtype), tl.trans(d_key_mean), ACC)
                d_logits += dot(values.to(d_key_mean.dtype), tl.trans(d_value_mean), ACC)
            d_logits = (weights * d_logits).to(d_key_mean.dtype)  # [KEYS, CENTROIDS]
            weights = weights.to(d_key_mean.dtype)
            d_keys = add_dot(weights, d_key_mean, d_keys)
            d_keys = add_dot(d_logits, centroid.to(d_key_mean.dtype), d_keys)
            d_values = add_dot(weights, d_value_mean, d_values)
    _add_to_rows(grad_keys_ptr, key_head * length, key_position, mask_key, d_keys, D, ACC)
    _add_to_rows(grad_values_ptr, key_head * length, key_position, mask_key, d_values, DV, ACC)


@kernel(stage="retrieval", do_not_specialize=[*_QUERY_SIZES, "tile_room"])
def _queries_backward_to_keys(
    grad_keys_ptr, grad_values_ptr, grad_out_ptr, for_keys_ptr, queries_ptr, keys_ptr, values_ptr, query_order_ptr,
    key_order_ptr, key_tile_begin_ptr, key_tile_info_ptr, strips_ptr, listed_ptr, turns_ptr, length, block_size, blocks,
    seen_blocks, key_clusters, key_tiles, key_room, shared_by, tile_room, IS_CAUSAL: tl.constexpr, SCALE: tl.constexpr,
    LEAST_STRIPS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of up to `KEYS` keys of one bucket, from a part of the queries that retrieve it.

    Parts add their sums in turn, so that the order is fixed. (The GPU starts a part no later than those after it.)

    Grid: (seen blocks tiles parts, G). `queries_ptr`: (H, N, D); `grad_out_ptr`: (H, N, DV); `for_keys_ptr` as in
    `RowSoftmax`; `query_order_ptr`: (H, nb B) int32; lists as `list_strips` returns them; `turns_ptr`: (G, seen blocks
    tiles) int32, all 0; the others as in `_summaries_backward_to_keys`.
    """
    key_head = tl.program_id(1).to(tl.int64)
    number_of_tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    tile = key_head * (tl.num_programs(0) // PARTS) + number_of_tile
    info = tl.load(key_tile_info_ptr + tile)
    if info == 0:
        return
    block, key_cluster = number_of_tile // key_tiles, info >> 8
    longest = 0
    for head in range(key_head * shared_by, (key_head + 1) * shared_by):
        bucket = (head * seen_blocks + block) * key_clusters + key_cluster
        longest = tl.maximum(longest, tl.load(listed_ptr + bucket))
    AT_ONCE: tl.constexpr = ROWS // STRIP_SIZE
    strips_per_part = tl.maximum(LEAST_STRIPS, tl.cdiv(tl.cdiv(longest, PARTS), AT_ONCE) * AT_ONCE)
    if part * strips_per_part >= longest:
        return
    key_position, mask_key, keys, values = _load_keys_of_tile(
        keys_ptr, values_ptr, key_order_ptr, key_tile_begin_ptr, tile, key_head, info & 255, length, seen_blocks,
        key_room, KEYS, D, DV,
    )  # fmt: skip
    d_keys = tl.zeros([KEYS, padded(D)], ACC)  # [KEYS, D]
    d_values = tl.zeros([KEYS, padded(DV)], ACC)  # [KEYS, DV]
    for head in range(key_head * shared_by, (key_head + 1) * shared_by):
        bucket = (head * seen_blocks + block) * key_clusters + key_cluster
        list_ptr = strips_ptr + begin_of_strips(head, block, key_cluster, blocks, key_clusters, tile_room, IS_CAUSAL)
        first = part * strips_per_part
        number = tl.minimum(tl.load(listed_ptr + bucket), first + strips_per_part)
        head_base = head * blocks * block_size
        # (Positions are loaded one round ahead, strips two.)
        place, position = load_rows_of_strips(query_order_ptr + head_base, load_strips(list_ptr, first, number, ROWS))
        entry = load_strips(list_ptr, first + AT_ONCE, number, ROWS)
        for begin in range(first, number, AT_ONCE):
            mask_row = position >= 0  # [ROWS]
            query = load_rows(queries_ptr, head * length, position, mask_row, D)  # [ROWS, D]
            grad_out = load_rows(grad_out_ptr, head * length, position, mask_row, DV)  # [ROWS, DV]
            lse, delta = load_pairs(for_keys_ptr, head_base, place, mask_row, float("inf"), 0.0)  # [ROWS] each
            place, position = load_rows_of_strips(query_order_ptr + head_base, entry)
            entry = load_strips(list_ptr, begin + 2 * AT_ONCE, number, ROWS)
            logits = dot(keys, tl.trans(query), ACC)  # [KEYS, ROWS]
            weights = exp_of_less(logits, lse[None, :], SCALE)  # [KEYS, ROWS]
            response = dot(values, tl.trans(grad_out), ACC)  # [KEYS, ROWS]
            d_logits = weights * (response - delta[None, :])  # [KEYS, ROWS]
            d_values = add_dot(weights.to(grad_out.dtype), grad_out, d_values)
            d_keys = add_dot(d_logits.to(query.dtype), query, d_keys)
    while tl.atomic_add(turns_ptr + tile, 0) < part:
        pass
    _add_to_rows(grad_keys_ptr, key_head * length, key_position, mask_key, d_keys * SCALE, D, ACC)
    _add_to_rows(grad_values_ptr, key_head * length, key_position, mask_key, d_values, DV, ACC)
    tl.debug_barrier()  # (All is written before the next part's turn.)
    tl.atomic_add(turns_ptr + tile, 1)
