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
    out = residuals.new_zeros(places, summaries.value_mean.shape[-1])
    lse = residuals.new_full((places,), -torch.inf)
    given = selection
    if selection is None:
        k1, k2 = min(retrieved_clusters, key_clusters), min(retrieved_blocks, blocks)
        selection = Selection(
            opened=torch.full((places, k1), -1, dtype=torch.int32, device=residuals.device),
            retrieved=torch.full((places, k1, k2), -1, dtype=torch.int32, device=residuals.device),
        )
    for tile, reading in _read_tiles(segments, summaries, accumulated, is_causal=is_causal):
        tile_residuals = residuals[tile.rows]
        cluster_logits = reading.cluster_logits(tile_residuals)
        if given is None:
            opened = _top(cluster_logits, selection.opened.shape[-1])
            tile.scatter(selection.opened, opened.int())
        else:
            opened = given.opened[tile.rows].long()
        retrieving = opened.shape[-1] > 0
        if retrieving:
            block_logits = reading.block_logits(tile_residuals, opened)
            if given is None:
                retrieved = _top(block_logits.mT, selection.retrieved.shape[-1])
                tile.scatter(selection.retrieved, retrieved.int())
            else:
                retrieved = given.retrieved[tile.rows].long()
        if not attend:
            continue
        cluster_logits = _without(cluster_logits, opened)
        tile_lse = cluster_logits.logsumexp(-1)
        if retrieving:
            block_logits = _without(block_logits.mT, retrieved).mT
            tile_lse = torch.logaddexp(tile_lse, block_logits.flatten(-2).logsumexp(-1))
        shift = torch.where(tile_lse == -torch.inf, 0, tile_lse)[..., None]
        tile_out = (cluster_logits - shift).exp_() @ reading.cluster_values
        if retrieving:
            weights = (block_logits - shift[..., None]).exp_()
            tile_out += reading.spread(weights, opened) @ reading.block_values
        tile.scatter(out, tile_out)
        tile.scatter(lse, tile_lse)
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
    for tile, reading in _read_tiles(segments, summaries, accumulated, is_causal=is_causal):
        tile_residuals, tile_grad_out = residuals[tile.rows], grad_out[tile.rows]
        opened = selection.opened[tile.rows].long()
        # Padding gets an infinite lse, and so no weight.
        tile_lse = torch.where(tile.valid, lse[tile.rows], torch.inf)[..., None]
        tile_delta = delta[tile.rows][..., None]

        logits = _without(reading.cluster_logits(tile_residuals), opened)
        weights = (logits - tile_lse).clamp_(max=0).exp_()
        d_logits = weights * (torch.bmm(tile_grad_out, reading.cluster_values.mT) - tile_delta)
        grad_tile_residuals = d_logits @ reading.cluster_keys
        reading.add_to_clusters(grad_accumulated, d_logits, weights, tile_residuals, tile_grad_out)

        if opened.shape[-1] > 0:
            logits = reading.block_logits(tile_residuals, opened)
            logits = _without(logits.mT, selection.retrieved[tile.rows].long()).mT
            weights = (logits - tile_lse[..., None]).clamp_(max=0).exp_()
            response = reading.of_opened(torch.bmm(tile_grad_out, reading.block_values.mT), opened)
            d_logits = reading.spread(weights * (response - tile_delta[..., None]), opened)
            weights = reading.spread(weights, opened)
            grad_tile_residuals += d_logits @ reading.block_keys
            reading.add_to_blocks(grad_summaries, d_logits, weights, tile_residuals, tile_grad_out)
        tile.scatter(grad_residuals, grad_tile_residuals)
    return grad_residuals[:-1], grad_summaries, grad_accumulated


