"""What a recorded call retrieved: how many buckets and keys, and how many of the single keys that matter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.core.precision import compute_dtype
from muse_attention.core.query_tiles import place_in_tiles
from muse_attention.core.recording import RecordedCall
from muse_attention.fidelity.single_keys import SingleKeys, bucket_sizes

SINGLE_WEIGHT = 0.05
"""A query looks up a key outside of its own block if exact attention gives it a larger weight."""
_NUMBERS_AT_ONCE = 1 << 25
"""Logits, or numbers of a selection, that are processed together."""
_ALL_QUERIES_UP_TO = 1 << 16
"""Tokens. In longer sequences `found_share` uses evenly spaced queries: as much work as at this length."""


@dataclass(frozen=True)
class Retrieval:
    """Measures of each head, (batch, query heads), float64. The first three are means over queries."""

    pairs_per_query: Tensor
    """buckets that a query retrieves"""
    keys_per_query: Tensor
    """keys in them"""
    share_retrieving: Tensor
    """share of queries that retrieve anything"""
    found_share: Tensor
    """of exact attention's weights above `SINGLE_WEIGHT` on keys outside of the query's own block, the share on keys
    that are retrieved, or are alone in their summary. The first token is left out: it is a sink, whose weight would
    hide the rest. NaN for a head without such weights."""
    found_queries: Tensor | None = None
    """queries that `found_share` is measured on, evenly spaced in long sequences; None: all"""


def measure_retrieval(call: RecordedCall, exact_lse: Tensor) -> Retrieval | None:
    """What a recorded call retrieved; None where there is nothing to retrieve, as in exact attention.

    Args:
        exact_lse: the lse of exact attention, (batch, query heads, N)
    """
    if not call.config.monopole and call.config.retrieved_clusters == 0:
        return None
    count = _count_in_tiles if call.config.tolerance is not None else _count_picks
    pairs, keys, retrieving = (total.double() / call.query.shape[2] for total in count(call))
    sampled = _sampled_queries(call.query.shape[2])
    found_queries = torch.full_like(pairs, len(sampled)) if sampled.step > 1 else None
    return Retrieval(pairs, keys, retrieving, _found_share(call, exact_lse), found_queries)


def _count_in_tiles(call: RecordedCall) -> tuple[Tensor, Tensor, Tensor]:
    """With a tolerance: pairs, keys, and queries that retrieve, (batch, query heads) int64 each."""
    first = call.selection.retrieved  # (batch, heads, blocks, tiles, buckets)
    pairs = torch.zeros(first.shape[:2], dtype=torch.int64, device=first.device)
    if not first.shape[-1]:
        return pairs, pairs, pairs
    block_size = call.config.block_size
    tile, _ = place_in_tiles(call.clusters.query_assignment, call.config)
    rows = torch.zeros(first.shape[:-1], dtype=torch.int32, device=first.device).flatten(2)
    tile = tile + torch.arange(tile.shape[-1], device=tile.device) // block_size * first.shape[3]
    rows.scatter_add_(2, tile, torch.ones_like(tile, dtype=torch.int32))
    sizes = bucket_sizes(call).flatten(2)[..., : first.shape[-1]]
    sizes = sizes.repeat_interleave(first.shape[1] // sizes.shape[1], dim=1)
    keys, retrieving = torch.zeros_like(pairs), torch.zeros_like(pairs)
    at_once = max(1, _NUMBERS_AT_ONCE // math.prod((*first.shape[:2], first.shape[-1])))
    for first_rows, tile_rows in zip(first.flatten(2, 3).split(at_once, 2), rows.split(at_once, 2), strict=True):
        queries = (tile_rows[..., None] - first_rows).clamp_(min=0)  # of each tile, that retrieve each bucket
        of_buckets = queries.sum(2)
        pairs += of_buckets.sum(-1)
        keys += (of_buckets * sizes).sum(-1)
        retrieving += queries.amax(-1).sum(-1)
    return pairs, keys, retrieving


def _count_picks(call: RecordedCall) -> tuple[Tensor, Tensor, Tensor]:
    """The same for the paper's method."""
    opened, retrieved = call.selection.opened, call.selection.retrieved
    sizes = bucket_sizes(call).flatten(2)
    sizes = sizes.repeat_interleave(opened.shape[1] // sizes.shape[1], dim=1)
    is_picked = retrieved >= 0
    at_once = max(1, _NUMBERS_AT_ONCE // max(1, math.prod((*retrieved.shape[:2], *retrieved.shape[3:]))))
    keys = torch.zeros(opened.shape[:2], dtype=torch.int64, device=opened.device)
    for clusters, blocks in zip(opened.split(at_once, 2), retrieved.split(at_once, 2), strict=True):
        bucket = blocks.long() * call.config.key_clusters + clusters[..., None]
        of_picks = sizes.gather(2, bucket.clamp(min=0).flatten(2)).view_as(bucket)
        keys += of_picks.masked_fill_(blocks < 0, 0).sum((2, 3, 4))
    return is_picked.sum((2, 3, 4)), keys, is_picked.flatten(3).any(-1).sum(2)


def _sampled_queries(length: int) -> range:
    """The queries whose single keys are counted, each in the middle of its stretch."""
    step = -(-(length**2) // _ALL_QUERIES_UP_TO**2)
    return range(step // 2, length, step)


def _found_share(call: RecordedCall, exact_lse: Tensor) -> Tensor:
    batch, heads, _, _ = call.query.shape
    known = SingleKeys(call)
    weight, found = (torch.zeros(batch * heads, dtype=torch.float64, device=call.query.device) for _ in range(2))
    for pair, weights in _single_weights(call, exact_lse):
        head = pair[0] * heads + pair[1]
        weight.index_add_(0, head, weights)
        found.index_add_(0, head, weights * (known.is_retrieved(*pair) | known.is_alone(*pair)))
    return (found / weight).view(batch, heads)


def _single_weights(call: RecordedCall, exact_lse: Tensor) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """Pairs of a query and a key that it looks up, as in `SingleKeys`, and exact attention's weights, float64."""
    batch, heads, length, _ = call.query.shape
    wide, block_size = compute_dtype(call.query.dtype), call.config.block_size
    key_heads = call.key.shape[1]
    threshold = exact_lse.to(wide).unflatten(1, (key_heads, -1))[..., None] + math.log(SINGLE_WEIGHT)
    query = (call.scale * call.query.to(wide)).unflatten(1, (key_heads, -1))  # (batch, key heads, group, N, D)
    sampled = _sampled_queries(length)
    step = sampled.step
    for begin in range(0, length, block_size):
        end = min(begin + block_size, length)
        first_row = begin + (sampled.start - begin) % step
        # What the queries of this block see beyond it.
        for first, last in ((1, begin), (max(1, end), end if call.is_causal else length)):
            if first >= last:
                continue
            keys = call.key[:, :, first:last].to(wide).mT
            at_once = max(1, _NUMBERS_AT_ONCE // (batch * heads * (last - first)))
            for start in range(first_row, end, step * at_once):
                rows = slice(start, min(start + step * at_once, end), step)
                logits = query[..., rows, :].flatten(2, 3) @ keys
                excess = logits.unflatten(2, (query.shape[2], -1)).sub_(threshold[..., rows, :])
                pairs = (excess > 0).nonzero(as_tuple=True)
                of_batch, key_head, member, row, key = pairs
                pair = (of_batch, key_head * query.shape[2] + member, start + step * row, first + key)
                yield pair, SINGLE_WEIGHT * excess[pairs].double().exp()
