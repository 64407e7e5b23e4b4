"""Where the queries of a block go: slots of equal size, each of one query cluster, in order of position.

A slot is one or more tiles. In the forward pass every matrix product works on whole slots or tiles, and on a fixed
number of them, so that its shape, and with it the rounding of each row, is the same whatever the other queries of the
block are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.config import MuSeConfig
from muse_attention.core.query_tiles import NO_ROW

LEAST_ROWS, MOST_ROWS = 16, 64
"""Rows of a slot, unless a tile has more."""


@dataclass(frozen=True)
class Slots:
    """The slots of one block of one query head."""

    cluster: Tensor
    """(slots,) int64: the query cluster of each"""
    rows: Tensor
    """(slots, rows) int64: queries, counted from the first of the block; a padded place has the number after all"""
    row_in_tile: Tensor
    """(slots, rows) uint8; `NO_ROW` at padded places"""
    tiles: Tensor
    """(slots, tiles of a slot) int64: the number of each tile in the block; -1 for none"""

    @classmethod
    def of(cls, assignment: Tensor, config: MuSeConfig, *, multiple_of: int) -> Slots:
        """Slots by the (n,) clusters of a block's queries, and empty slots up to a multiple of a number."""
        size, tile, queries = slot_rows(config), config.tile, assignment.shape[0]
        device = assignment.device
        order = assignment.sort(stable=True).indices
        members = torch.bincount(assignment, minlength=config.query_clusters)
        slots, tiles = -(-members // size), -(-members // tile)
        cluster = torch.repeat_interleave(torch.arange(members.shape[0], device=device), slots)
        rank = (torch.arange(cluster.shape[0], device=device) - (slots.cumsum(0) - slots)[cluster]) * size
        place = rank[:, None] + torch.arange(size, device=device)  # in the cluster
        exists = place < members[cluster, None]
        rows = order[((members.cumsum(0) - members)[cluster, None] + place).clamp_(max=queries - 1)]
        number = ((tiles.cumsum(0) - tiles)[cluster] + rank // tile)[:, None]
        number = number + torch.arange(size // tile, device=device)
        row_in_tile = torch.arange(size, device=device) % tile
        empty = -cluster.shape[0] % multiple_of

        def fill_up(table: Tensor, filling: int) -> Tensor:
            return torch.cat([table, table.new_full((empty, *table.shape[1:]), filling)])

        return cls(
            fill_up(cluster, 0),
            fill_up(torch.where(exists, rows, queries), queries),
            fill_up(torch.where(exists, row_in_tile, NO_ROW).byte(), NO_ROW),
            fill_up(torch.where(exists[:, ::tile], number, -1), -1),
        )

    def split(self, at_once: int) -> Iterator[tuple[slice, Slots]]:
        for begin in range(0, self.cluster.shape[0], at_once):
            batch = slice(begin, begin + at_once)
            yield batch, Slots(self.cluster[batch], self.rows[batch], self.row_in_tile[batch], self.tiles[batch])

    def runs(self) -> Iterator[tuple[int, slice]]:
        """Each query cluster that has slots, and where these are: they follow each other."""
        clusters, counts = torch.unique_consecutive(self.cluster, return_counts=True)
        begin = 0
        for cluster, count in zip(clusters.tolist(), counts.tolist(), strict=True):
            yield cluster, slice(begin, begin + count)
            begin += count


def first_to_reach(scores: Tensor, least: Tensor, row_in_tile: Tensor) -> Tensor:
    """(..., X) uint8: the first of a tile's rows whose (..., rows, X) score is `least` or more. Changes the scores."""
    # 1 or 0, times more for earlier rows. Floats take a fifth of the time of booleans and bytes.
    earliness = scores.ge_(least[..., None]).mul_(NO_ROW - row_in_tile[..., None])
    return (NO_ROW - earliness.amax(-2)).byte()


def slot_rows(config: MuSeConfig) -> int:
    """Rows of a slot: half of what a cluster has in a block on average, so that little is padding, or a whole tile."""
    half = max(1, config.block_size // (2 * config.query_clusters))
    return max(config.tile, min(MOST_ROWS, max(LEAST_ROWS, 1 << half.bit_length() - 1)))


def most_slots(config: MuSeConfig) -> int:
    """The most slots that the queries of a block can have."""
    return config.block_size // slot_rows(config) + min(config.query_clusters, config.block_size)
