"""Stage 5: exact attention to the retrieved buckets, bucket by bucket.

Pairs (query, retrieved bucket) are sorted by bucket. A tile is some queries of one bucket together with all its keys,
so its softmax is complete and each pair yields one partial.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.backends.torch.grouping import Groups, Tiles, group_rows, join, take_rows, tiles, with_padding
from muse_attention.core.exponential import exp_
from muse_attention.core.structures import Partial

LONGEST_TILE = 512
"""Queries of one bucket that attend to it at once."""
PARTIAL_ELEMENTS = 1 << 26
"""Numbers in the partial outputs, one for each pair, kept at a time: queries go in groups that need about as many."""


def attend(queries: Tensor, keys: Tensor, values: Tensor, picks: Tensor, buckets: Groups) -> Partial:
    """Attention of (rows, D) queries to the buckets each of them picked, (rows, picks) int64, -1 for none.

    `keys` and `values` are the rows that `buckets` groups.
    """
    picks = _without_empty_buckets(picks, buckets)
    values = with_padding(torch.cat([values, torch.ones_like(values[:, :1])], dim=1))
    at_once = max(1, PARTIAL_ELEMENTS // values.shape[1] // max(1, picks.shape[1]))
    partials = [
        _attend(rows, keys, values, picks_of_rows, buckets)
        for rows, picks_of_rows in zip(queries.split(at_once), picks.split(at_once), strict=True)
    ]
    return Partial(join([partial.out for partial in partials]), join([partial.lse for partial in partials]))


def _attend(queries: Tensor, keys: Tensor, values: Tensor, picks: Tensor, buckets: Groups) -> Partial:
    """`values` has a column of ones, which makes the normaliser one more weighted sum, and a zero row at the end."""
    value_dim = values.shape[-1] - 1
    number = picks.numel()
    out = values.new_empty(number + 1, value_dim)
    out[torch.nonzero(picks.flatten() < 0)[:, 0]] = 0
    lse = values.new_full((number + 1,), -torch.inf)
    for tile in _pair_tiles(picks, buckets, queries.shape[-1]):
        logits = torch.bmm(take_rows(queries, tile.query_rows), take_rows(keys, tile.key_rows).mT)  # (T, m, s)
        # Padding repeats a key of the bucket, so the maximum is right; its value is the zero row, out of the sums.
        shift = logits.amax(-1, keepdim=True)
        sums = torch.bmm(exp_(logits.sub_(shift)), take_rows(values, tile.key_places))
        total = sums[..., value_dim:]
        tile.pairs.scatter(out, sums[..., :value_dim] / total)
        tile.pairs.scatter(lse, (total.log() + shift)[..., 0])
    out, lse = out[:-1].view(*picks.shape, -1), lse[:-1].view_as(picks)
    merged = lse.logsumexp(-1)
    shares = exp_(lse - torch.where(merged == -torch.inf, 0, merged)[:, None])
    return Partial(torch.bmm(shares[:, None], out)[:, 0], merged)


def attend_backward(
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    picks: Tensor,
    buckets: Groups,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. `lse` and `delta` are those of the merged softmax."""
    # Padded keys are the zero row: they give nothing to the queries, and what they receive falls into a spare row.
    keys, values = with_padding(keys), with_padding(values)
    grad_queries, grad_keys, grad_values = (torch.zeros_like(rows) for rows in (queries, keys, values))
    for tile in _pair_tiles(_without_empty_buckets(picks, buckets), buckets, queries.shape[-1]):
        tile_queries, tile_grad_out = take_rows(queries, tile.query_rows), take_rows(grad_out, tile.query_rows)
        tile_keys, tile_values = take_rows(keys, tile.key_places), take_rows(values, tile.key_places)
        # Padded queries get an infinite lse, and so no weight.
        tile_lse = torch.where(tile.pairs.valid, take_rows(lse, tile.query_rows), torch.inf)[..., None]
        weights = exp_(torch.bmm(tile_queries, tile_keys.mT).sub_(tile_lse).clamp_(max=0))
        d_logits = torch.bmm(tile_grad_out, tile_values.mT).sub_(take_rows(delta, tile.query_rows)[..., None])
        d_logits.mul_(weights)
        places = tile.key_places.flatten()
        grad_queries.index_add_(0, tile.query_rows.flatten(), (d_logits @ tile_keys).flatten(0, 1))
        grad_keys.index_add_(0, places, (d_logits.mT @ tile_queries).flatten(0, 1))
        grad_values.index_add_(0, places, (weights.mT @ tile_grad_out).flatten(0, 1))
    return grad_queries, grad_keys[:-1], grad_values[:-1]


def _without_empty_buckets(picks: Tensor, buckets: Groups) -> Tensor:
    """The picks without empty buckets, which only a query that is not finite can pick."""
    return torch.where(buckets.sizes[picks.clamp(min=0)] > 0, picks, -1)


@dataclass(frozen=True)
class _PairTiles:
    """A batch of `T` tiles: `m` queries of one bucket each, and the bucket's keys padded to `s`."""

    pairs: Tiles
    query_rows: Tensor
    """(T, m)"""
    key_rows: Tensor
    """(T, s); a padded place repeats the bucket's last key"""
    key_places: Tensor
    """(T, s); a padded place is the row after all keys"""


def _pair_tiles(picks: Tensor, buckets: Groups, head_dim: int) -> Iterator[_PairTiles]:
    """Walk over all pairs, buckets of similar size together."""
    by_bucket = group_rows(picks.flatten(), buckets.sizes.shape[0])
    for among, longest in _buckets_by_size(buckets, by_bucket):
        for tile in tiles(by_bucket, longest + 3 * head_dim, among=among, most_rows=LONGEST_TILE):
            place = torch.arange(longest, device=picks.device)
            size = buckets.sizes[tile.group][:, None]
            key_rows = buckets.order[buckets.starts[tile.group][:, None] + torch.minimum(place, size - 1)]
            key_places = torch.where(place < size, key_rows, buckets.order.shape[0])
            yield _PairTiles(tile, tile.rows // picks.shape[1], key_rows, key_places)


def _buckets_by_size(buckets: Groups, pairs: Groups) -> Iterator[tuple[Tensor, int]]:
    """The buckets that any query picked, in batches of similar size: their numbers and the largest size."""
    wanted = torch.nonzero(pairs.sizes)[:, 0]
    sizes, by_size = torch.sort(buckets.sizes[wanted], stable=True)
    wanted, lengths = wanted[by_size], sizes.tolist()
    begin = 0
    while begin < len(lengths):
        end = begin
        # Sizes within a quarter, or within 16, of the smallest.
        while end < len(lengths) and lengths[end] <= max(lengths[begin] + 16, lengths[begin] * 5 // 4):
            end += 1
        yield wanted[begin:end], lengths[end - 1]
        begin = end
