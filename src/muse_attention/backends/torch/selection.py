"""Stage 4: open the same number of clusters for every query, and retrieve the same number of blocks of each.

Work goes segment by segment: the queries of one query cluster in one block read the same summaries, so their scores
are one matrix product. They also open much the same clusters, so the blocks of all clusters that any of them opens are
scored for each: a matrix product of a few columns more, instead of a gather for every query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.backends.torch.segments import Scored, Segments, Table, attend_to_terms
from muse_attention.core.structures import Partial, Selection, Summaries


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
            attend_to_terms(tile, logits, values, partial)


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
class _OpenedBlocks:
    """The blocks of the `U` clusters that any query of a tile opens, in each block that it sees. S = seen U."""

    segments: Segments
    index: tuple[Tensor, Tensor, Tensor]
    """(T, seen, U) of the axes (segment, block, key cluster)"""
    place: Tensor
    """(T, m, clusters): where among the U clusters are those that a query opened; -1 for none"""

    @classmethod
    def of(cls, where: Segments, opened: Tensor, key_clusters: int) -> _OpenedBlocks:
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

    def copy(self, summaries: Summaries) -> Table:
        """Their summaries; those of the own block are empty."""
        mass, keys, values = (part[self.index] for part in self.segments.blocks(summaries))
        if self.segments.block < self.segments.seen:
            mass[:, self.segments.block] = -torch.inf
        return Table(mass.flatten(1)[:, None], keys.flatten(1, 2), values.flatten(1, 2))

    def add_to(self, summaries: Summaries, gradient: Table) -> None:
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