@dataclass(frozen=True)
class _Reading:
    """The summaries that each tile of a batch reads: `T` tiles, queries of one block, which see `seen` blocks."""

    block: int
    segment: Tensor
    """(T,): row of each tile in tables with the axes (head, query cluster) flattened"""
    cluster_mass: Tensor
    """(T, 1, K)"""
    cluster_keys: Tensor
    """(T, K, D)"""
    cluster_values: Tensor
    """(T, K, Dv)"""
    block_mass: Tensor
    """(T, seen, K); -inf for the queries' own block"""
    block_keys: Tensor
    """(T, seen K, D)"""
    block_values: Tensor
    """(T, seen K, Dv)"""

    def cluster_logits(self, residuals: Tensor) -> Tensor:
        """(T, m, K)"""
        return torch.baddbmm(self.cluster_mass, residuals, self.cluster_keys.mT)

    def block_logits(self, residuals: Tensor, opened: Tensor) -> Tensor:
        """(T, m, seen, opened clusters); -inf where none is opened."""
        logits = torch.baddbmm(self.block_mass.flatten(1)[:, None], residuals, self.block_keys.mT)
        return self.of_opened(logits, opened).masked_fill_((opened < 0)[..., None, :], -torch.inf)

    def of_opened(self, dense: Tensor, opened: Tensor) -> Tensor:
        """(T, m, seen K) -> (T, m, seen, opened clusters)"""
        dense = dense.view(*dense.shape[:-1], *self.block_mass.shape[1:])
        return dense.gather(-1, self._columns(opened))

    def spread(self, of_opened: Tensor, opened: Tensor) -> Tensor:
        """(T, m, seen, opened clusters) -> (T, m, seen K), 0 elsewhere."""
        dense = of_opened.new_zeros(*of_opened.shape[:2], *self.block_mass.shape[1:])
        return dense.scatter_add_(-1, self._columns(opened), of_opened).flatten(-2)

    def _columns(self, opened: Tensor) -> Tensor:
        return opened.clamp(min=0)[..., None, :].expand(-1, -1, self.block_mass.shape[1], -1)

    def add_to_clusters(
        self, gradient: Summaries, d_logits: Tensor, weights: Tensor, residuals: Tensor, grad_out: Tensor
    ) -> None:
        def add(table: Tensor, rows: Tensor) -> None:
            table.flatten(0, 1)[:, self.block].index_add_(0, self.segment, rows)

        add(gradient.log_mass, d_logits.sum(1))
        add(gradient.key_mean, d_logits.mT @ residuals)
        add(gradient.value_mean, weights.mT @ grad_out)

    def add_to_blocks(
        self, gradient: Summaries, d_logits: Tensor, weights: Tensor, residuals: Tensor, grad_out: Tensor
    ) -> None:
        def add(table: Tensor, rows: Tensor) -> None:
            seen = table.flatten(0, 1)[:, : self.block_mass.shape[1]]
            seen.index_add_(0, self.segment, rows.view(-1, *seen.shape[1:]))

        add(gradient.log_mass, d_logits.sum(1))
        add(gradient.key_mean, d_logits.mT @ residuals)
        add(gradient.value_mean, weights.mT @ grad_out)


def _read_tiles(
    segments: Groups, summaries: Summaries, accumulated: Summaries, *, is_causal: bool
) -> Iterator[tuple[Tiles, _Reading]]:
    """All segments that see any block, block after block."""
    heads, query_clusters, blocks, key_clusters = summaries.log_mass.shape
    segment = torch.arange(heads * query_clusters, device=summaries.log_mass.device)
    # Segments are numbered (head, block, query cluster); tables have the query cluster before the block.
    head, query_cluster = segment // query_clusters, segment % query_clusters
    for block in range(1 if is_causal else 0, blocks):
        seen = block if is_causal else blocks
        among = (head * blocks + block) * query_clusters + query_cluster
        for tile in tiles(segments, seen * key_clusters, among=among, most_rows=LONGEST_TILE):
            of_tile = tile.group // (blocks * query_clusters) * query_clusters + tile.group % query_clusters
            block_mass = summaries.log_mass.flatten(0, 1)[of_tile, :seen]
            if not is_causal:
                block_mass[:, block] = -torch.inf
            yield (
                tile,
                _Reading(
                    block=block,
                    segment=of_tile,
                    cluster_mass=accumulated.log_mass.flatten(0, 1)[of_tile, None, block],
                    cluster_keys=accumulated.key_mean.flatten(0, 1)[of_tile, block],
                    cluster_values=accumulated.value_mean.flatten(0, 1)[of_tile, block],
                    block_mass=block_mass,
                    block_keys=summaries.key_mean.flatten(0, 1)[of_tile, :seen].flatten(1, 2),
                    block_values=summaries.value_mean.flatten(0, 1)[of_tile, :seen].flatten(1, 2),
                ),
            )


def _top(logits: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last axis; -1 for absent terms, whose logit is -inf."""
    available = min(count, logits.shape[-1])
    top = logits.max(-1, keepdim=True) if available == 1 else logits.topk(available, dim=-1)
    indices = torch.where(top[0] == -torch.inf, -1, top[1])
    return torch.nn.functional.pad(indices, (0, count - available), value=-1)


def _without(logits: Tensor, indices: Tensor) -> Tensor:
    """`logits` with the terms at `indices` along the last axis (-1: none) set to -inf."""
    chosen = torch.zeros(*logits.shape[:-1], logits.shape[-1] + 1, dtype=torch.bool, device=logits.device)
    return logits.masked_fill(chosen.scatter_(-1, indices + 1, True)[..., 1:], -torch.inf)


def _zeros_like(summaries: Summaries) -> Summaries:
    return Summaries(
        torch.zeros_like(summaries.log_mass),
        torch.zeros_like(summaries.key_mean),
        torch.zeros_like(summaries.value_mean),
    )
