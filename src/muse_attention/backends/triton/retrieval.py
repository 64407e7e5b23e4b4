"""Stage 5: exact attention to the retrieved buckets, bucket by bucket.

A pair is a query and a bucket that it retrieves. All queries have the same number of pairs, some without a bucket, so
the number of a pair tells its query. The pairs of a key head are sorted by bucket. A tile holds queries that retrieve
the same bucket, and streams the bucket's keys. Each pair yields one partial softmax, stored under the pair's number. In
the backward pass tiles of queries yield the gradients of queries; tiles of keys, which stream the bucket's queries,
yield those of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.bucket_summaries import PairGradients
from muse_attention.backends.triton.device_functions import (
    LOG2_E,
    add_dot,
    dot,
    include,
    load_row,
    load_rows,
    store_rows,
)
from muse_attention.backends.triton.filling import fill
from muse_attention.backends.triton.grouping import Groups
from muse_attention.backends.triton.key_offset import QueryGradients
from muse_attention.backends.triton.numbers import accumulator, fitting, gradient_dtype, padded, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.tiles import Tiles, cut_groups, cut_ranges, load_places, load_tile
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Partial

ATTEND = {
    128: {"KEYS": 32, "num_warps": 4, "num_stages": 3},
    256: {"KEYS": 32, "num_warps": 4, "num_stages": 3},
    512: {"KEYS": 16, "num_warps": 4, "num_stages": 1},
}
ATTEND_BACKWARD_TO_QUERIES = {
    128: {"KEYS": 32, "num_warps": 4, "num_stages": 3},
    256: {"KEYS": 32, "num_warps": 4, "num_stages": 2},
    512: {"KEYS": 16, "num_warps": 4, "num_stages": 1},
}
ATTEND_BACKWARD_TO_KEYS = {
    128: {"PAIRS": 128, "num_warps": 4, "num_stages": 2},
    256: {"PAIRS": 64, "num_warps": 4, "num_stages": 3},
    512: {"PAIRS": 16, "num_warps": 4, "num_stages": 1},
}
PAIRS_OF_PIECE = 2048
"""Queries that one program streams through a tile of their bucket's keys, if there is room for all the pieces."""
PAIRS_OF_TILE = 64
"""Queries in a tile; all retrieve the same bucket."""


