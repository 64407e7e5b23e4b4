"""Ragged groups of rows as batches of padded tiles: how every far-field stage becomes a batched matrix product.

Buckets of keys, segments of queries and the queries of a bucket are all groups of very different sizes. A stage walks
over tiles: pieces of groups, of similar size, padded to the longest among them, and few enough to stay in cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORKSPACE_ELEMENTS = 1 << 26
"""Numbers in the intermediate results held at a time: heads go in groups that need about as many."""
TILE_ELEMENTS = 1 << 21
"""Numbers in the largest intermediate of one batch of tiles."""
LEAST_FILLING = 0.5
"""A batch of tiles ends where less than this share of the next tile's rows would be filled."""
LEAST_FILLING_OF_NEIGHBOURS = 0.3
"""The same for neighbours, which cannot be sorted by size: another batch would cost more than the padding."""


@dataclass(frozen=True)
class Groups:
    """The rows of a table, sorted by the group they belong to."""

    order: Tensor
    """(grouped rows,) int64: row numbers, group after group, ascending inside each"""
    starts: Tensor
    """(groups,) int64: where each group begins in `order`"""
    sizes: Tensor
    """(groups,) int64"""


@dataclass(frozen=True)
class Tiles:
    """A batch of `T` tiles of `m` rows."""

    group: Tensor
    """(T,) int64: the group each tile is a piece of"""
    rows: Tensor
    """(T, m) int64: row numbers; a padded place repeats the tile's last row"""
    valid: Tensor
    """(T, m) bool: False at padded places"""

    def gather(self, table: Tensor) -> Tensor:
        """(T, m, ...): the rows of `table`."""
        return take_rows(table, self.rows)

    def scatter(self, table: Tensor, rows: Tensor) -> None:
        """Write (T, m, ...) `rows` into `table`, whose last row takes the padding."""
        table[torch.where(self.valid, self.rows, table.shape[0] - 1)] = rows

    def add(self, table: Tensor, rows: Tensor) -> None:
        """Add (T, m, ...) `rows` to those of `table`, whose last row takes the padding."""
        places = torch.where(self.valid, self.rows, table.shape[0] - 1)
        table.index_add_(0, places.flatten(), rows.flatten(0, 1))


def head_groups(heads: int, elements_per_head: int) -> list[slice]:
    """Consecutive heads, as many at a time as the workspace has room for."""
    size = max(1, min(heads, WORKSPACE_ELEMENTS // elements_per_head))
    return [slice(begin, begin + size) for begin in range(0, heads, size)]


def join(parts: Sequence[Tensor]) -> Tensor:
    """`torch.cat`, without the copy it makes of a single contiguous part."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))


def with_padding(table: Tensor, value: float = 0) -> Tensor:
    """The table with one more row, of this number: what padding reads."""
    return torch.cat([table, torch.full_like(table[:1], value)])


def take_rows(table: Tensor, rows: Tensor) -> Tensor:
    """`table[rows]`, by the operator that is twice as fast for it."""
    return table.index_select(0, rows.flatten()).view(*rows.shape, *table.shape[1:])


def transposed(table: Tensor) -> Tensor:
    """`table.mT` as a copy: some libraries multiply by a transposed matrix at a fraction of the speed."""
    return table.mT.contiguous()


def group_rows(group_of_row: Tensor, number_of_groups: int) -> Groups:
    """Sort rows by group; rows of group -1 are left out."""
    sizes = torch.bincount(group_of_row + 1, minlength=number_of_groups + 1)
    order = torch.sort(group_of_row, stable=True).indices[int(sizes[0]) :]
    sizes = sizes[1:]
    return Groups(order, sizes.cumsum(0) - sizes, sizes)


def tiles(
    groups: Groups, elements_per_row: int, *, among: Tensor | None = None, most_rows: int | None = None
) -> Iterator[Tiles]:
    """Walk over the groups (or those numbered in `among`) in tiles of at most `most_rows` rows, longest first."""
    device = groups.order.device
    number = torch.arange(groups.sizes.shape[0], device=device) if among is None else among
    sizes, starts = groups.sizes[number], groups.starts[number]
    if most_rows is not None:
        pieces = -(-sizes // most_rows)
        first_piece = torch.repeat_interleave(pieces.cumsum(0) - pieces, pieces)
        skipped = (torch.arange(first_piece.shape[0], device=device) - first_piece) * most_rows
        number = torch.repeat_interleave(number, pieces)
        sizes = (torch.repeat_interleave(sizes, pieces) - skipped).clamp(max=most_rows)
        starts = torch.repeat_interleave(starts, pieces) + skipped
    sizes, by_size = torch.sort(sizes, descending=True, stable=True)
    number, starts = number[by_size], starts[by_size]
    lengths: list[int] = sizes.tolist()
    begin = 0
    while begin < len(lengths) and lengths[begin] > 0:
        longest = lengths[begin]
        end = begin + 1
        limit = min(len(lengths), begin + max(1, TILE_ELEMENTS // (longest * elements_per_row)))
        while end < limit and lengths[end] >= LEAST_FILLING * longest:
            end += 1
        place = torch.arange(longest, device=device)
        size = sizes[begin:end, None]
        rows = take_rows(groups.order, starts[begin:end, None] + torch.minimum(place, size - 1))
        yield Tiles(number[begin:end], rows, place < size)
        begin = end


def neighbour_tiles(groups: Groups, begin: int, end: int, elements_per_row: int) -> Iterator[tuple[slice, Tiles]]:
    """Walk over the groups `begin` to `end` in order, some neighbours at a time, with their range counted from `begin`.

    Tables with one entry for each group can then be read and written as slices, without a copy. A group too large for
    one batch comes in several.
    """
    sizes: list[int] = groups.sizes[begin:end].tolist()
    first = 0
    while first < len(sizes):
        longest, rows, stop = sizes[first], sizes[first], first + 1
        while stop < len(sizes):
            number, longer = stop - first + 1, max(longest, sizes[stop])
            if (
                number * longer * elements_per_row > TILE_ELEMENTS
                or rows + sizes[stop] < LEAST_FILLING_OF_NEIGHBOURS * number * longer
            ):
                break
            longest, rows, stop = longer, rows + sizes[stop], stop + 1
        neighbours = torch.arange(begin + first, begin + stop, device=groups.order.device)
        starts, lengths = groups.starts[neighbours, None], groups.sizes[neighbours, None]
        at_once = longest if stop > first + 1 else max(1, TILE_ELEMENTS // elements_per_row)
        for skipped in range(0, longest, max(1, at_once)):
            place = torch.arange(skipped, min(longest, skipped + at_once), device=groups.order.device)
            at = (starts + torch.minimum(place, lengths - 1)).clamp_(0, groups.order.shape[0] - 1)
            yield slice(first, stop), Tiles(neighbours, take_rows(groups.order, at), place < lengths)
        first = stop
