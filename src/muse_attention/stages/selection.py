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
from muse_attention.stages.grouping import Groups, Tiles, tiles
from muse_attention.structures import Partial, Selection, Summaries

LONGEST_TILE = 512
"""Queries of one segment that are scored at once."""


def select_and_attend(
    residuals: Tensor,
    segments: Groups,
    summaries: Summaries,
    accumulated: Summaries,
    *,
    is_causal: bool,
    retrieved_clusters: int,
    retrieved_blocks: int,
    attend: bool,
    selection: Selection | None = None,
) -> tuple[Partial, Selection]:
    """Attention of (rows, D) query residuals to the summary terms, and the selection that defines those terms.

    `segments` groups the rows, the queries of all heads, by (head, block, query cluster). The selection is per row. A
    `selection` that is given is used as it is. Without `attend` there are no summary terms, only a selection.
    """
    _, _, blocks, key_clusters = summaries.log_mass.shape
    places = residuals.shape[0] + 1
    value_dim = summaries.value_mean.shape[-1]
    out = residuals.new_zeros(places, value_dim)
    lse = residuals.new_full((places,), -torch.inf)
    given = selection
    if given is not None:
        opening = given.opened.shape[-1] > 0
    else:
        k1, k2 = min(retrieved_clusters, key_clusters), min(retrieved_blocks, blocks)
        opening = k1 > 0
        selection = Selection(
            opened=torch.full((places, k1), -1, dtype=torch.int32, device=residuals.device),
            retrieved=torch.full((places, k1, k2), -1, dtype=torch.int32, device=residuals.device),
        )
    assert selection is not None
    for tile, reading in _read_tiles(segments, summaries, accumulated, is_causal=is_causal, blocks_too=opening):
        logits = reading.logits(tile.gather(residuals))
        if opening:
            if given is None:
                opened, retrieved = reading.select(logits, *selection.retrieved.shape[1:])
                tile.scatter(selection.opened, opened.int())
                tile.scatter(selection.retrieved, retrieved.int())
            else:
                opened, retrieved = tile.gather(given.opened).long(), tile.gather(given.retrieved).long()
        if not attend:
            continue
        if opening:
            reading.keep_only_terms(logits, opened, retrieved)
        shift = logits.amax(-1, keepdim=True)
        shift = torch.where(shift == -torch.inf, 0, shift)
        weights = exp_(logits.sub_(shift))
        total = weights.sum(-1, keepdim=True)
        tile.scatter(out, (weights @ reading.values) / torch.where(total == 0, 1, total))
        tile.scatter(lse, (total.log() + shift)[..., 0])
    if given is None:
        selection = Selection(selection.opened[:-1], selection.retrieved[:-1])
    return Partial(out[:-1], lse[:-1]), selection


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
) -> tuple[Tensor, Summaries, Summaries]:
    """Gradients of the residuals, of the summaries and of the accumulated summaries.

    `lse` and `delta` are those of the merged softmax: `p = exp(s - lse)`, `ds = p (grad_out . value - delta)`.
    """
    grad_residuals = residuals.new_zeros(residuals.shape[0] + 1, residuals.shape[1])
    grad_summaries, grad_accumulated = _zeros_like(summaries), _zeros_like(accumulated)
    opening = selection.opened.shape[-1] > 0
    for tile, reading in _read_tiles(segments, summaries, accumulated, is_causal=is_causal, blocks_too=opening):
        tile_residuals, tile_grad_out = tile.gather(residuals), tile.gather(grad_out)
        logits = reading.logits(tile_residuals)
        if opening:
            reading.keep_only_terms(
                logits, tile.gather(selection.opened).long(), tile.gather(selection.retrieved).long()
            )
        # Padding gets an infinite lse, and so no weight.
        tile_lse = torch.where(tile.valid, tile.gather(lse), torch.inf)[..., None]
        weights = exp_(logits.sub_(tile_lse).clamp_(max=0))
        d_logits = torch.bmm(tile_grad_out, reading.values.mT).sub_(tile.gather(delta)[..., None]).mul_(weights)
        tile.scatter(grad_residuals, d_logits @ reading.keys)
        reading.add_gradients(
            grad_summaries,
            grad_accumulated,
            Summaries(d_logits.sum(1), d_logits.mT @ tile_residuals, weights.mT @ tile_grad_out),
        )
    return grad_residuals[:-1], grad_summaries, grad_accumulated


