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
    for tile, clusters, blocks in _read(segments, summaries, accumulated, is_causal=is_causal):
        tile_residuals = tile.gather(residuals)
        logits = [clusters.logits(tile_residuals)]
        values = [clusters.values]
        if selection.opened.shape[-1] > 0:
            if select:
                opened = _top(logits[0], selection.opened.shape[-1])
                tile.scatter(selection.opened, opened.int())
            else:
                opened = tile.gather(selection.opened).long()
            some_blocks = blocks.of_opened(opened)
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
        total = sum(part.sum(-1, keepdim=True) for part in weights)
        weighted = sum(part @ of_part for part, of_part in zip(weights, values, strict=True))
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
    grad_summaries, grad_accumulated = _zeros_like(summaries), _zeros_like(accumulated)
    readings = _read(segments, summaries, accumulated, is_causal=is_causal)
    targets = _read(segments, grad_summaries, grad_accumulated, is_causal=is_causal, hide_own=False)
    for (tile, clusters, blocks), (_, grad_clusters, grad_blocks) in zip(readings, targets, strict=True):
        tile_residuals, tile_grad_out = tile.gather(residuals), tile.gather(grad_out)
        # Padding gets an infinite lse, and so no weight.
        tile_lse = torch.where(tile.valid, tile.gather(lse), torch.inf)[..., None]
        tile_delta = tile.gather(delta)[..., None]

        def differentiate(table: _Table, logits: Tensor) -> tuple[Tensor, _Table]:
            """Gradients of the residuals and of the table, whose columns hold `logits` or -inf."""
            weights = exp_(logits.sub_(tile_lse).clamp_(max=0))  # noqa: B023
            d_logits = torch.bmm(tile_grad_out, table.values.mT).sub_(tile_delta).mul_(weights)  # noqa: B023
            gradient = _Table(
                d_logits.sum(1, keepdim=True),
                d_logits.mT @ tile_residuals,  # noqa: B023
                weights.mT @ tile_grad_out,  # noqa: B023
            )
            return d_logits @ table.keys, gradient

        logits = clusters.logits(tile_residuals)
        if selection.opened.shape[-1] > 0:
            opened = tile.gather(selection.opened).long()
            _close_opened(logits, opened)
        grad_tile_residuals, gradient = differentiate(clusters, logits)
        grad_clusters.add_(gradient)
        if selection.opened.shape[-1] > 0:
            some_blocks = blocks.of_opened(opened)
            logits = some_blocks.table.logits(tile_residuals)
            some_blocks.keep_only_terms(logits, tile.gather(selection.retrieved).long())
            to_residuals, gradient = differentiate(some_blocks.table, logits)
            grad_tile_residuals += to_residuals
            grad_blocks.add_at_(some_blocks, gradient)
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

    def add_(self, other: _Table) -> None:
        self.mass.add_(other.mass)
        self.keys.add_(other.keys)
        self.values.add_(other.values)


@dataclass(frozen=True)
class _Blocks:
    """Views of the summaries, or of their gradients, of each block that `T` neighbouring segments see."""

    mass: Tensor
    """(T, seen, K)"""
    keys: Tensor
    """(T, seen, K, D)"""
    values: Tensor
    """(T, seen, K, Dv)"""

    def of_opened(self, opened: Tensor) -> _OpenedBlocks:
        """A copy of what belongs to the clusters that any query of a tile opens; `opened` is (T, m, clusters)."""
        tiles, seen, key_clusters = self.mass.shape
        used = torch.zeros(tiles, key_clusters + 1, dtype=torch.bool, device=opened.device)
        used = used.scatter_(1, (opened + 1).flatten(1), True)[:, 1:]
        width = max(1, int(used.sum(1).max()))
        columns = used.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
        place = (used.cumsum(1) - 1).gather(1, opened.clamp(min=0).flatten(1)).view_as(opened)
        index = (
            torch.arange(tiles, device=opened.device)[:, None, None],
            torch.arange(seen, device=opened.device)[:, None],
            columns[:, None],
        )
        table = _Table(
            self.mass[index].flatten(1)[:, None], self.keys[index].flatten(1, 2), self.values[index].flatten(1, 2)
        )
        return _OpenedBlocks(table, index, torch.where(opened < 0, -1, place))

    def add_at_(self, some: _OpenedBlocks, gradient: _Table) -> None:
        """Add the gradients of the copy that `of_opened` made."""
        self.mass[some.index] += gradient.mass[:, 0].view_as(self.mass[some.index])
        self.keys[some.index] += gradient.keys.unflatten(1, (self.mass.shape[1], -1))
        self.values[some.index] += gradient.values.unflatten(1, (self.mass.shape[1], -1))


@dataclass(frozen=True)
class _OpenedBlocks:
    """The summaries of each seen block, of the `U` clusters that any query of a tile opens. S = seen U."""

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


def _read(
    segments: Groups, summaries: Summaries, accumulated: Summaries, *, is_causal: bool, hide_own: bool = True
) -> Iterator[tuple[Tiles, _Table, _Blocks]]:
    """All segments that see any block, block after block: tiles of their queries, and views of what these read.

    That is a table with one summary for each key cluster, and the summaries of each block. `hide_own` gives a query's
    own block the mass 0 there; views to write to have to do without.
    """
    heads, query_clusters, blocks, key_clusters = summaries.log_mass.shape
    of_block = heads * query_clusters
    flat, flat_accumulated = ([part.flatten(0, 1) for part in _parts(some)] for some in (summaries, accumulated))
    for block in range(1 if is_causal else 0, blocks):
        seen = block if is_causal else blocks
        begin = block * of_block
        for some, tile in neighbour_tiles(segments, begin, begin + of_block, 2 * key_clusters):
            cluster_mass, *cluster_means = (part[some, block] for part in flat_accumulated)
            block_mass, *block_means = (part[some, :seen] for part in flat)
            if not is_causal and hide_own:
                block_mass = block_mass.index_fill(1, torch.tensor(block, device=block_mass.device), -torch.inf)
            yield tile, _Table(cluster_mass[:, None], *cluster_means), _Blocks(block_mass, *block_means)


def _top(logits: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last axis; -1 for absent terms, whose logit is -inf."""
    available = min(count, logits.shape[-1])
    top = logits.max(-1, keepdim=True) if available == 1 else logits.topk(available, dim=-1)
    indices = torch.where(top[0] == -torch.inf, -1, top[1])
    return torch.nn.functional.pad(indices, (0, count - available), value=-1)


def _parts(summaries: Summaries) -> tuple[Tensor, Tensor, Tensor]:
    return summaries.log_mass, summaries.key_mean, summaries.value_mean


def _zeros_like(summaries: Summaries) -> Summaries:
    return Summaries(*(torch.zeros_like(part) for part in _parts(summaries)))
