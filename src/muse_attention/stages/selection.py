"""Stage 4: score the summaries, select what to retrieve, and attend to the summaries of all the rest.

Work goes segment by segment: the queries of one query cluster in one block read the same summaries, so their scores
are one matrix product. The blocks of all clusters are scored, not only those of the opened ones: on a matrix unit that
is cheaper than gathering the few that are wanted.
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
    opening = selection.opened.shape[-1] > 0
    for tile, clusters, of_blocks in _read(segments, summaries, accumulated, is_causal=is_causal):
        tile_residuals = tile.gather(residuals)
        cluster_logits = clusters.logits(tile_residuals)
        block_logits = of_blocks.logits(tile_residuals) if opening else None
        if block_logits is not None:
            if select:
                opened, retrieved = _select(cluster_logits, block_logits, *selection.retrieved.shape[1:])
                tile.scatter(selection.opened, opened.int())
                tile.scatter(selection.retrieved, retrieved.int())
            else:
                opened, retrieved = tile.gather(selection.opened).long(), tile.gather(selection.retrieved).long()
            _keep_only_terms(cluster_logits, block_logits, opened, retrieved)
        if not attend:
            continue
        shift = cluster_logits.amax(-1, keepdim=True)
        if block_logits is not None:
            shift = torch.maximum(shift, block_logits.amax(-1, keepdim=True))
        shift = torch.where(shift == -torch.inf, 0, shift)
        weights = exp_(cluster_logits.sub_(shift))
        total, weighted = weights.sum(-1, keepdim=True), weights @ clusters.values
        if block_logits is not None:
            weights = exp_(block_logits.sub_(shift))
            total += weights.sum(-1, keepdim=True)
            weighted += weights @ of_blocks.values
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
    opening = selection.opened.shape[-1] > 0
    readings = _read(segments, summaries, accumulated, is_causal=is_causal)
    targets = _read(segments, grad_summaries, grad_accumulated, is_causal=is_causal, writing=True)
    for (tile, clusters, of_blocks), (_, grad_clusters, grad_of_blocks) in zip(readings, targets, strict=True):
        tile_residuals, tile_grad_out = tile.gather(residuals), tile.gather(grad_out)
        # Padding gets an infinite lse, and so no weight.
        tile_lse = torch.where(tile.valid, tile.gather(lse), torch.inf)[..., None]
        tile_delta = tile.gather(delta)[..., None]
        terms = [(clusters, grad_clusters, clusters.logits(tile_residuals))]
        if opening:
            terms.append((of_blocks, grad_of_blocks, of_blocks.logits(tile_residuals)))
            opened, retrieved = tile.gather(selection.opened).long(), tile.gather(selection.retrieved).long()
            _keep_only_terms(terms[0][2], terms[1][2], opened, retrieved)
        grad_tile_residuals = torch.zeros_like(tile_residuals)
        for table, grad_table, logits in terms:
            weights = exp_(logits.sub_(tile_lse).clamp_(max=0))
            d_logits = torch.bmm(tile_grad_out, table.values.mT).sub_(tile_delta).mul_(weights)
            grad_tile_residuals.baddbmm_(d_logits, table.keys)
            grad_table.mass.add_(d_logits.sum(1, keepdim=True))
            grad_table.keys.add_(d_logits.mT @ tile_residuals)
            grad_table.values.add_(weights.mT @ tile_grad_out)
        tile.scatter(fill_in, grad_tile_residuals)
    return grad_summaries, grad_accumulated


@dataclass(frozen=True)
class _Table:
    """The `S` summaries that each of `T` neighbouring segments reads (or their gradients): views, not copies."""

    mass: Tensor
    """(T, 1, S)"""
    keys: Tensor
    """(T, S, D)"""
    values: Tensor
    """(T, S, Dv)"""

    def logits(self, residuals: Tensor) -> Tensor:
        """(T, m, S): `r . kbar + mu`"""
        return torch.baddbmm(self.mass, residuals, self.keys.mT)


def _read(
    segments: Groups, summaries: Summaries, accumulated: Summaries, *, is_causal: bool, writing: bool = False
) -> Iterator[tuple[Tiles, _Table, _Table]]:
    """All segments that see any block, block after block: tiles of their queries, and the tables these read.

    The first table has a summary for each key cluster, S = K; the second one for each block and cluster, S = seen K.
    Its own block is hidden from a query there, unless it is `writing`.
    """
    heads, query_clusters, blocks, key_clusters = summaries.log_mass.shape
    of_block = heads * query_clusters
    flat, flat_accumulated = ([part.flatten(0, 1) for part in _parts(some)] for some in (summaries, accumulated))
    for block in range(1 if is_causal else 0, blocks):
        seen = block if is_causal else blocks
        begin = block * of_block
        for some, tile in neighbour_tiles(segments, begin, begin + of_block, (1 + seen) * key_clusters):
            cluster_mass, *cluster_means = (part[some, block] for part in flat_accumulated)
            block_mass, *block_means = (part[some, :seen] for part in flat)
            if not is_causal and not writing:
                block_mass = block_mass.index_fill(1, torch.tensor(block, device=block_mass.device), -torch.inf)
            yield (
                tile,
                _Table(cluster_mass[:, None], *cluster_means),
                _Table(block_mass.flatten(1)[:, None], *(mean.flatten(1, 2) for mean in block_means)),
            )


def _select(cluster_logits: Tensor, block_logits: Tensor, clusters: int, blocks: int) -> tuple[Tensor, Tensor]:
    """The clusters to open (T, m, clusters), and the blocks to retrieve from each (T, m, clusters, blocks)."""
    opened = _top(cluster_logits, clusters)
    of_blocks = block_logits.unflatten(-1, (-1, cluster_logits.shape[-1]))  # (T, m, seen, K)
    columns = opened.clamp(min=0)[..., None, :].expand(-1, -1, of_blocks.shape[2], -1)
    retrieved = _top(of_blocks.gather(-1, columns).mT, blocks)
    return opened, torch.where(opened[..., None] < 0, -1, retrieved)


def _keep_only_terms(cluster_logits: Tensor, block_logits: Tensor, opened: Tensor, retrieved: Tensor) -> None:
    """Set to -inf, in place, what is no term: opened clusters; blocks that were retrieved, or of clusters not opened.

    Places without a selection (-1) repeat the first one. Where there is no first one, nothing exists to be opened.
    """
    key_clusters = cluster_logits.shape[-1]
    opened = torch.where(opened < 0, opened[..., :1], opened).clamp(min=0)
    closed = torch.full_like(cluster_logits, -torch.inf).scatter_(-1, opened, 0)
    block_logits.unflatten(-1, (-1, key_clusters)).add_(closed[:, :, None])
    term = (retrieved * key_clusters + opened[..., None]).flatten(2)
    block_logits.scatter_(-1, torch.where(retrieved.flatten(2) < 0, term[..., :1], term).clamp(min=0), -torch.inf)
    cluster_logits.scatter_(-1, opened, -torch.inf)


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
