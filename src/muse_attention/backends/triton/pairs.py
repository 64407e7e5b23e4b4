"""Every query with each bucket it retrieves: one numbered pair each, and the pairs of a key head sorted by bucket.

By the paper's rule every query has as many pairs, some of them without a bucket, and a pair's number tells its query.
By tolerance queries have different numbers of pairs, which are numbered one query after another; there is room for as
many as the budget allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.grouping import Groups, Tiles, group_rows, sum_before, tiles_of_groups
from muse_attention.backends.triton.numbers import cdiv, count_bits, lowest_bit, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.core.structures import Selection

PAIRS_OF_TILE = 64
"""Queries of one bucket that one program works on."""
_ROWS = 128
"""Queries whose pairs one program numbers."""
_WORDS_AT_ONCE = 4096


@dataclass(frozen=True)
class Pairs:
    """The pairs of `G` key heads, with room for `L` of each."""

    groups: Groups
    """pairs by bucket: order (G, L)"""
    tiles: Tiles
    picks: int
    """pairs of every query; 0 if these differ"""
    rows: Tensor
    """(G, L) int32: the query of each pair, a row of the key head's; not looked at if `picks` tells"""
    row_starts: Tensor
    """(G, rows + 1) int32: the first pair of each query; likewise"""

    @property
    def shape(self) -> torch.Size:
        return self.groups.order.shape

    @property
    def is_ragged(self) -> bool:
        return self.picks == 0

    @property
    def numbering(self) -> tuple[Tensor, int, int]:
        """As kernels take it: the query of each pair, the room of a key head, and the picks."""
        return self.rows, self.shape[1], self.picks

    @classmethod
    def of(cls, groups: Groups, picks: int, rows: Tensor, row_starts: Tensor) -> Pairs:
        return cls(groups, tiles_of_groups(groups, PAIRS_OF_TILE), picks, rows, row_starts)


def sort_picks(selection: Selection, blocks: int, fill_in: Groups) -> None:
    """Sort the picks of each key head by bucket, `cluster * nb + block`; those without a bucket come last."""
    number, retrieved = selection.retrieved.numel(), selection.retrieved.shape[-1]
    bucket = torch.empty_like(fill_in.order)
    width = 1024
    _number_buckets[(cdiv(number, width),)](
        selection.opened, selection.retrieved, bucket, number, retrieved, blocks, WIDTH=width
    )
    group_rows(bucket, fill_in)


def sort_bits(selection: Selection, key_heads: int, fill_in: Groups, rows: Tensor, row_starts: Tensor) -> None:
    """Number the pairs of a selection by tolerance, and sort those of each key head by bucket."""
    heads, length, blocks, words = selection.retrieved.shape
    room = fill_in.order.shape[1]
    tiles = cdiv(length, _ROWS)
    before = rows.new_empty(key_heads, heads // key_heads * tiles)
    bucket = torch.empty_like(rows)
    used = rows.new_empty(key_heads)
    grid = (tiles, heads)
    padded_words = power_of_two(blocks * words)
    shape = {"ROWS": _ROWS, "STEP": max(1, min(_ROWS, _WORDS_AT_ONCE // padded_words)), "WP": padded_words}
    _count_pairs[grid](selection.retrieved, before, length, blocks * words, **shape)
    sum_before(before, used)
    _number_pairs[grid](
        selection.retrieved, before, bucket, rows, row_starts, length, blocks, words, heads // key_heads, room, **shape
    )
    group_rows(bucket, fill_in, used)


@triton.jit
def row_of_pair(rows, pair, is_pair, picks, IS_RAGGED: tl.constexpr):
    """The query of a pair; `rows` are those of the key head."""
    if IS_RAGGED:
        return tl.load(rows + pair, mask=is_pair, other=0)
    else:
        return pair // picks


@kernel(do_not_specialize=["number", "retrieved_blocks", "blocks"])
def _number_buckets(opened, retrieved, picks, number, retrieved_blocks, blocks, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = at < number
    block = tl.load(retrieved + at, mask=inside, other=-1)
    cluster = tl.load(opened + at // retrieved_blocks, mask=inside, other=-1)
    tl.store(picks + at, tl.where((block < 0) | (cluster < 0), -1, cluster * blocks + block), mask=inside)


@triton.jit
def _load_words(retrieved, row, is_row, all_words, WP: tl.constexpr):
    word = tl.arange(0, WP)
    at = retrieved + row[:, None] * all_words + word[None, :]
    return tl.load(at, mask=is_row[:, None] & (word < all_words)[None, :], other=0)


@kernel(do_not_specialize=["length", "all_words"])
def _count_pairs(retrieved, counts, length, all_words, ROWS: tl.constexpr, STEP: tl.constexpr, WP: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    total = 0
    for begin in range(tl.program_id(0) * ROWS, tl.minimum((tl.program_id(0) + 1) * ROWS, length), STEP):
        row = begin + tl.arange(0, STEP)
        words = _load_words(retrieved, head * length + row, row < length, all_words, WP)
        total += tl.sum(tl.sum(count_bits(words), 1), 0)
    tl.store(counts + head * tl.num_programs(0) + tl.program_id(0), total)


@kernel(do_not_specialize=["length", "blocks", "words", "shared_by", "room"])
def _number_pairs(
    retrieved, before, bucket, rows, row_starts, length, blocks, words, shared_by, room, ROWS: tl.constexpr,
    STEP: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """The pairs of a query in the order of block and cluster: the lowest bit of all words at once, then the next."""
    head = tl.program_id(1).to(tl.int64)
    key_head, of_group = head // shared_by, head % shared_by
    first_pair = tl.load(before + head * tl.num_programs(0) + tl.program_id(0))
    starts = row_starts + key_head * (shared_by * length + 1) + of_group * length
    bucket += key_head * room
    rows += key_head * room
    word = tl.arange(0, WP)
    for begin in range(tl.program_id(0) * ROWS, tl.minimum((tl.program_id(0) + 1) * ROWS, length), STEP):
        row = begin + tl.arange(0, STEP)
        left = _load_words(retrieved, head * length + row, row < length, blocks * words, WP)
        of_words = count_bits(left)
        of_rows = tl.sum(of_words, 1)
        pair_of_row = first_pair + tl.cumsum(of_rows, 0) - of_rows
        tl.store(starts + row, pair_of_row, mask=row < length)
        if of_group == shared_by - 1:
            tl.store(starts + row + 1, pair_of_row + of_rows, mask=row == length - 1)
        pair = pair_of_row[:, None] + tl.cumsum(of_words, 1) - of_words
        for _ in range(tl.max(tl.max(of_words, 1), 0)):
            exists = left != 0
            bit, left = lowest_bit(left)
            number = ((word % words)[None, :] * 32 + bit) * blocks + (word // words)[None, :]
            tl.store(bucket + pair, number, mask=exists & (pair < room))
            of_key_head = (of_group.to(tl.int32) * length + row)[:, None] + (word * 0)[None, :]
            tl.store(rows + pair, of_key_head, mask=exists & (pair < room))
            pair += exists.to(tl.int32)
        first_pair += tl.sum(of_rows, 0)
