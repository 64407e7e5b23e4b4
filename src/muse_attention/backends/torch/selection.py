"""Stage 4: open the same number of clusters for every query, and retrieve the same number of blocks of each.

Work goes segment by segment: the queries of one query cluster in one block read the same summaries, so their scores
are one matrix product, and what selection leaves is attended to by one softmax. They also open much the same clusters,
so the blocks of all clusters that any of them opens are scored for each: a matrix product of a few columns more,
instead of a gather for every query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.backends.torch.grouping import Groups, Tiles, neighbour_tiles
from muse_attention.core.exponential import exp_
from muse_attention.core.structures import Partial, Selection, Summaries


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

    def walk(self) -> Iterator[tuple[Tiles, _Segments, Tensor]]:
        """All segments that see any block, block after block: tiles of their queries, where these read, and their
        residuals, (T, m, D)."""
        heads, query_clusters, blocks, key_clusters = self.summaries.log_mass.shape
        of_block = heads * query_clusters
        for block in range(1 if self.is_causal else 0, blocks):
            begin = block * of_block
            for places, tile in neighbour_tiles(self.groups, begin, begin + of_block, 2 * key_clusters):
                where = _Segments(places, block, block if self.is_causal else blocks)
                yield tile, where, tile.gather(self.residuals)


def select_and_attend(scored: Scored, selection: Selection, partial: Partial, *, select: bool, attend: bool) -> None:
    """Fill in rows: if `select`, of `selection`; if `attend`, of `partial`.

    `partial` is attention to the summary terms that `selection` leaves. Tables to fill in have a spare last row.
    """
    for tile, where, residuals in scored.walk():
        clusters = where.clusters(scored.accumulated)
        cluster_logits = clusters.logits(residuals)  # (T, m, K)
        logits, values = [cluster_logits], [clusters.values]
        if selection.opened.shape[-1] > 0:
            if select:
                opened = _top(cluster_logits, selection.opened.shape[-1])
                tile.scatter(selection.opened, opened.int())
            else:
                opened = tile.gather(selection.opened).long()
            of_opened = _OpenedBlocks.of(where, opened, cluster_logits.shape[-1])
            blocks = of_opened.copy(scored.summaries)
            block_logits = blocks.logits(residuals)  # (T, m, seen U)
            logits.append(block_logits)
            values.append(blocks.values)
            if select:
                retrieved = of_opened.retrieve(block_logits, selection.retrieved.shape[-1])
                tile.scatter(selection.retrieved, retrieved.int())
            else:
                retrieved = tile.gather(selection.retrieved).long()
            _close_opened(cluster_logits, opened)
            of_opened.keep_only_terms(block_logits, retrieved)
        if attend:
            _attend_to_terms(tile, logits, values, partial)


def attend_backward(
    scored: Scored, selection: Selection, grad_out: Tensor, lse: Tensor, delta: Tensor, *, fill_in: Tensor
) -> tuple[Summaries, Summaries]:
    """Gradients of the summaries of buckets and of the accumulated ones; `fill_in`, (rows + 1, D): of the residuals.

    `lse` and `delta` are those of the merged softmax: `p = exp(s - lse)`, `ds = p (grad_out . value - delta)`.
    """
    grad_buckets, grad_accumulated = scored.summaries.zeros_like(), scored.accumulated.zeros_like()
    for tile, where, residuals in scored.walk():
        # Padding gets an infinite lse, and so no weight.
        tile_lse = torch.where(tile.valid, tile.gather(lse), torch.inf)[..., None]
        of_tile = (tile.gather(grad_out), tile_lse, tile.gather(delta)[..., None])
        clusters = where.clusters(scored.accumulated)
        logits = clusters.logits(residuals)
        opened = tile.gather(selection.opened).long()
        has_opened = opened.shape[-1] > 0
        if has_opened:
            _close_opened(logits, opened)
        to_residuals, gradient = clusters.differentiate(logits, residuals, *of_tile)
        where.clusters(grad_accumulated).add_(gradient)
        if has_opened:
            of_opened = _OpenedBlocks.of(where, opened, clusters.keys.shape[1])
            blocks = of_opened.copy(scored.summaries)
            logits = blocks.logits(residuals)
            of_opened.keep_only_terms(logits, tile.gather(selection.retrieved).long())
            of_blocks, gradient = blocks.differentiate(logits, residuals, *of_tile)
            of_opened.add_to(grad_buckets, gradient)
            to_residuals += of_blocks
        tile.scatter(fill_in, to_residuals)
    return grad_buckets, grad_accumulated


@dataclass(frozen=True)
class _Table:
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
    ) -> tuple[Tensor, _Table]:
        """Gradients of the residuals and of the table; `logits` are -inf where a column is no term, and overwritten."""
        weights = exp_(logits.sub_(lse).clamp_(max=0))
        d_logits = torch.bmm(grad_out, self.values.mT).sub_(delta).mul_(weights)
        gradient = _Table(d_logits.sum(1, keepdim=True), d_logits.mT @ residuals, weights.mT @ grad_out)
        return d_logits @ self.keys, gradient

    def add_(self, other: _Table) -> None:
        self.mass.add_(other.mass)
        self.keys.add_(other.keys)
        self.values.add_(other.values)


@dataclass(frozen=True)
class _Segments:
    """Some neighbouring segments of one block: where their summaries are."""

    places: slice
    """range of the axes (head, query cluster), flattened"""
    block: int
    seen: int
    """They read the blocks before this one, but not their own."""

    def clusters(self, accumulated: Summaries) -> _Table:
        """Views of the summaries accumulated over all the blocks they see. S = K."""
        mass, keys, values = (part.flatten(0, 1)[self.places, self.block] for part in accumulated.parts())
        return _Table(mass[:, None], keys, values)

    def blocks(self, summaries: Summaries) -> tuple[Tensor, ...]:
        """Views of the summaries of each block: (T, seen, K, ...)."""
        return tuple(part.flatten(0, 1)[self.places, : self.seen] for part in summaries.parts())


@dataclass(frozen=True)
class _OpenedBlocks:
    """The blocks of the `U` clusters that any query of a tile opens, in each block that it sees. S = seen U."""

    segments: _Segments
    index: tuple[Tensor, Tensor, Tensor]
    """(T, seen, U) of the axes (segment, block, key cluster)"""
    place: Tensor
    """(T, m, clusters): where among the U clusters are those that a query opened; -1 for none"""

    @classmethod
    def of(cls, where: _Segments, opened: Tensor, key_clusters: int) -> _OpenedBlocks:
        """`opened` is (T, m, clusters)."""
        device = opened.device
        used = torch.zeros(opened.shape[0], key_clusters + 1, dtype=torch.bool, device=device)
        used = used.scatter_(1, (opened + 1).flatten(1), True)[:, 1:]
        place = (used.cumsum(1) - 1).gather(1, opened.clamp(min=0).flatten(1)).view_as(opened)
        width = max(1, int(used.sum(1).max()))
        chosen = used.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
        segment = torch.arange(used.shape[0], device=device)[:, None, None]
        block = torch.arange(where.seen, device=device)[:, None]
        return cls(where, (segment, block, chosen[:, None]), torch.where(opened < 0, -1, place))

    @property
    def width(self) -> int:
        return self.index[2].shape[-1]

    def copy(self, summaries: Summaries) -> _Table:
        """Their summaries; those of the own block are empty."""
        mass, keys, values = (part[self.index] for part in self.segments.blocks(summaries))
        if self.segments.block < self.segments.seen:
            mass[:, self.segments.block] = -torch.inf
        return _Table(mass.flatten(1)[:, None], keys.flatten(1, 2), values.flatten(1, 2))

    def add_to(self, summaries: Summaries, gradient: _Table) -> None:
        """Add the gradients of the copy to those of what was copied."""
        parts = (gradient.mass[:, 0], gradient.keys, gradient.values)
        for table, rows in zip(self.segments.blocks(summaries), parts, strict=True):
            table[self.index] += rows.unflatten(1, (table.shape[1], -1))

    def retrieve(self, logits: Tensor, blocks: int) -> Tensor:
        """(T, m, clusters, blocks): the blocks to retrieve from each opened cluster."""
        logits = logits.unflatten(-1, (-1, self.width))  # (T, m, seen, U)
        columns = self.place.clamp(min=0)[..., None, :].expand(-1, -1, logits.shape[2], -1)
        return torch.where(self.place[..., None] < 0, -1, _top(logits.gather(-1, columns).mT, blocks))

    def keep_only_terms(self, logits: Tensor, retrieved: Tensor) -> None:
        """Set to -inf, in place, blocks that were retrieved and blocks of clusters the query did not open."""
        width = self.width
        place = _repeat_first(self.place)
        closed = logits.new_full((*logits.shape[:2], width), -torch.inf).scatter_(-1, place, 0)
        logits.unflatten(-1, (-1, width)).add_(closed[:, :, None])
        term = torch.where(retrieved < 0, -1, retrieved * width + place[..., None]).flatten(2)
        logits.scatter_(-1, _repeat_first(term), -torch.inf)


def _attend_to_terms(tile: Tiles, logits: Sequence[Tensor], values: Sequence[Tensor], partial: Partial) -> None:
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


def _close_opened(cluster_logits: Tensor, opened: Tensor) -> None:
    """Set to -inf, in place, the clusters that were opened."""
    cluster_logits.scatter_(-1, _repeat_first(opened), -torch.inf)


def _repeat_first(chosen: Tensor) -> Tensor:
    """Places without a choice (-1) repeat the first one. Where there is no first one, nothing exists to be chosen."""
    return torch.where(chosen < 0, chosen[..., :1], chosen).clamp(min=0)


def _top(logits: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last axis; -1 for absent terms, whose logit is -inf."""
    available = min(count, logits.shape[-1])
    top = logits.max(-1, keepdim=True) if available == 1 else logits.topk(available, dim=-1)
    indices = torch.where(top[0] == -torch.inf, -1, top[1])
    return torch.nn.functional.pad(indices, (0, count - available), value=-1)
