"""What the queries of a segment read: tables of summaries, scored by one matrix product.

The queries of one query cluster in one block read the same summaries. Selection walks over tiles of such queries, and
what it leaves is attended to by one softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.backends.torch.grouping import Groups, Tiles, neighbour_tiles
from muse_attention.core.exponential import exp_
from muse_attention.core.structures import Partial, Summaries


@dataclass(frozen=True)
class Table:
    """`S` summaries that each of `T` segments reads, or their gradients."""

    mass: Tensor
    """(T, 1, S)"""
    keys: Tensor
    """(T, S, D)"""
    values: Tensor
    """(T, S, Dv)"""

    def logits(self, residuals: Tensor) -> Tensor:
        """(T, m, S): `r . kbar + mu`"""
        return torch.baddbmm(self.mass, residuals, self.keys.mT)

    def differentiate(
        self, logits: Tensor, residuals: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Table]:
        """Gradients of the residuals and of the table; `logits` are -inf where a column is no term, and used up."""
        weights = exp_(logits.sub_(lse).clamp_(max=0))
        d_logits = torch.bmm(grad_out, self.values.mT).sub_(delta).mul_(weights)
        gradient = Table(d_logits.sum(1, keepdim=True), d_logits.mT @ residuals, weights.mT @ grad_out)
        return d_logits @ self.keys, gradient


@dataclass(frozen=True)
class Segments:
    """Some neighbouring segments of one block: where their summaries are."""

    some: slice
    """of the axes (head, query cluster), flattened"""
    block: int
    seen: int
    """They read the blocks before this one, but not their own."""

    def clusters(self, accumulated: Summaries) -> Table:
        """Views of the summaries accumulated over all the blocks they see. S = K."""
        mass, keys, values = (part.flatten(0, 1)[self.some, self.block] for part in accumulated.parts())
        return Table(mass[:, None], keys, values)

    def blocks(self, summaries: Summaries) -> tuple[Tensor, ...]:
        """Views of the summaries of each block: (T, seen, K, ...)."""
        return tuple(self._of_blocks(part) for part in summaries.parts())

    def columns(self, used: Tensor) -> Columns:
        """Those of the key clusters that any query of a tile uses: `used` is (T, K) bool."""
        width = max(1, int(used.sum(1).max()))
        chosen = used.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
        segment = torch.arange(used.shape[0], device=used.device)[:, None, None]
        block = torch.arange(self.seen, device=used.device)[:, None]
        return Columns(self, (segment, block, chosen[:, None]))

    def _of_blocks(self, table: Tensor) -> Tensor:
        return table.flatten(0, 1)[self.some, : self.seen]


@dataclass(frozen=True)
class Columns:
    """`U` key clusters of each segment, in each block it sees. S = seen U."""

    segments: Segments
    index: tuple[Tensor, Tensor, Tensor]
    """(T, seen, U) of the axes (segment, block, key cluster)"""

    @property
    def width(self) -> int:
        return self.index[2].shape[-1]

    def copy(self, summaries: Summaries) -> Table:
        """Their summaries; those of the own block are empty."""
        mass, keys, values = (part[self.index] for part in self.segments.blocks(summaries))
        if self.segments.block < self.segments.seen:
            mass[:, self.segments.block] = -torch.inf
        return Table(mass.flatten(1)[:, None], keys.flatten(1, 2), values.flatten(1, 2))

    def add_to(self, blocks: tuple[Tensor, ...], gradient: Table) -> None:
        """Add the gradients of the copy to those of what was copied."""
        for table, rows in zip(blocks, (gradient.mass[:, 0], gradient.keys, gradient.values), strict=True):
            table[self.index] += rows.unflatten(1, (table.shape[1], -1))


@dataclass(frozen=True)
class Scored:
    """Queries, and the summaries they are scored against."""

    residuals: Tensor
    """(rows, D), of the queries of all heads"""
    groups: Groups
    """rows by (block, head, query cluster)"""
    summaries: Summaries
    accumulated: Summaries

    def clusters(self, tile: Tiles, where: Segments) -> tuple[Table, Tensor]:
        """The summaries of all that a tile sees of each key cluster, and their logits, (T, m, K)."""
        table = where.clusters(self.accumulated)
        return table, table.logits(tile.gather(self.residuals))

    def blocks(self, tile: Tiles, columns: Columns) -> tuple[Table, Tensor]:
        """The same for some key clusters in each block: logits are (T, m, seen U)."""
        table = columns.copy(self.summaries)
        return table, table.logits(tile.gather(self.residuals))

    def walk(self, *, is_causal: bool) -> Iterator[tuple[Tiles, Segments]]:
        """All segments that see any block, block after block: tiles of their queries, and where these read."""
        heads, query_clusters, blocks, key_clusters = self.summaries.log_mass.shape
        of_block = heads * query_clusters
        for block in range(1 if is_causal else 0, blocks):
            begin = block * of_block
            for some, tile in neighbour_tiles(self.groups, begin, begin + of_block, 2 * key_clusters):
                yield tile, Segments(some, block, block if is_causal else blocks)


class Gradients:
    """Of the summaries, while a backward pass walks over the tiles that read them.

    `lse` and `delta` are those of the merged softmax: `p = exp(s - lse)`, `ds = p (grad_out . value - delta)`.
    """

    def __init__(self, scored: Scored, grad_out: Tensor, lse: Tensor, delta: Tensor) -> None:
        self.of_buckets, self.accumulated = scored.summaries.zeros_like(), scored.accumulated.zeros_like()
        self._scored, self._grad_out, self._lse, self._delta = scored, grad_out, lse, delta

    def add_clusters(self, tile: Tiles, where: Segments, table: Table, logits: Tensor) -> Tensor:
        """Add what a tile gives to the accumulated summaries; returns what it gives to its residuals, (T, m, D)."""
        to_residuals, gradient = table.differentiate(logits, *self._of(tile))
        of_table = where.clusters(self.accumulated)
        for target, source in zip(vars(of_table).values(), vars(gradient).values(), strict=True):
            target += source
        return to_residuals

    def add_blocks(self, tile: Tiles, columns: Columns, table: Table, logits: Tensor) -> Tensor:
        """The same for the summaries of blocks."""
        to_residuals, gradient = table.differentiate(logits, *self._of(tile))
        columns.add_to(columns.segments.blocks(self.of_buckets), gradient)
        return to_residuals

    def _of(self, tile: Tiles) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Padding gets an infinite lse, and so no weight.
        lse = torch.where(tile.valid, tile.gather(self._lse), torch.inf)[..., None]
        return (
            tile.gather(self._scored.residuals),
            tile.gather(self._grad_out),
            lse,
            tile.gather(self._delta)[..., None],
        )


def attend_to_terms(tile: Tiles, logits: Sequence[Tensor], values: Sequence[Tensor], partial: Partial) -> None:
    """Fill in the rows of a tile by one softmax over all columns; `logits` are -inf for no term, and used up."""
    shift = torch.stack([part.amax(-1) for part in logits]).amax(0)[..., None]
    shift = torch.where(shift == -torch.inf, 0, shift)
    weights = [exp_(part.sub_(shift)) for part in logits]
    total = torch.stack([part.sum(-1, keepdim=True) for part in weights]).sum(0)
    weighted = torch.zeros_like(total)
    for part, of_part in zip(weights, values, strict=True):
        weighted = weighted + part @ of_part
    tile.scatter(partial.out, weighted / torch.where(total == 0, 1, total))
    tile.scatter(partial.lse, (total.log() + shift)[..., 0])
