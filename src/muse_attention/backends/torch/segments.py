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
        """Gradients of the residuals and of the table; `logits` are -inf where a column is no term, and overwritten."""
        weights = exp_(logits.sub_(lse).clamp_(max=0))
        d_logits = torch.bmm(grad_out, self.values.mT).sub_(delta).mul_(weights)
        gradient = Table(d_logits.sum(1, keepdim=True), d_logits.mT @ residuals, weights.mT @ grad_out)
        return d_logits @ self.keys, gradient

    def add_(self, other: Table) -> None:
        self.mass.add_(other.mass)
        self.keys.add_(other.keys)
        self.values.add_(other.values)


@dataclass(frozen=True)
class Segments:
    """Some neighbouring segments of one block: where their summaries are."""

    places: slice
    """range of the axes (head, query cluster), flattened"""
    block: int
    seen: int
    """They read the blocks before this one, but not their own."""

    def clusters(self, accumulated: Summaries) -> Table:
        """Views of the summaries accumulated over all the blocks they see. S = K."""
        mass, keys, values = (part.flatten(0, 1)[self.places, self.block] for part in accumulated.parts())
        return Table(mass[:, None], keys, values)

    def blocks(self, summaries: Summaries) -> tuple[Tensor, ...]:
        """Views of the summaries of each block: (T, seen, K, ...)."""
        return tuple(part.flatten(0, 1)[self.places, : self.seen] for part in summaries.parts())


@dataclass(frozen=True)
class Scored:
    """Queries, and the summaries they are scored against."""

    residuals: Tensor
    """(rows, D), of the queries of all heads"""
    groups: Groups
    """rows by (block, head, query cluster)"""
    summaries: Summaries
    accumulated: Summaries
    is_causal: bool

    def walk(self) -> Iterator[tuple[Tiles, Segments, Tensor]]:
        """All segments that see any block, block after block: tiles of their queries, where these read, and their
        residuals, (T, m, D)."""
        heads, query_clusters, blocks, key_clusters = self.summaries.log_mass.shape
        of_block = heads * query_clusters
        for block in range(1 if self.is_causal else 0, blocks):
            begin = block * of_block
            for places, tile in neighbour_tiles(self.groups, begin, begin + of_block, 2 * key_clusters):
                where = Segments(places, block, block if self.is_causal else blocks)
                yield tile, where, tile.gather(self.residuals)


def attend_to_terms(tile: Tiles, logits: Sequence[Tensor], values: Sequence[Tensor], partial: Partial) -> None:
    """Fill in the rows of a tile by one softmax over all columns; `logits` are -inf for no term, and overwritten."""
    shift = torch.stack([part.amax(-1) for part in logits]).amax(0)[..., None]
    shift = torch.where(shift == -torch.inf, 0, shift)
    weights = [exp_(part.sub_(shift)) for part in logits]
    total = torch.stack([part.sum(-1, keepdim=True) for part in weights]).sum(0)
    weighted = torch.zeros_like(total)
    for part, of_part in zip(weights, values, strict=True):
        weighted = weighted + part @ of_part
    tile.scatter(partial.out, weighted / torch.where(total == 0, 1, total))
    tile.scatter(partial.lse, (total.log() + shift)[..., 0])
