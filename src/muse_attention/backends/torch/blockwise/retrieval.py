"""Exact attention of tiles of queries to the keys they retrieve, and the search for single keys of some weight.

The keys of a tile come in the order of the first row that wants them, in chunks of one size. What a row attends to is
then the beginning of a list that no later row changes, and chunks in which it has nothing add exact zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.backends.torch.blockwise.buckets import Buckets
from muse_attention.backends.torch.blockwise.query_slots import first_to_reach
from muse_attention.backends.torch.grouping import take_rows, transposed
from muse_attention.core.exponential import exp_
from muse_attention.core.query_tiles import NO_ROW
from muse_attention.core.structures import Partial

CHUNK = 128
"""Keys of a chunk."""
CHUNKS_AT_ONCE = 16
"""Chunks in one batch of matrix products."""
CHUNKS_IN_MEMORY = 512
"""About as many chunks keep their results until those of a tile are merged."""
MASKED = -1e30
"""Added to the logits of keys that a row does not attend to: finite, so that 0 times it is 0."""


@dataclass(frozen=True)
class Chunks:
    """Keys of some tiles, in chunks; a tile's follow each other. Their number is a multiple of `CHUNKS_AT_ONCE`."""

    tile: Tensor
    """(chunks,) int64; the number after all tiles for an empty chunk"""
    rows: Tensor
    """(chunks, CHUNK) int64: rows of `Buckets`; padding is the last row there, of zeros"""
    first: Tensor
    """(chunks, CHUNK) uint8: the first row of the tile that attends to each key; `NO_ROW` at padded places"""

    def split(self) -> Iterator[tuple[slice, Chunks]]:
        for begin in range(0, self.tile.shape[0], CHUNKS_AT_ONCE):
            batch = slice(begin, begin + CHUNKS_AT_ONCE)
            yield batch, Chunks(self.tile[batch], self.rows[batch], self.first[batch])


