"""Every query with each bucket it retrieves: one numbered pair each, and the pairs of a key head sorted by bucket.

All queries have the same number of pairs, some of these without a bucket, so a pair's number tells its query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from muse_attention.backends.triton.digit_sort import group_rows
from muse_attention.backends.triton.grouping import Groups
from muse_attention.backends.triton.numbers import cdiv
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.tiles import Tiles, tiles_of_groups
from muse_attention.core.structures import Selection

PAIRS_OF_TILE = 64
"""Queries of one bucket that one program works on."""


@dataclass(frozen=True)
class Pairs:
    """The pairs of `G` key heads, `L` of each."""

    groups: Groups
    """pairs by bucket: order (G, L)"""
    tiles: Tiles
    picks: int
    """pairs of every query"""

    @property
    def shape(self) -> torch.Size:
        return self.groups.order.shape

    @property
    def arguments(self) -> dict[str, Any]:
        """As kernels take them."""
        return {"pair_order_ptr": self.groups.order, "picks": self.picks}

    @classmethod
    def of(cls, groups: Groups, picks: int) -> Pairs:
        return cls(groups, tiles_of_groups(groups, PAIRS_OF_TILE), picks)


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