@dataclass(frozen=True)
class Pairs:
    """The pairs of `G` key heads, `L` of each."""

    groups: Groups
    """pairs by bucket: order (G, L)"""
    tiles: Tiles
    picks: int
    """pairs per query"""

    @property
    def shape(self) -> torch.Size:
        return self.groups.order.shape

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of kernels."""
        return {"pair_order_ptr": self.groups.order, "picks": self.picks}

    @classmethod
    def of(cls, groups: Groups, picks: int) -> Pairs:
        return cls(groups, cut_groups(groups, PAIRS_OF_TILE), picks)


def attend(queries: Tensor, keys: Tensor, values: Tensor, pairs: Pairs, buckets: Groups, *, scale: float) -> Partial:
    """Attention of the query of each pair to its bucket: (G, L, Dv) and (G, L).

    `queries` are (H, N, D); `keys` (G, N, D) and `values` (G, N, Dv) are in the order of `buckets`. Where a query has
    no pick the lse is -inf and the output is undefined.
    """
    out = values.new_empty(*pairs.shape, values.shape[-1])
    lse = fill(values.new_empty(pairs.shape, dtype=compute_dtype(values.dtype)), -torch.inf)
    _attend_to_buckets[pairs.tiles.grid](
        **_inputs(queries, keys, values, scale), **pairs.arguments, **pairs.tiles.arguments,
        bucket_starts_ptr=buckets.starts, buckets=buckets.number, out_ptr=out, lse_ptr=lse, PAIRS=PAIRS_OF_TILE,
        **_fitting(ATTEND, queries, values),
    )  # fmt: skip
    return Partial(out, lse)


def attend_backward(
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    pairs: Pairs,
    buckets: Groups,
    bucket_tiles: Tiles,
    key_offset: Tensor,
    *,
    rows_of_bucket_tile: int,
    scale: float,
) -> tuple[QueryGradients, PairGradients]:
    """Gradients of the (scaled) query of each pair, (G, L), and of keys and values, tile by tile.

    `lse` and `delta` are those of the merged softmax. Where a query has no pick its gradient is undefined.
    """
    head_dim = keys.shape[-1]
    to_queries = QueryGradients(
        queries.new_empty(*pairs.shape, head_dim, dtype=gradient_dtype(queries.dtype)), delta.new_empty(pairs.shape)
    )
    softmax_arguments = {"grad_out_ptr": grad_out, "lse_ptr": lse, "delta_ptr": delta}
    shared = {**softmax_arguments, **_inputs(queries, keys, values, scale), **pairs.arguments}
    _buckets_backward_to_queries[pairs.tiles.grid](
        **shared, **pairs.tiles.arguments, bucket_starts_ptr=buckets.starts, buckets=buckets.number,
        key_offset_ptr=key_offset, grad_pairs_ptr=to_queries.centred, grad_shift_ptr=to_queries.offset_factor,
        PAIRS=PAIRS_OF_TILE, **_fitting(ATTEND_BACKWARD_TO_QUERIES, queries, values),
    )  # fmt: skip
    pieces = _cut_into_pieces(pairs, bucket_tiles)
    dtype = gradient_dtype(keys.dtype)
    gradients = PairGradients(
        keys.new_empty(*pieces.group.shape, rows_of_bucket_tile, head_dim, dtype=dtype),
        keys.new_empty(*pieces.group.shape, rows_of_bucket_tile, values.shape[-1], dtype=dtype),
        pieces.before,
    )
    _buckets_backward_to_keys[pieces.grid](
        **shared, tile_begin_ptr=bucket_tiles.begin, tile_end_ptr=bucket_tiles.end, piece_tile_ptr=pieces.group,
        piece_begin_ptr=pieces.begin, piece_end_ptr=pieces.end, grad_keys_ptr=gradients.keys,
        grad_values_ptr=gradients.values, tiles=bucket_tiles.group.shape[1], KEYS=rows_of_bucket_tile,
        **_fitting(ATTEND_BACKWARD_TO_KEYS, queries, values),
    )  # fmt: skip
    return to_queries, gradients


def _cut_into_pieces(pairs: Pairs, bucket_tiles: Tiles) -> Tiles:
    """The pairs that each bucket tile meets, in pieces.

    Most queries retrieve the same few buckets, whose pairs go to many programs; no query retrieves some others. There
    is room for the gradients of as many pieces as there can be tiles; pieces are longer if that is not enough.
    """
    key_heads, max_tiles = bucket_tiles.group.shape
    begin, end = torch.empty_like(bucket_tiles.group), torch.empty_like(bucket_tiles.group)
    size = begin.new_empty(key_heads)
    _plan_pieces[(key_heads,)](
        tile_group_ptr=bucket_tiles.group, pair_starts_ptr=pairs.groups.starts, begin_ptr=begin, end_ptr=end,
        size_ptr=size, tiles=max_tiles, buckets=pairs.groups.number, max_pieces=max_tiles, SHORTEST=PAIRS_OF_PIECE,
        WIDTH=min(1024, power_of_two(max_tiles)),
    )  # fmt: skip
    return cut_ranges(begin, end, size, max_tiles)


def _fitting(launch: dict[int, dict[str, int]], queries: Tensor, values: Tensor) -> dict[str, int]:
    return fitting(launch, queries.shape[-1], values.shape[-1], queries.dtype)


def _inputs(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> dict[str, Any]:
    """Arguments of kernels, with what is compiled in."""
    key_heads, length, value_dim = values.shape
    head_dim = queries.shape[-1]
    return {
        "queries_ptr": queries,
        "keys_ptr": keys,
        "values_ptr": values,
        "length": length,
        "shared_by": queries.shape[0] // key_heads,
        "SCALE": scale,
        "D": head_dim,
        "DV": value_dim,
        "ACC": accumulator(queries.dtype),
    }


@kernel(stage="sorting", do_not_specialize=["tiles", "buckets", "max_pieces"])
def _plan_pieces(
    tile_group_ptr, pair_starts_ptr, begin_ptr, end_ptr, size_ptr, tiles, buckets, max_pieces, SHORTEST: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The pairs of each tile's bucket, and the pairs in a piece: `SHORTEST`, doubled until `max_pieces` suffice.

    Grid: (G,). `tile_group_ptr`, `begin_ptr`, `end_ptr`: (G, tiles) int32; `pair_starts_ptr`: (G, K nb + 1) int32;
    `size_ptr`: (G,) int32.
    """
    key_head = tl.program_id(0).to(tl.int64)
    doubling = tl.arange(0, 16)  # [16]
    pieces = tl.zeros([16], tl.int32)
    for first in range(0, tiles, WIDTH):
        offs_tile = first + tl.arange(0, WIDTH)  # [WIDTH]
        bucket = tl.load(tile_group_ptr + key_head * tiles + offs_tile, mask=offs_tile < tiles, other=-1)  # [WIDTH]
        ptrs = pair_starts_ptr + key_head * (buckets + 1) + bucket  # [WIDTH]
        first_pair = tl.load(ptrs, mask=bucket >= 0, other=0)  # [WIDTH]
        last_pair = tl.load(ptrs + 1, mask=bucket >= 0, other=0)  # [WIDTH]
        tl.store(begin_ptr + key_head * tiles + offs_tile, first_pair, mask=offs_tile < tiles)
        tl.store(end_ptr + key_head * tiles + offs_tile, last_pair, mask=offs_tile < tiles)
        length = (SHORTEST << doubling)[None, :]  # [1, 16]
        pieces += tl.sum(((last_pair - first_pair)[:, None] + length - 1) // length, 0)
    fitting = tl.min(tl.where(pieces <= max_pieces, doubling, 15), 0)
    tl.store(size_ptr + key_head, SHORTEST << fitting)


@kernel(stage="retrieval", do_not_specialize=["length", "shared_by", "picks", "buckets"])
def _attend_to_buckets(
    queries_ptr, keys_ptr, values_ptr, pair_order_ptr, tile_group_ptr, tile_begin_ptr, tile_end_ptr, bucket_starts_ptr,
    out_ptr, lse_ptr, length, shared_by, buckets, picks, SCALE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PAIRS: tl.constexpr, KEYS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Attention of the queries of a tile of pairs to all keys of their bucket.

    Grid: that of the pairs' tiles. `queries_ptr`: (H, N, D), in the order of the inputs; `keys_ptr`: (G, N, D) and
    `values_ptr`: (G, N, DV), in the order of the buckets; `pair_order_ptr`: (G, L) int32; `bucket_starts_ptr`:
    (G, K nb + 1) int32; `out_ptr`: (G, L, DV) and `lse_ptr`: (G, L), by pair.
    """
    key_head, tile, bucket = load_tile(tile_group_ptr)
    if bucket < 0:
        return
    first_row = key_head * shared_by * length
    first_pair = first_row * picks
    offs_place, mask_pair = load_places(tile_begin_ptr, tile_end_ptr, tile, PAIRS)  # [PAIRS], [PAIRS]
    offs_pair = tl.load(pair_order_ptr + first_pair + offs_place, mask=mask_pair, other=0)  # [PAIRS]
    offs_row = offs_pair // picks  # [PAIRS]
    queries = load_rows(queries_ptr, first_row, offs_row, mask_pair, D)  # [PAIRS, D]
    largest = tl.full([PAIRS], float("-inf"), ACC)
    total = tl.zeros([PAIRS], ACC)
    weighted = tl.zeros([PAIRS, padded(DV)], ACC)  # [PAIRS, DV]
    begin_ptr = bucket_starts_ptr + key_head * (buckets + 1) + bucket
    end = tl.load(begin_ptr + 1)
    for begin in range(tl.load(begin_ptr), end, KEYS):
        offs_key = begin + tl.arange(0, KEYS)  # [KEYS]
        mask_key = offs_key < end  # [KEYS]
        keys = load_rows(keys_ptr, key_head * length, offs_key, mask_key, D)  # [KEYS, D]
        values = load_rows(values_ptr, key_head * length, offs_key, mask_key, DV)  # [KEYS, DV]
        logits = dot(queries, tl.trans(keys), ACC)  # [PAIRS, KEYS]
        logits = tl.where(mask_key[None, :], logits, float("-inf"))
        largest, total, weighted = include(logits, values, largest, total, weighted, SCALE)
    is_empty = total == 0  # [PAIRS]
    weighted /= tl.where(is_empty, 1.0, total)[:, None]
    offs_pair = first_pair + offs_pair
    store_rows(out_ptr, 0, offs_pair, mask_pair, weighted, DV)
    tl.store(lse_ptr + offs_pair, tl.where(is_empty, float("-inf"), largest + tl.log(total)), mask=mask_pair)


@kernel(stage="retrieval", do_not_specialize=["length", "shared_by", "picks", "buckets"])
def _buckets_backward_to_queries(
    grad_out_ptr, lse_ptr, delta_ptr, queries_ptr, keys_ptr, values_ptr, pair_order_ptr, tile_group_ptr, tile_begin_ptr,
    tile_end_ptr, bucket_starts_ptr, key_offset_ptr, grad_pairs_ptr, grad_shift_ptr, length, shared_by, buckets, picks,
    SCALE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAIRS: tl.constexpr, KEYS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of a tile of pairs, from all keys of their bucket.

    Grid: that of the pairs' tiles. `grad_out_ptr`: (H, N, DV), `lse_ptr` and `delta_ptr`: (H, N), in the order of the
    inputs; `key_offset_ptr`: (G, D); `grad_pairs_ptr`: (G, L, D) and `grad_shift_ptr`: (G, L), by pair; the others as
    in `_attend_to_buckets`.
    """
    key_head, tile, bucket = load_tile(tile_group_ptr)
    if bucket < 0:
        return
    first_row = key_head * shared_by * length
    first_pair = first_row * picks
    offs_place, mask_pair = load_places(tile_begin_ptr, tile_end_ptr, tile, PAIRS)  # [PAIRS], [PAIRS]
    offs_pair = tl.load(pair_order_ptr + first_pair + offs_place, mask=mask_pair, other=0)  # [PAIRS]
    offs_row = offs_pair // picks  # [PAIRS]
    queries = load_rows(queries_ptr, first_row, offs_row, mask_pair, D)  # [PAIRS, D]
    grad_out = load_rows(grad_out_ptr, first_row, offs_row, mask_pair, DV)  # [PAIRS, DV]
    lse = tl.load(lse_ptr + first_row + offs_row, mask=mask_pair, other=float("inf")) * LOG2_E  # [PAIRS]
    delta = tl.load(delta_ptr + first_row + offs_row, mask=mask_pair, other=0.0)  # [PAIRS]
    gradient = tl.zeros([PAIRS, padded(D)], ACC)  # [PAIRS, D]
    d_shift = tl.zeros([PAIRS], ACC)
    rounded_shift = tl.zeros([PAIRS], ACC)
    begin_ptr = bucket_starts_ptr + key_head * (buckets + 1) + bucket
    end = tl.load(begin_ptr + 1)
    for begin in range(tl.load(begin_ptr), end, KEYS):
        offs_key = begin + tl.arange(0, KEYS)  # [KEYS]
        mask_key = offs_key < end  # [KEYS]
        keys = load_rows(keys_ptr, key_head * length, offs_key, mask_key, D)  # [KEYS, D]
        values = load_rows(values_ptr, key_head * length, offs_key, mask_key, DV)  # [KEYS, DV]
        logits = dot(queries, tl.trans(keys), ACC)  # [PAIRS, KEYS]
        # [PAIRS, KEYS]
        weights = tl.exp2(tl.where(mask_key[None, :], logits * (SCALE * LOG2_E) - lse[:, None], float("-inf")))
        response = dot(grad_out, tl.trans(values), ACC)  # [PAIRS, KEYS]
        d_logits = weights * (response - delta[:, None])  # [PAIRS, KEYS]
        d_shift += tl.sum(d_logits, 1)
        d_logits = d_logits.to(keys.dtype)
        rounded_shift += tl.sum(d_logits.to(ACC), 1)
        gradient = add_dot(d_logits, keys, gradient)
    offset = load_row(key_offset_ptr, key_head, D)  # [D]
    # (The product above contains the offset with rounded weights. It is taken out, so that large terms cancel.)
    gradient -= rounded_shift[:, None] * offset[None, :]
    store_rows(grad_pairs_ptr, 0, first_pair + offs_pair, mask_pair, gradient, D)
    tl.store(grad_shift_ptr + first_pair + offs_pair, d_shift, mask=mask_pair)


@kernel(stage="retrieval", do_not_specialize=["length", "shared_by", "picks", "tiles"])
def _buckets_backward_to_keys(
    grad_out_ptr, lse_ptr, delta_ptr, queries_ptr, keys_ptr, values_ptr, pair_order_ptr, tile_begin_ptr, tile_end_ptr,
    piece_tile_ptr, piece_begin_ptr, piece_end_ptr, grad_keys_ptr, grad_values_ptr, length, shared_by, tiles, picks,
    SCALE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAIRS: tl.constexpr, KEYS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values of a bucket tile, from a piece of the bucket's pairs.

    Grid: that of the pieces. `tile_begin_ptr`, `tile_end_ptr`: (G, tiles) int32; `piece_tile_ptr`, `piece_begin_ptr`,
    `piece_end_ptr`: (G, pieces) int32; `grad_keys_ptr`: (G, pieces, KEYS, D); `grad_values_ptr`: (G, pieces, KEYS, DV);
    the others as in `_buckets_backward_to_queries`.
    """
    key_head, piece, tile = load_tile(piece_tile_ptr)
    if tile < 0:
        return
    offs_key = tl.load(tile_begin_ptr + key_head * tiles + tile) + tl.arange(0, KEYS)  # [KEYS]
    mask_key = offs_key < tl.load(tile_end_ptr + key_head * tiles + tile)  # [KEYS]
    keys = load_rows(keys_ptr, key_head * length, offs_key, mask_key, D)  # [KEYS, D]
    values = load_rows(values_ptr, key_head * length, offs_key, mask_key, DV)  # [KEYS, DV]
    d_keys = tl.zeros([KEYS, padded(D)], ACC)  # [KEYS, D]
    d_values = tl.zeros([KEYS, padded(DV)], ACC)  # [KEYS, DV]
    first_row = key_head * shared_by * length
    pair_order_ptr += first_row * picks
    end = tl.load(piece_end_ptr + piece)
    for begin in range(tl.load(piece_begin_ptr + piece), end, PAIRS):
        offs_place = begin + tl.arange(0, PAIRS)  # [PAIRS]
        mask_pair = offs_place < end  # [PAIRS]
        offs_pair = tl.load(pair_order_ptr + offs_place, mask=mask_pair, other=0)  # [PAIRS]
        offs_row = offs_pair // picks  # [PAIRS]
        queries = load_rows(queries_ptr, first_row, offs_row, mask_pair, D)  # [PAIRS, D]
        grad_out = load_rows(grad_out_ptr, first_row, offs_row, mask_pair, DV)  # [PAIRS, DV]
        lse = tl.load(lse_ptr + first_row + offs_row, mask=mask_pair, other=float("inf")) * LOG2_E  # [PAIRS]
        delta = tl.load(delta_ptr + first_row + offs_row, mask=mask_pair, other=0.0)  # [PAIRS]
        # Keys are the rows here, so that weights and gradients of logits enter the products below as they are.
        logits = dot(keys, tl.trans(queries), ACC)  # [KEYS, PAIRS]
        weights = tl.exp2(logits * (SCALE * LOG2_E) - lse[None, :])  # [KEYS, PAIRS]
        d_values = add_dot(weights.to(grad_out.dtype), grad_out, d_values)
        response = dot(values, tl.trans(grad_out), ACC)  # [KEYS, PAIRS]
        d_logits = weights * (response - delta[None, :])  # [KEYS, PAIRS]
        d_keys = add_dot(d_logits.to(queries.dtype), queries, d_keys)
    offs_place = tl.arange(0, KEYS)
    store_rows(grad_keys_ptr, piece * KEYS, offs_place, mask_key, d_keys * SCALE, D)
    store_rows(grad_values_ptr, piece * KEYS, offs_place, mask_key, d_values, DV)
