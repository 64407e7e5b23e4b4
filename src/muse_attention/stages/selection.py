"""Stage 4: score the summaries, select what to retrieve, and attend to the summaries of all the rest.

Work goes segment by segment: the queries of one query cluster in one block read the same summaries, so their scores
are one matrix product. They also open much the same clusters, so the blocks of all clusters that any of them opens are
scored for each: a matrix product of a few columns more, instead of a gather for every query.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.stages.exponential import exp_
from muse_attention.stages.grouping import Groups, Tiles, neighbour_tiles
from muse_attention.structures import Partial, Selection, Summaries


def select_and_attend(
    residuals: Tensor,
    segments: Groups,
    summaries: Summaries,
    accumulated: Summaries,
    selection: Selection,
    partial: Partial,
    *,
    is_causal: bool,
    select: bool,
    attend: bool,
) -> None:
    """Fill in the rows of `segments`: if `select`, of `selection`; if `attend`, of `partial`.

    `residuals` is (rows, D), the queries of all heads; `segments` groups them by (block, head, query cluster).
    `partial` is attention to the summary terms that `selection` leaves. What is filled in has a spare last row.
    """
    for tile, where in _walk(segments, summaries, is_causal=is_causal):
        clusters = where.clusters(accumulated)
        tile_residuals = tile.gather(residuals)
        logits = [clusters.logits(tile_residuals)]
        values = [clusters.values]
        if selection.opened.shape[-1] > 0:
            if select:
                opened = _top(logits[0], selection.opened.shape[-1])
                tile.scatter(selection.opened, opened.int())
            else:
                opened = tile.gather(selection.opened).long()
            some_blocks = where.of_opened(summaries, opened)
            logits.append(some_blocks.table.logits(tile_residuals))
            values.append(some_blocks.table.values)
            if select:
                retrieved = some_blocks.retrieve(logits[1], selection.retrieved.shape[-1])
                tile.scatter(selection.retrieved, retrieved.int())
            else:
                retrieved = tile.gather(selection.retrieved).long()
            _close_opened(logits[0], opened)
            some_blocks.keep_only_terms(logits[1], retrieved)
        if not attend:
            continue
        shift = torch.stack([part.amax(-1) for part in logits]).amax(0)[..., None]
        shift = torch.where(shift == -torch.inf, 0, shift)
        weights = [exp_(part.sub_(shift)) for part in logits]
        total = torch.stack([part.sum(-1, keepdim=True) for part in weights]).sum(0)
        weighted = torch.zeros_like(total)
        for part, of_part in zip(weights, values, strict=True):
            weighted = weighted + part @ of_part
        tile.scatter(partial.out, weighted / torch.where(total == 0, 1, total))
        tile.scatter(partial.lse, (total.log() + shift)[..., 0])


def attend_backward(
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    residuals: Tensor,
    segments: Groups,
    summaries: Summaries,
    accumulated: Summaries,
    selection: Selection,
    *,
    is_causal: bool,
    fill_in: Tensor,
) -> tuple[Summaries, Summaries]:
    """Gradients of the summaries and the accumulated ones; those of the residuals go to `fill_in`, (rows + 1, D).

    `lse` and `delta` are those of the merged softmax: `p = exp(s - lse)`, `ds = p (grad_out . value - delta)`.
    """
    grad_summaries, grad_accumulated = summaries.zeros_like(), accumulated.zeros_like()
    for tile, where in _walk(segments, summaries, is_causal=is_causal):
        clusters = where.clusters(accumulated)
        tile_residuals = tile.gather(residuals)
        # Padding gets an infinite lse, and so no weight.
        tile_lse = torch.where(tile.valid, tile.gather(lse), torch.inf)[..., None]
        shared = (tile_residuals, tile.gather(grad_out), tile_lse, tile.gather(delta)[..., None])
        logits = clusters.logits(tile_residuals)
        if selection.opened.shape[-1] > 0:
            opened = tile.gather(selection.opened).long()
            _close_opened(logits, opened)
        grad_tile_residuals, gradient = clusters.differentiate(logits, *shared)
        for target, source in zip(
            vars(where.clusters(grad_accumulated)).values(), vars(gradient).values(), strict=True
        ):
            target += source
        if selection.opened.shape[-1] > 0:
            some_blocks = where.of_opened(summaries, opened)
            logits = some_blocks.table.logits(tile_residuals)
            some_blocks.keep_only_terms(logits, tile.gather(selection.retrieved).long())
            to_residuals, gradient = some_blocks.table.differentiate(logits, *shared)
            grad_tile_residuals += to_residuals
            some_blocks.add_to(where.blocks(grad_summaries), gradient)
        tile.scatter(fill_in, grad_tile_residuals)
    return grad_summaries, grad_accumulated


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
        """Gradients of the residuals and of the table; `logits` are -inf where a column is no term, and used up."""
        weights = exp_(logits.sub_(lse).clamp_(max=0))
        d_logits = torch.bmm(grad_out, self.values.mT).sub_(delta).mul_(weights)
        gradient = _Table(d_logits.sum(1, keepdim=True), d_logits.mT @ residuals, weights.mT @ grad_out)
        return d_logits @ self.keys, gradient


@dataclass(frozen=True)
class _Segments:
    """Some neighbouring segments of one block: where their summaries are."""

    some: slice
    """of the axes (head, query cluster), flattened"""
    block: int
    seen: int
    """They read the blocks before this one, but not their own."""

    def clusters(self, accumulated: Summaries) -> _Table:
        """Views of the summaries accumulated over all the blocks they see. S = K."""
        mass, keys, values = (part.flatten(0, 1)[self.some, self.block] for part in accumulated.parts())
        return _Table(mass[:, None], keys, values)

    def blocks(self, summaries: Summaries) -> tuple[Tensor, ...]:
        """Views of the summaries of each block: (T, seen, K, ...)."""
        return tuple(part.flatten(0, 1)[self.some, : self.seen] for part in summaries.parts())

    def of_opened(self, summaries: Summaries, opened: Tensor) -> _OpenedBlocks:
        """What belongs to the clusters that any query of a tile opens; `opened` is (T, m, clusters)."""
        mass, keys, values = self.blocks(summaries)
        segments, seen, key_clusters = mass.shape
        used = torch.zeros(segments, key_clusters + 1, dtype=torch.bool, device=opened.device)
        used = used.scatter_(1, (opened + 1).flatten(1), True)[:, 1:]
        width = max(1, int(used.sum(1).max()))
        columns = used.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
        place = (used.cumsum(1) - 1).gather(1, opened.clamp(min=0).flatten(1)).view_as(opened)
        index = (
            torch.arange(segments, device=opened.device)[:, None, None],
            torch.arange(seen, device=opened.device)[:, None],
            columns[:, None],
        )
        mass = mass[index]
        if self.block < seen:
            mass[:, self.block] = -torch.inf
        table = _Table(mass.flatten(1)[:, None], keys[index].flatten(1, 2), values[index].flatten(1, 2))
        return _OpenedBlocks(table, index, torch.where(opened < 0, -1, place))


@dataclass(frozen=True)
class _OpenedBlocks:
    """A copy of the summaries of each seen block, of the `U` clusters that any query of a tile opens. S = seen U."""

    table: _Table
    index: tuple[Tensor, Tensor, Tensor]
    """where it was copied from: (T, seen, U) of the axes (segment, block, key cluster)"""
    place: Tensor
    """(T, m, clusters): where among the U clusters are those that a query opened; -1 for none"""

    def retrieve(self, logits: Tensor, blocks: int) -> Tensor:
        """(T, m, clusters, blocks): the blocks to retrieve from each opened cluster."""
        logits = logits.unflatten(-1, (self.index[1].shape[0], -1))  # (T, m, seen, U)
        columns = self.place.clamp(min=0)[..., None, :].expand(-1, -1, logits.shape[2], -1)
        return torch.where(self.place[..., None] < 0, -1, _top(logits.gather(-1, columns).mT, blocks))

    def add_to(self, blocks: tuple[Tensor, ...], gradient: _Table) -> None:
        """Add the gradients of the copy to those of what was copied."""
        for table, rows in zip(blocks, (gradient.mass[:, 0], gradient.keys, gradient.values), strict=True):
            table[self.index] += rows.unflatten(1, (table.shape[1], -1))

    def keep_only_terms(self, logits: Tensor, retrieved: Tensor) -> None:
        """Set to -inf, in place, blocks that were retrieved and blocks of clusters the query did not open."""
        width = self.index[2].shape[-1]
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


def _walk(segments: Groups, summaries: Summaries, *, is_causal: bool) -> Iterator[tuple[Tiles, _Segments]]:
    """All segments that see any block, block after block: tiles of their queries, and where these read."""
    heads, query_clusters, blocks, key_clusters = summaries.log_mass.shape
    of_block = heads * query_clusters
    for block in range(1 if is_causal else 0, blocks):
        begin = block * of_block
        for some, tile in neighbour_tiles(segments, begin, begin + of_block, 2 * key_clusters):
            yield tile, _Segments(some, block, block if is_causal else blocks)


def _top(logits: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last axis; -1 for absent terms, whose logit is -inf."""
    available = min(count, logits.shape[-1])
    top = logits.max(-1, keepdim=True) if available == 1 else logits.topk(available, dim=-1)
    indices = torch.where(top[0] == -torch.inf, -1, top[1])
    return torch.nn.functional.pad(indices, (0, count - available), value=-1)