def chunks_of_keys(first: Tensor, buckets: Buckets) -> Iterator[Chunks]:
    """The keys that (tiles, S) first rows ask for, some whole tiles at a time."""
    tiles, columns = first.shape
    sizes = buckets.sizes[:columns]
    tile, bucket = torch.nonzero((first != NO_ROW) & (sizes > 0), as_tuple=True)
    row = first[tile, bucket].long()
    order = ((tile * (NO_ROW + 1) + row) * columns + bucket).sort().indices
    tile, bucket, row = tile[order], bucket[order], row[order]
    keys_of_tile = torch.zeros_like(first[:, 0], dtype=torch.int64).index_add_(0, tile, sizes[bucket])
    chunks = -(-keys_of_tile // CHUNK)
    pairs_end, chunks_end = torch.bincount(tile, minlength=tiles).cumsum(0).tolist(), chunks.cumsum(0).tolist()
    begin, pairs_begin, chunks_begin = 0, 0, 0
    for end in range(1, tiles + 1):
        if end < tiles and chunks_end[end] - chunks_begin <= CHUNKS_IN_MEMORY:
            continue
        pairs = slice(pairs_begin, pairs_end[end - 1])
        if pairs.stop > pairs.start:
            yield _lay_out(tile[pairs], bucket[pairs], row[pairs], chunks[begin:end], begin, tiles, buckets)
        begin, pairs_begin, chunks_begin = end, pairs_end[end - 1], chunks_end[end - 1]


def _lay_out(
    tile: Tensor, bucket: Tensor, row: Tensor, chunks: Tensor, first_tile: int, tiles: int, buckets: Buckets
) -> Chunks:
    """Chunks for ordered pairs of a tile and a bucket; `chunks` counts those of each tile from the first on."""
    device = tile.device
    sizes = buckets.sizes[bucket]
    begins = sizes.cumsum(0) - sizes
    local = tile - first_tile
    keys_of_tile = torch.zeros_like(chunks).index_add_(0, local, sizes)
    chunk_begin = (chunks.cumsum(0) - chunks) * CHUNK
    target = chunk_begin[local] + begins - (keys_of_tile.cumsum(0) - keys_of_tile)[local]
    pair = torch.repeat_interleave(torch.arange(tile.shape[0], device=device), sizes)
    place = torch.arange(pair.shape[0], device=device) - begins[pair]
    number = int(chunks.sum())
    padded = -(-number // CHUNKS_AT_ONCE) * CHUNKS_AT_ONCE
    rows = torch.full((padded * CHUNK,), buckets.order.shape[0], device=device)
    first = torch.full((padded * CHUNK,), NO_ROW, dtype=torch.uint8, device=device)
    at = target[pair] + place
    rows[at] = buckets.starts[bucket][pair] + place
    first[at] = row[pair].byte()
    of_chunk = torch.repeat_interleave(torch.arange(chunks.shape[0], device=device) + first_tile, chunks)
    of_chunk = torch.nn.functional.pad(of_chunk, (0, padded - number), value=tiles)
    return Chunks(of_chunk, rows.view(-1, CHUNK), first.view(-1, CHUNK))


def attend(queries: Tensor, row_in_tile: Tensor, first: Tensor, buckets: Buckets) -> Partial:
    """Attention of (tiles + 1, rows, D) queries, the last ones being padding, to the keys they want."""
    tiles, rows, _ = queries.shape
    value_dim = buckets.values.shape[1]
    out, total = queries.new_zeros(tiles, rows, value_dim), queries.new_zeros(tiles, rows)
    largest = torch.full_like(total, -torch.inf)
    for group in chunks_of_keys(first, buckets):
        number = group.tile.shape[0]
        sums, totals, shifts = queries.new_empty(number, rows, value_dim), *queries.new_empty(2, number, rows)
        for batch, chunks in group.split():
            logits = _logits(queries, row_in_tile, chunks, take_rows(buckets.keys, chunks.rows))
            largest_logit = logits.amax(-1)
            shifts[batch] = torch.where(largest_logit < MASKED / 2, -torch.inf, largest_logit)
            weights = exp_(logits.sub_(_finite(shifts[batch])[..., None]))
            totals[batch] = weights.sum(-1)
            sums[batch] = torch.bmm(weights, take_rows(buckets.values, chunks.rows))
        largest.scatter_reduce_(0, group.tile[:, None].expand_as(shifts), shifts, "amax")
        shares = exp_(shifts.sub_(_finite(largest)[group.tile]))
        total.index_add_(0, group.tile, totals.mul_(shares))
        out.index_add_(0, group.tile, sums.mul_(shares[..., None]))
    return Partial(out.div_(torch.where(total == 0, 1, total)[..., None]), total.log().add_(largest))


def search(queries: Tensor, row_in_tile: Tensor, least: Tensor, searched: Tensor, buckets: Buckets) -> Tensor:
    """(tiles, S) uint8: the first row of each tile to which a key of each bucket has a logit of (tiles + 1, rows)
    `least` or more, of the rows from (tiles, S) `searched` on. Queries and rows as in `attend`."""
    tiles, columns = searched.shape
    found = torch.full((tiles * columns + 1,), NO_ROW, dtype=torch.uint8, device=searched.device)
    for group in chunks_of_keys(searched, buckets):
        for _, chunks in group.split():
            logits = _logits(queries, row_in_tile, chunks, take_rows(buckets.keys, chunks.rows))
            first = first_to_reach(logits, least[chunks.tile], row_in_tile[chunks.tile])  # (chunks, CHUNK)
            # (Padding is found by none: its place is the last.)
            place = chunks.tile[:, None] * columns + take_rows(buckets.bucket_of_row, chunks.rows)
            place = torch.where(chunks.first == NO_ROW, tiles * columns, place)
            found.scatter_reduce_(0, place.flatten(), first.flatten(), "amin")
    return found[:-1].view(tiles, columns)


def attend_backward(
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    queries: Tensor,
    row_in_tile: Tensor,
    first: Tensor,
    buckets: Buckets,
    *,
    add_to: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the gradients of queries, keys and values. `lse` is infinite at padded rows."""
    grad_queries, grad_keys, grad_values = add_to
    for group in chunks_of_keys(first, buckets):
        for _, chunks in group.split():
            keys, values = take_rows(buckets.keys, chunks.rows), take_rows(buckets.values, chunks.rows)
            logits = _logits(queries, row_in_tile, chunks, keys)
            weights = exp_(logits.sub_(lse[chunks.tile][..., None]).clamp_(max=0))
            of_tile, to_out = take_rows(queries, chunks.tile), take_rows(grad_out, chunks.tile)
            d_logits = torch.bmm(to_out, transposed(values)).sub_(delta[chunks.tile][..., None]).mul_(weights)
            grad_queries.index_add_(0, chunks.tile, d_logits @ keys)
            rows = chunks.rows.flatten()
            grad_keys.index_add_(0, rows, (d_logits.mT @ of_tile).flatten(0, 1))
            grad_values.index_add_(0, rows, (weights.mT @ to_out).flatten(0, 1))


def _logits(queries: Tensor, row_in_tile: Tensor, chunks: Chunks, keys: Tensor) -> Tensor:
    """(chunks, rows, CHUNK): `MASKED` or less where a row does not attend to a key."""
    logits = torch.bmm(take_rows(queries, chunks.tile), transposed(keys))
    row, first = row_in_tile[chunks.tile][..., None].to(logits.dtype), chunks.first[:, None].to(logits.dtype)
    # In floats this takes a tenth of the time of a boolean mask.
    return logits.add_(torch.lt(row, first, out=torch.empty_like(logits)).mul_(MASKED))


def _finite(largest: Tensor) -> Tensor:
    return torch.where(largest == -torch.inf, 0, largest)
