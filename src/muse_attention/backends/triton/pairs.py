"""Every query with each bucket it retrieves: one numbered pair each, and the pairs of a key head sorted by bucket.

By the paper's rule every query has as many pairs, some of them without a bucket, and a pair's number tells its query.
By tolerance queries have different numbers of pairs, which are numbered one query after another; there is room for as
many as the budget allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.device_math import count_bits, lowest_bit
from muse_attention.backends.triton.digit_sort import group_rows
from muse_attention.backends.triton.grouping import Groups
from muse_attention.backends.triton.numbers import cdiv, power_of_two
from muse_attention.backends.triton.prefix_sums import sum_before
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.tiles import Tiles, tiles_of_groups
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
    def arguments(self) -> dict[str, Any]:
        """As kernels take them."""
        return {
            "pair_order_ptr": self.groups.order,
            "pair_rows_ptr": self.rows,
            "room": self.shape[1],
            "picks": self.picks,
            "IS_RAGGED": self.is_ragged,
        }

    @classmethod
    def of(cls, groups: Groups, picks: int, rows: Tensor, row_starts: Tensor) -> Pairs:
        return cls(groups, tiles_of_groups(groups, PAIRS_OF_TILE), picks, rows, row_starts)


def sort_picks(selection: Selection, blocks: int, fill_in: Groups) -> None:
    """Sort the picks of each key head by bucket, `cluster * nb + block`; those without a bucket come last."""
    number, retrieved = selection.retrieved.numel(), selection.retrieved.shape[-1]
    bucket = torch.empty_like(fill_in.order)
    width = 1024
    _number_buckets[(cdiv(number, width),)](
        opened_ptr=selection.opened, retrieved_ptr=selection.retrieved, picks_ptr=bucket, number=number,
        retrieved_blocks=retrieved, blocks=blocks, WIDTH=width,
    )  # fmt: skip
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
    _count_pairs[grid](
        retrieved_ptr=selection.retrieved, counts_ptr=before, length=length, all_words=blocks * words, **shape
    )
    sum_before(before, used)
    _number_pairs[grid](
        retrieved_ptr=selection.retrieved, before_ptr=before, bucket_ptr=bucket, rows_ptr=rows,
        row_starts_ptr=row_starts, length=length, blocks=blocks, words=words, shared_by=heads // key_heads, room=room,
        **shape,
    )  # fmt: skip
    group_rows(bucket, fill_in, used)


@triton.jit
def row_of_pair(rows_ptr, offs_pair, mask_pair, picks, IS_RAGGED: tl.constexpr):
    """[PAIRS]: the query of each pair; `rows_ptr` are those of the key head."""
    if IS_RAGGED:
        return tl.load(rows_ptr + offs_pair, mask=mask_pair, other=0)
    else:
        return offs_pair // picks


@kernel(stage="sorting", do_not_specialize=["number", "retrieved_blocks", "blocks"])
def _number_buckets(opened_ptr, retrieved_ptr, picks_ptr, number, retrieved_blocks, blocks, WIDTH: tl.constexpr):
    """The bucket of each pick, `cluster * nb + block`; -1 if it has none.

    Grid: (number / WIDTH,). `opened_ptr`: (H, N, opened clusters) int32; `retrieved_ptr`, `picks_ptr`:
    (H, N, opened clusters, retrieved blocks) int32.
    """
    offs = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)  # [WIDTH]
    mask = offs < number  # [WIDTH]
    block = tl.load(retrieved_ptr + offs, mask=mask, other=-1)  # [WIDTH]
    cluster = tl.load(opened_ptr + offs // retrieved_blocks, mask=mask, other=-1)  # [WIDTH]
    tl.store(picks_ptr + offs, tl.where((block < 0) | (cluster < 0), -1, cluster * blocks + block), mask=mask)


@triton.jit
def _load_words(retrieved_ptr, offs_row, mask_row, all_words, WP: tl.constexpr):
    offs_word = tl.arange(0, WP)
    ptrs = retrieved_ptr + offs_row[:, None] * all_words + offs_word[None, :]  # [STEP, WP]
    return tl.load(ptrs, mask=mask_row[:, None] & (offs_word < all_words)[None, :], other=0)


@kernel(stage="sorting", do_not_specialize=["length", "all_words"])
def _count_pairs(
    retrieved_ptr, counts_ptr, length, all_words, ROWS: tl.constexpr, STEP: tl.constexpr, WP: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    total = 0
    for begin in range(tl.program_id(0) * ROWS, tl.minimum((tl.program_id(0) + 1) * ROWS, length), STEP):
        offs_row = begin + tl.arange(0, STEP)  # [STEP]
        words = _load_words(retrieved_ptr, head * length + offs_row, offs_row < length, all_words, WP)  # [STEP, WP]
        total += tl.sum(tl.sum(count_bits(words), 1), 0)
    tl.store(counts_ptr + head * tl.num_programs(0) + tl.program_id(0), total)


@kernel(stage="sorting", do_not_specialize=["length", "blocks", "words", "shared_by", "room"])
def _number_pairs(
    retrieved_ptr, before_ptr, bucket_ptr, rows_ptr, row_starts_ptr, length, blocks, words, shared_by, room,
    ROWS: tl.constexpr, STEP: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """The pairs of a query in the order of block and cluster: the lowest bit of all words at once, then the next."""
    head = tl.program_id(1).to(tl.int64)
    key_head, of_group = head // shared_by, head % shared_by
    first_pair = tl.load(before_ptr + head * tl.num_programs(0) + tl.program_id(0))
    starts = row_starts_ptr + key_head * (shared_by * length + 1) + of_group * length
    bucket_ptr += key_head * room
    rows_ptr += key_head * room
    offs_word = tl.arange(0, WP)
    for begin in range(tl.program_id(0) * ROWS, tl.minimum((tl.program_id(0) + 1) * ROWS, length), STEP):
        offs_row = begin + tl.arange(0, STEP)  # [STEP]
        left = _load_words(retrieved_ptr, head * length + offs_row, offs_row < length, blocks * words, WP)  # [STEP, WP]
        of_words = count_bits(left)  # [STEP, WP]
        of_rows = tl.sum(of_words, 1)  # [STEP]
        pair_of_row = first_pair + tl.cumsum(of_rows, 0) - of_rows  # [STEP]
        tl.store(starts + offs_row, pair_of_row, mask=offs_row < length)
        if of_group == shared_by - 1:
            tl.store(starts + offs_row + 1, pair_of_row + of_rows, mask=offs_row == length - 1)
        offs_pair = pair_of_row[:, None] + tl.cumsum(of_words, 1) - of_words  # [STEP, WP]
        for _ in range(tl.max(tl.max(of_words, 1), 0)):
            exists = left != 0  # [STEP, WP]
            bit, left = lowest_bit(left)  # [STEP, WP], [STEP, WP]
            number = ((offs_word % words)[None, :] * 32 + bit) * blocks + (offs_word // words)[None, :]  # [STEP, WP]
            tl.store(bucket_ptr + offs_pair, number, mask=exists & (offs_pair < room))
            of_key_head = (of_group.to(tl.int32) * length + offs_row)[:, None] + (offs_word * 0)[None, :]  # [STEP, WP]
            tl.store(rows_ptr + offs_pair, of_key_head, mask=exists & (offs_pair < room))
            offs_pair += exists.to(tl.int32)
        first_pair += tl.sum(of_rows, 0)