@dataclass(frozen=True)
class _Reading:
    """The summaries that `T` tiles, queries of one block, read: a table with a row for the accumulated summaries and
    one for each of the `seen` blocks, and a column for each key cluster. S = (1 + seen) K."""

    block: int
    segment: Tensor
    """(T,): row of each tile in summaries with the axes (head, query cluster) flattened"""
    key_clusters: int
    mass: Tensor
    """(T, 1, S); -inf for empty ones and for the queries' own block"""
    keys: Tensor
    """(T, S, D)"""
    values: Tensor
    """(T, S, Dv)"""

    def logits(self, residuals: Tensor) -> Tensor:
        """(T, m, S): `r . kbar + mu`"""
        return torch.baddbmm(self.mass, residuals, self.keys.mT)

    def select(self, logits: Tensor, clusters: int, blocks: int) -> tuple[Tensor, Tensor]:
        """The clusters to open (T, m, clusters), and the blocks to retrieve from each (T, m, clusters, blocks)."""
        table = logits.unflatten(-1, (-1, self.key_clusters))
        opened = _top(table[:, :, 0], clusters)
        columns = opened.clamp(min=0)[..., None, :].expand(-1, -1, table.shape[2] - 1, -1)
        of_opened = table[:, :, 1:].gather(-1, columns)  # (T, m, seen, clusters)
        retrieved = _top(of_opened.mT, blocks)
        return opened, torch.where(opened[..., None] < 0, -1, retrieved)

    def keep_only_terms(self, logits: Tensor, opened: Tensor, retrieved: Tensor) -> None:
        """Set to -inf, in place, what is no term: opened clusters, blocks of others, retrieved blocks.

        Places without a selection (-1) repeat the first one. Where there is no first one nothing exists to be opened.
        """
        table = logits.unflatten(-1, (-1, self.key_clusters))
        opened = torch.where(opened < 0, opened[..., :1], opened).clamp(min=0)
        closed = torch.full_like(table[:, :, 0], -torch.inf).scatter_(-1, opened, 0)
        table[:, :, 1:] += closed[:, :, None]
        term = ((retrieved + 1) * self.key_clusters + opened[..., None]).flatten(2)
        term = torch.where(retrieved.flatten(2) < 0, opened[..., :1], term)
        logits.scatter_(-1, opened, -torch.inf).scatter_(-1, term, -torch.inf)

    def add_gradients(self, to_summaries: Summaries, to_accumulated: Summaries, gradient: Summaries) -> None:
        """Add gradients of the table, (T, S, ...), to those of the summaries it was read from."""
        for summaries, accumulated, rows in zip(
            _parts(to_summaries), _parts(to_accumulated), _parts(gradient), strict=True
        ):
            table = rows.unflatten(1, (-1, self.key_clusters))
            seen = table.shape[1] - 1
            accumulated.flatten(0, 1)[:, self.block].index_add_(0, self.segment, table[:, 0])
            if seen:
                summaries.flatten(0, 1)[:, :seen].index_add_(0, self.segment, table[:, 1:])


def _read_tiles(
    segments: Groups, summaries: Summaries, accumulated: Summaries, *, is_causal: bool, blocks_too: bool
) -> Iterator[tuple[Tiles, _Reading]]:
    """All segments that see any block, block after block. The blocks' own summaries are read only if `blocks_too`."""
    heads, query_clusters, blocks, key_clusters = summaries.log_mass.shape
    segment = torch.arange(heads * query_clusters, device=summaries.log_mass.device)
    for block in range(1 if is_causal else 0, blocks):
        seen = 0 if not blocks_too else block if is_causal else blocks
        # Groups are numbered (head, block, query cluster); summaries have the query cluster before the block.
        among = (segment // query_clusters * blocks + block) * query_clusters + segment % query_clusters
        for tile in tiles(segments, (1 + seen) * key_clusters, among=among, most_rows=LONGEST_TILE):
            of_tile = tile.group // (blocks * query_clusters) * query_clusters + tile.group % query_clusters
            mass, keys, values = (
                torch.cat(
                    [all_seen.flatten(0, 1)[of_tile, block, None], part.flatten(0, 1)[of_tile, :seen]], dim=1
                ).flatten(1, 2)
                for all_seen, part in zip(_parts(accumulated), _parts(summaries), strict=True)
            )
            if seen > block:
                mass[:, (1 + block) * key_clusters : (2 + block) * key_clusters] = -torch.inf
            yield tile, _Reading(block, of_tile, key_clusters, mass[:, None], keys, values)


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
