"""Stage 5: exact attention to the retrieved buckets, bucket by bucket.

Pairs (query, retrieved bucket) are sorted by bucket. A tile is some queries of one bucket; it streams the bucket's keys
through. Each pair yields one partial, at its own place. In backward a tile of queries finds their gradients, and a tile
of keys, through which the bucket's queries are streamed, those of keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.filling import fill
from muse_attention.backends.triton.grouping import Groups, Tiles, tiles
from muse_attention.backends.triton.key_offset import QueryGradients
from muse_attention.backends.triton.numbers import (
    LOG2_E,
    LOG_2,
    arithmetic,
    fitting,
    gradient_dtype,
    load_rows,
    padded,
    power_of_two,
    store_rows,
)
from muse_attention.backends.triton.pairs import PAIRS_OF_TILE, Pairs, row_of_pair
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.summaries import PairGradients
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
"""Queries of one bucket that one program streams through a tile of its keys, if there is room for all the pieces."""


def attend(queries: Tensor, keys: Tensor, values: Tensor, pairs: Pairs, buckets: Groups, *, scale: float) -> Partial:
    """Attention of the query of each pair to its bucket: (G, L, Dv) and (G, L).

    `queries` are (H, N, D); `keys` (G, N, D) and `values` (G, N, Dv) are in the order of `buckets`. Where a query has
    no pick the lse is -inf and the output is undefined; beyond the last pair both are.
    """
    _, length, value_dim = values.shape
    out = values.new_empty(*pairs.shape, value_dim)
    lse = values.new_empty(pairs.shape, dtype=compute_dtype(values.dtype))
    if not pairs.is_ragged:
        fill(lse, -torch.inf)
    _attend_to_buckets[pairs.tiles.grid](
        queries, keys, values, pairs.groups.order, *pairs.tiles.parts(), buckets.starts, out, lse, length,
        queries.shape[0] // keys.shape[0], buckets.number, *pairs.numbering, IS_RAGGED=pairs.is_ragged,
        PAIRS=PAIRS_OF_TILE, **_constants(queries, values, scale), **_fitting(ATTEND, queries, values),
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
    """Gradients of each pair's (scaled) query, (G, L), and of the keys and values, tile by tile.

    `lse` and `delta` are those of the merged softmax. Where a query has no pick its gradient is undefined.
    """
    key_heads, length, head_dim = keys.shape
    shared_by = queries.shape[0] // key_heads
    to_queries = QueryGradients(
        queries.new_empty(*pairs.shape, head_dim, dtype=gradient_dtype(queries.dtype)), delta.new_empty(pairs.shape)
    )
    constants = _constants(queries, values, scale)
    _buckets_backward_to_queries[pairs.tiles.grid](
        grad_out, lse, delta, queries, keys, values, pairs.groups.order, *pairs.tiles.parts(), buckets.starts,
        key_offset, to_queries.centred, to_queries.of_offset, length, shared_by, buckets.number, *pairs.numbering,
        IS_RAGGED=pairs.is_ragged, PAIRS=PAIRS_OF_TILE, **constants,
        **_fitting(ATTEND_BACKWARD_TO_QUERIES, queries, values),
    )  # fmt: skip
    pieces = _cut_into_pieces(pairs, bucket_tiles)
    dtype = gradient_dtype(keys.dtype)
    gradients = PairGradients(
        keys.new_empty(*pieces.group.shape, rows_of_bucket_tile, head_dim, dtype=dtype),
        keys.new_empty(*pieces.group.shape, rows_of_bucket_tile, values.shape[-1], dtype=dtype),
        pieces.before,
    )
    _buckets_backward_to_keys[pieces.grid](
        grad_out, lse, delta, queries, keys, values, pairs.groups.order, *bucket_tiles.parts()[1:], *pieces.parts(),
        gradients.keys, gradients.values, length, shared_by, bucket_tiles.group.shape[1], *pairs.numbering,
        KEYS=rows_of_bucket_tile, IS_RAGGED=pairs.is_ragged, **constants, **_fitting(ATTEND_BACKWARD_TO_KEYS, queries,
        values),
    )  # fmt: skip
    return to_queries, gradients


def _cut_into_pieces(pairs: Pairs, bucket_tiles: Tiles) -> Tiles:
    """The pairs that each bucket tile meets, in pieces.

    A few buckets are asked for by most queries, so their pairs go to many programs; others by none. There is room for
    the gradients of as many pieces as there can be tiles. If these are not enough, pieces are longer.
    """
    key_heads, most_tiles = bucket_tiles.group.shape
    begin, end = torch.empty_like(bucket_tiles.group), torch.empty_like(bucket_tiles.group)
    size = begin.new_empty(key_heads)
    _plan_pieces[(key_heads,)](
        bucket_tiles.group, pairs.groups.starts, begin, end, size, most_tiles, pairs.groups.number, most_tiles,
        SHORTEST=PAIRS_OF_PIECE, WIDTH=min(1024, power_of_two(most_tiles)),
    )  # fmt: skip
    return tiles(begin, end, size, most_tiles)


def _fitting(launch: dict[int, dict[str, int]], queries: Tensor, values: Tensor) -> dict[str, int]:
    return fitting(launch, queries.shape[-1], values.shape[-1], queries.dtype)


def _constants(queries: Tensor, values: Tensor, scale: float) -> dict[str, Any]:
    head_dim, value_dim = queries.shape[-1], values.shape[-1]
    return {
        "SCALE": scale,
        "D": head_dim,
        "DP": padded(head_dim),
        "DV": value_dim,
        "DVP": padded(value_dim),
        **arithmetic(queries.dtype),
    }


@kernel(do_not_specialize=["tiles", "buckets", "most_pieces"])
def _plan_pieces(
    tile_group, pair_starts, begin, end, size, tiles, buckets, most_pieces, SHORTEST: tl.constexpr, WIDTH: tl.constexpr
):
    """The pairs of each tile's bucket, and the smallest of `SHORTEST`, twice, four times that, .. pairs to a piece that
    leaves few enough pieces."""
    key_head = tl.program_id(0).to(tl.int64)
    doubling = tl.arange(0, 16)
    pieces = tl.zeros([16], tl.int32)
    for first in range(0, tiles, WIDTH):
        tile = first + tl.arange(0, WIDTH)
        bucket = tl.load(tile_group + key_head * tiles + tile, mask=tile < tiles, other=-1)
        at = pair_starts + key_head * (buckets + 1) + bucket
        first_pair = tl.load(at, mask=bucket >= 0, other=0)
        last_pair = tl.load(at + 1, mask=bucket >= 0, other=0)
        tl.store(begin + key_head * tiles + tile, first_pair, mask=tile < tiles)
        tl.store(end + key_head * tiles + tile, last_pair, mask=tile < tiles)
        length = (SHORTEST << doubling)[None, :]
        pieces += tl.sum(((last_pair - first_pair)[:, None] + length - 1) // length, 0)
    fitting = tl.min(tl.where(pieces <= most_pieces, doubling, 15), 0)
    tl.store(size + key_head, SHORTEST << fitting)


@kernel(do_not_specialize=["length", "shared_by", "room", "picks", "buckets"])
def _attend_to_buckets(
    queries, keys, values, pair_order, tile_group, tile_begin, tile_end, bucket_starts, out, lse, length, shared_by,
    buckets, pair_rows, room, picks, IS_RAGGED: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, PAIRS: tl.constexpr, KEYS: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    key_head = tl.program_id(1).to(tl.int64)
    tile = key_head * tl.num_programs(0) + tl.program_id(0)
    bucket = tl.load(tile_group + tile)
    if bucket < 0:
        return
    first_row = key_head * shared_by * length
    place = tl.load(tile_begin + tile) + tl.arange(0, PAIRS)
    is_pair = place < tl.load(tile_end + tile)
    pair = tl.load(pair_order + key_head * room + place, mask=is_pair, other=0)
    row = row_of_pair(pair_rows + key_head * room, pair, is_pair, picks, IS_RAGGED)
    some_queries = load_rows(queries, first_row, row, is_pair, D, DP)
    largest = tl.full([PAIRS], float("-inf"), ACC)
    total = tl.zeros([PAIRS], ACC)
    weighted = tl.zeros([PAIRS, DVP], ACC)
    at = bucket_starts + key_head * (buckets + 1) + bucket
    end = tl.load(at + 1)
    for begin in range(tl.load(at), end, KEYS):
        key = begin + tl.arange(0, KEYS)
        is_key = key < end
        some_keys = load_rows(keys, key_head * length, key, is_key, D, DP)
        some_values = load_rows(values, key_head * length, key, is_key, DV, DVP)
        # (Logits are in powers of two here.)
        logits = tl.dot(some_queries, tl.trans(some_keys), input_precision=PRECISION, out_dtype=ACC) * (SCALE * LOG2_E)
        logits = tl.where(is_key[None, :], logits, float("-inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(logits - shift[:, None])
        kept = tl.exp2(largest - shift)
        total = total * kept + tl.sum(weights, 1)
        weighted = tl.dot(
            weights.to(some_values.dtype), some_values, weighted * kept[:, None], input_precision=PRECISION,
            out_dtype=ACC,
        )  # fmt: skip
        largest = larger
    nothing = total == 0
    weighted /= tl.where(nothing, 1.0, total)[:, None]
    pair = key_head * room + pair
    store_rows(out, 0, pair, is_pair, weighted, DV, DVP)
    tl.store(lse + pair, tl.where(nothing, float("-inf"), (largest + tl.log2(total)) * LOG_2), mask=is_pair)


@kernel(do_not_specialize=["length", "shared_by", "room", "picks", "buckets"])
def _buckets_backward_to_queries(
    grad_out, lse, delta, queries, keys, values, pair_order, tile_group, tile_begin, tile_end, bucket_starts,
    key_offset, grad_pairs, grad_shift, length, shared_by, buckets, pair_rows, room, picks, IS_RAGGED: tl.constexpr,
    SCALE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAIRS: tl.constexpr,
    KEYS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    key_head = tl.program_id(1).to(tl.int64)
    tile = key_head * tl.num_programs(0) + tl.program_id(0)
    bucket = tl.load(tile_group + tile)
    if bucket < 0:
        return
    first_row = key_head * shared_by * length
    place = tl.load(tile_begin + tile) + tl.arange(0, PAIRS)
    is_pair = place < tl.load(tile_end + tile)
    pair = tl.load(pair_order + key_head * room + place, mask=is_pair, other=0)
    row = row_of_pair(pair_rows + key_head * room, pair, is_pair, picks, IS_RAGGED)
    some_queries = load_rows(queries, first_row, row, is_pair, D, DP)
    some_grad = load_rows(grad_out, first_row, row, is_pair, DV, DVP)
    row_lse = tl.load(lse + first_row + row, mask=is_pair, other=float("inf")) * LOG2_E
    row_delta = tl.load(delta + first_row + row, mask=is_pair, other=0.0)
    gradient = tl.zeros([PAIRS, DP], ACC)
    d_shift = tl.zeros([PAIRS], ACC)
    rounded_shift = tl.zeros([PAIRS], ACC)
    at = bucket_starts + key_head * (buckets + 1) + bucket
    end = tl.load(at + 1)
    for begin in range(tl.load(at), end, KEYS):
        key = begin + tl.arange(0, KEYS)
        is_key = key < end
        some_keys = load_rows(keys, key_head * length, key, is_key, D, DP)
        some_values = load_rows(values, key_head * length, key, is_key, DV, DVP)
        logits = tl.dot(some_queries, tl.trans(some_keys), input_precision=PRECISION, out_dtype=ACC)
        weights = tl.exp2(tl.where(is_key[None, :], logits * (SCALE * LOG2_E) - row_lse[:, None], float("-inf")))
        response = tl.dot(some_grad, tl.trans(some_values), input_precision=PRECISION, out_dtype=ACC)
        d_logits = weights * (response - row_delta[:, None])
        d_shift += tl.sum(d_logits, 1)
        d_logits = d_logits.to(some_keys.dtype)
        rounded_shift += tl.sum(d_logits.to(ACC), 1)
        gradient = tl.dot(d_logits, some_keys, gradient, input_precision=PRECISION, out_dtype=ACC)
    dim = tl.arange(0, DP)
    offset = tl.load(key_offset + key_head * D + dim, mask=dim < D, other=0.0)
    # (Less what the product above has of the offset, or what should cancel does not.)
    gradient -= rounded_shift[:, None] * offset[None, :]
    store_rows(grad_pairs, 0, key_head * room + pair, is_pair, gradient, D, DP)
    tl.store(grad_shift + key_head * room + pair, d_shift, mask=is_pair)


@kernel(do_not_specialize=["length", "shared_by", "room", "picks", "tiles"])
def _buckets_backward_to_keys(
    grad_out, lse, delta, queries, keys, values, pair_order, tile_begin, tile_end, piece_tile, piece_begin, piece_end,
    grad_keys, grad_values, length, shared_by, tiles, pair_rows, room, picks, IS_RAGGED: tl.constexpr,
    SCALE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, PAIRS: tl.constexpr,
    KEYS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    key_head = tl.program_id(1).to(tl.int64)
    piece = key_head * tl.num_programs(0) + tl.program_id(0)
    tile = tl.load(piece_tile + piece)
    if tile < 0:
        return
    key = tl.load(tile_begin + key_head * tiles + tile) + tl.arange(0, KEYS)
    is_key = key < tl.load(tile_end + key_head * tiles + tile)
    some_keys = load_rows(keys, key_head * length, key, is_key, D, DP)
    some_values = load_rows(values, key_head * length, key, is_key, DV, DVP)
    d_keys = tl.zeros([KEYS, DP], ACC)
    d_values = tl.zeros([KEYS, DVP], ACC)
    first_row = key_head * shared_by * length
    pair_order += key_head * room
    end = tl.load(piece_end + piece)
    for begin in range(tl.load(piece_begin + piece), end, PAIRS):
        place = begin + tl.arange(0, PAIRS)
        is_pair = place < end
        pair = tl.load(pair_order + place, mask=is_pair, other=0)
        row = row_of_pair(pair_rows + key_head * room, pair, is_pair, picks, IS_RAGGED)
        some_queries = load_rows(queries, first_row, row, is_pair, D, DP)
        some_grad = load_rows(grad_out, first_row, row, is_pair, DV, DVP)
        row_lse = tl.load(lse + first_row + row, mask=is_pair, other=float("inf")) * LOG2_E
        row_delta = tl.load(delta + first_row + row, mask=is_pair, other=0.0)
        # Keys are the rows here, so that weights and gradients of logits enter the products below as they are.
        logits = tl.dot(some_keys, tl.trans(some_queries), input_precision=PRECISION, out_dtype=ACC)
        weights = tl.exp2(logits * (SCALE * LOG2_E) - row_lse[None, :])
        d_values = tl.dot(weights.to(some_grad.dtype), some_grad, d_values, input_precision=PRECISION, out_dtype=ACC)
        response = tl.dot(some_values, tl.trans(some_grad), input_precision=PRECISION, out_dtype=ACC)
        d_logits = weights * (response - row_delta[None, :])
        d_keys = tl.dot(d_logits.to(some_queries.dtype), some_queries, d_keys, input_precision=PRECISION, out_dtype=ACC)
    place = tl.arange(0, KEYS)
    store_rows(grad_keys, piece * KEYS, place, is_key, d_keys * SCALE, D, DP)
    store_rows(grad_values, piece * KEYS, place, is_key, d_values, DV, DVP)
