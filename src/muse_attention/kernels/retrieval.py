"""Stage 5: exact attention to the retrieved buckets, bucket by bucket.

Pairs (query, retrieved bucket) are sorted by bucket. A tile is some queries of one bucket; it streams the bucket's keys
through. Each pair yields one partial, at its own place. In backward a tile of queries finds their gradients, and a tile
of keys, through which the bucket's queries are streamed, those of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.kernels.grouping import Groups, Tiles, group_rows, tiles
from muse_attention.kernels.numbers import arithmetic, gradient_dtype, padded
from muse_attention.precision import compute_dtype
from muse_attention.structures import Partial, Selection

_PAIRS_OF_TILE = 64
_KEYS = 64
"""Keys of a bucket that a tile of queries meets at a time."""
_PAIRS = 64
"""Queries of a bucket that a tile of keys meets at a time."""


@dataclass(frozen=True)
class Pairs:
    """Every query with each bucket it retrieves, sorted by bucket."""

    picks: Tensor
    """(H, N, P) int32: the bucket `block * K + cluster` of the query's key head, or -1"""
    groups: Groups
    """pairs `(query row * P + pick)` of each key head by bucket"""
    tiles: Tiles


def find_pairs(selection: Selection, key_heads: int, blocks: int, key_clusters: int) -> Pairs:
    heads, length, opened, retrieved = selection.retrieved.shape
    picks = torch.empty_like(selection.retrieved).view(heads, length, opened * retrieved)
    width = 1024
    _number_buckets[(triton.cdiv(picks.numel(), width),)](
        selection.opened, selection.retrieved, picks, picks.numel(), retrieved, key_clusters, WIDTH=width
    )
    groups = group_rows(picks.view(key_heads, -1), blocks * key_clusters)
    return Pairs(picks, groups, tiles(groups, _PAIRS_OF_TILE))


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, pairs: Pairs, buckets: Groups, *, scale: float
) -> Partial:
    """Attention of (H, N, D) queries to the buckets each of them picked: (H, N, P, Dv) and (H, N, P).

    `keys` (G, N, D) and `values` (G, N, Dv) are in the order of `buckets`. Where a query has no pick the lse is -inf
    and the output is undefined.
    """
    _, length, value_dim = values.shape
    out = values.new_empty(*pairs.picks.shape, value_dim)
    lse = torch.full_like(pairs.picks, -torch.inf, dtype=compute_dtype(values.dtype))
    _attend[pairs.tiles.grid](
        queries, keys, values, pairs.groups.order, *_tile_parts(pairs.tiles), buckets.starts, out, lse, length,
        queries.shape[0] // keys.shape[0], pairs.picks.shape[-1], buckets.number, KEYS=_KEYS,
        **_constants(queries, values, scale), PAIRS=_PAIRS_OF_TILE,
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
    *,
    rows_of_bucket_tile: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of each pair's (scaled) query, (H, N, P, D), and of the sorted keys and values.

    `lse` and `delta` are those of the merged softmax. Where a query has no pick its gradient is undefined.
    """
    _, length, head_dim = keys.shape
    shared_by, picks = queries.shape[0] // keys.shape[0], pairs.picks.shape[-1]
    grad_pairs = queries.new_empty(*pairs.picks.shape, head_dim, dtype=gradient_dtype(queries.dtype))
    grad_keys, grad_values = (torch.empty_like(rows, dtype=compute_dtype(rows.dtype)) for rows in (keys, values))
    constants = _constants(queries, values, scale)
    _attend_backward_to_queries[pairs.tiles.grid](
        grad_out, lse, delta, queries, keys, values, pairs.groups.order, *_tile_parts(pairs.tiles), buckets.starts,
        grad_pairs, length, shared_by, picks, buckets.number, PAIRS=_PAIRS_OF_TILE, KEYS=_KEYS, **constants,
    )  # fmt: skip
    _attend_backward_to_keys[bucket_tiles.grid](
        grad_out, lse, delta, queries, keys, values, pairs.groups.order, pairs.groups.starts,
        *_tile_parts(bucket_tiles), grad_keys, grad_values, length, shared_by, picks, buckets.number,
        KEYS=rows_of_bucket_tile, PAIRS=_PAIRS, **constants,
    )  # fmt: skip
    return grad_pairs, grad_keys, grad_values


def _tile_parts(some: Tiles) -> tuple[Tensor, Tensor, Tensor]:
    return some.group, some.begin, some.end


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


@triton.jit(do_not_specialize=["number", "retrieved_blocks", "key_clusters"])
def _number_buckets(opened, retrieved, picks, number, retrieved_blocks, key_clusters, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = at < number
    block = tl.load(retrieved + at, mask=inside, other=-1)
    cluster = tl.load(opened + at // retrieved_blocks, mask=inside, other=-1)
    tl.store(picks + at, tl.where((block < 0) | (cluster < 0), -1, block * key_clusters + cluster), mask=inside)


@triton.jit
def _load_rows(table, row, is_row, X: tl.constexpr, XP: tl.constexpr):
    column = tl.arange(0, XP)
    return tl.load(table + row[:, None] * X + column[None, :], mask=is_row[:, None] & (column < X)[None, :], other=0.0)


@triton.jit(do_not_specialize=["length", "shared_by", "picks", "buckets"])
def _attend(
    queries, keys, values, pair_order, tile_group, tile_begin, tile_end, bucket_starts, out, lse, length, shared_by,
    picks, buckets, SCALE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    PAIRS: tl.constexpr, KEYS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    key_head = tl.program_id(1).to(tl.int64)
    tile = key_head * tl.num_programs(0) + tl.program_id(0)
    bucket = tl.load(tile_group + tile)
    if bucket < 0:
        return
    first_pair = key_head * shared_by * length * picks
    place = tl.load(tile_begin + tile) + tl.arange(0, PAIRS)
    is_pair = place < tl.load(tile_end + tile)
    pair = first_pair + tl.load(pair_order + first_pair + place, mask=is_pair, other=0)
    some_queries = _load_rows(queries, pair // picks, is_pair, D, DP)
    largest = tl.full([PAIRS], float("-inf"), ACC)
    total = tl.zeros([PAIRS], ACC)
    weighted = tl.zeros([PAIRS, DVP], ACC)
    at = bucket_starts + key_head * (buckets + 1) + bucket
    end = tl.load(at + 1)
    for begin in range(tl.load(at), end, KEYS):
        key = begin + tl.arange(0, KEYS)
        is_key = key < end
        some_keys = _load_rows(keys, key_head * length + key, is_key, D, DP)
        some_values = _load_rows(values, key_head * length + key, is_key, DV, DVP)
        logits = tl.dot(some_queries, tl.trans(some_keys), input_precision=PRECISION, out_dtype=ACC) * SCALE
        logits = tl.where(is_key[None, :], logits, float("-inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(logits - shift[:, None])
        kept = tl.exp(largest - shift)
        total = total * kept + tl.sum(weights, 1)
        weighted = tl.dot(
            weights.to(some_values.dtype), some_values, weighted * kept[:, None], input_precision=PRECISION,
            out_dtype=ACC,
        )  # fmt: skip
        largest = larger
    nothing = total == 0
    weighted /= tl.where(nothing, 1.0, total)[:, None]
    column = tl.arange(0, DVP)
    tl.store(out + pair[:, None] * DV + column[None, :], weighted, mask=is_pair[:, None] & (column < DV)[None, :])
    tl.store(lse + pair, tl.where(nothing, float("-inf"), largest + tl.log(total)), mask=is_pair)


@triton.jit
def _differentiate(
    some_queries, some_keys, some_grad, some_values, lse, delta, SCALE: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights of (query, key) in the merged softmax, and the gradients of their logits."""
    logits = tl.dot(some_queries, tl.trans(some_keys), input_precision=PRECISION, out_dtype=ACC) * SCALE
    weights = tl.exp(tl.minimum(logits - lse[:, None], 0.0))
    response = tl.dot(some_grad, tl.trans(some_values), input_precision=PRECISION, out_dtype=ACC)
    return weights, weights * (response - delta[:, None])


@triton.jit(do_not_specialize=["length", "shared_by", "picks", "buckets"])
def _attend_backward_to_queries(
    grad_out, lse, delta, queries, keys, values, pair_order, tile_group, tile_begin, tile_end, bucket_starts,
    grad_pairs, length, shared_by, picks, buckets, SCALE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, PAIRS: tl.constexpr, KEYS: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    key_head = tl.program_id(1).to(tl.int64)
    tile = key_head * tl.num_programs(0) + tl.program_id(0)
    bucket = tl.load(tile_group + tile)
    if bucket < 0:
        return
    first_pair = key_head * shared_by * length * picks
    place = tl.load(tile_begin + tile) + tl.arange(0, PAIRS)
    is_pair = place < tl.load(tile_end + tile)
    pair = first_pair + tl.load(pair_order + first_pair + place, mask=is_pair, other=0)
    row = pair // picks
    some_queries = _load_rows(queries, row, is_pair, D, DP)
    some_grad = _load_rows(grad_out, row, is_pair, DV, DVP)
    row_lse = tl.load(lse + row, mask=is_pair, other=float("inf"))
    row_delta = tl.load(delta + row, mask=is_pair, other=0.0)
    gradient = tl.zeros([PAIRS, DP], ACC)
    at = bucket_starts + key_head * (buckets + 1) + bucket
    end = tl.load(at + 1)
    for begin in range(tl.load(at), end, KEYS):
        key = begin + tl.arange(0, KEYS)
        is_key = key < end
        some_keys = _load_rows(keys, key_head * length + key, is_key, D, DP)
        some_values = _load_rows(values, key_head * length + key, is_key, DV, DVP)
        _, d_logits = _differentiate(
            some_queries, some_keys, some_grad, some_values, row_lse, row_delta, SCALE, ACC, PRECISION
        )
        # (A padded key is zero, so whatever its weight it gives nothing.)
        gradient = tl.dot(d_logits.to(some_keys.dtype), some_keys, gradient, input_precision=PRECISION, out_dtype=ACC)
    dim = tl.arange(0, DP)
    tl.store(grad_pairs + pair[:, None] * D + dim[None, :], gradient, mask=is_pair[:, None] & (dim < D)[None, :])


@triton.jit(do_not_specialize=["length", "shared_by", "picks", "buckets"])
def _attend_backward_to_keys(
    grad_out, lse, delta, queries, keys, values, pair_order, pair_starts, tile_group, tile_begin, tile_end, grad_keys,
    grad_values, length, shared_by, picks, buckets, SCALE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, PAIRS: tl.constexpr, KEYS: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    key_head = tl.program_id(1).to(tl.int64)
    tile = key_head * tl.num_programs(0) + tl.program_id(0)
    bucket = tl.load(tile_group + tile)
    if bucket < 0:
        return
    key = tl.load(tile_begin + tile) + tl.arange(0, KEYS)
    is_key = key < tl.load(tile_end + tile)
    key = key_head * length + key
    some_keys = _load_rows(keys, key, is_key, D, DP)
    some_values = _load_rows(values, key, is_key, DV, DVP)
    d_keys = tl.zeros([KEYS, DP], ACC)
    d_values = tl.zeros([KEYS, DVP], ACC)
    first_pair = key_head * shared_by * length * picks
    at = pair_starts + key_head * (buckets + 1) + bucket
    end = tl.load(at + 1)
    for begin in range(tl.load(at), end, PAIRS):
        place = begin + tl.arange(0, PAIRS)
        is_pair = place < end
        row = (first_pair + tl.load(pair_order + first_pair + place, mask=is_pair, other=0)) // picks
        some_queries = _load_rows(queries, row, is_pair, D, DP)
        some_grad = _load_rows(grad_out, row, is_pair, DV, DVP)
        row_lse = tl.load(lse + row, mask=is_pair, other=float("inf"))
        row_delta = tl.load(delta + row, mask=is_pair, other=0.0)
        weights, d_logits = _differentiate(
            some_queries, some_keys, some_grad, some_values, row_lse, row_delta, SCALE, ACC, PRECISION
        )
        d_keys = tl.dot(
            tl.trans(d_logits.to(some_queries.dtype)), some_queries, d_keys, input_precision=PRECISION, out_dtype=ACC
        )
        d_values = tl.dot(
            tl.trans(weights.to(some_grad.dtype)), some_grad, d_values, input_precision=PRECISION, out_dtype=ACC
        )
    dim, value_dim = tl.arange(0, DP), tl.arange(0, DVP)
    tl.store(grad_keys + key[:, None] * D + dim[None, :], d_keys * SCALE, mask=is_key[:, None] & (dim < D)[None, :])
    tl.store(
        grad_values + key[:, None] * DV + value_dim[None, :], d_values,
        mask=is_key[:, None] & (value_dim < DV)[None, :],
    )  # fmt: skip
