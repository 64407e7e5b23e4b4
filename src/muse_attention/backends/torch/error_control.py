"""Stage 4, by tolerance: every query retrieves the buckets whose summaries are expected to be wrong by more than that.

A summary's expected error is what its weight in the softmax would gain if its logit were some deviations higher, the
deviation sigma being that of the query's logits over its keys. To open a cluster and to retrieve a block of it are
comparisons with the tolerance, and both are kept as bits. A head that would retrieve more than its budget takes the
buckets of largest error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from muse_attention.backends.torch.grouping import Tiles
from muse_attention.backends.torch.segments import Columns, Gradients, Scored, attend_to_terms
from muse_attention.config import MuSeConfig
from muse_attention.core.bits import BITS, pack_bits, unpack_bits
from muse_attention.core.budget import ERROR_BINS, LARGEST_GROWTH, error_bins, lowest_affordable_bin
from muse_attention.core.exponential import exp_
from muse_attention.core.structures import Partial, Selection

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Tolerance:
    """The rule, and what it has found out about each query head on the way."""

    tolerance: float
    caution: float
    mean_bucket: float
    own_lse: Tensor
    """(rows,): of each query's own block"""
    rows_per_head: int
    lowest_bin: Tensor
    """(query heads,) int64: errors below it are not retrieved"""
    counts: Tensor
    """(query heads, bins) int64: pairs above the tolerance, by their error"""

    @classmethod
    def of(cls, config: MuSeConfig, own_lse: Tensor, rows_per_head: int) -> Tolerance:
        assert config.tolerance is not None
        heads = own_lse.shape[0] // rows_per_head
        counts = torch.zeros(heads, ERROR_BINS, dtype=torch.int64, device=own_lse.device)
        lowest = counts[:, 0].clone()
        return cls(config.tolerance, config.caution, config.mean_bucket, own_lse, rows_per_head, lowest, counts)

    def within(self, budget: int) -> Tolerance | None:
        """The rule that keeps all heads within so many pairs for each query; None if this one did."""
        if not bool((self.counts.sum(-1) > budget * self.rows_per_head).any()):
            return None
        lowest = lowest_affordable_bin(self.counts, budget * self.rows_per_head)
        return replace(self, lowest_bin=lowest, counts=torch.zeros_like(self.counts))

    def open(self, tile: Tiles, logits: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """(T, m, K) bool: the clusters that each query opens; and its lse, (T, m, 1), as far as summaries tell."""
        lse = torch.logaddexp(tile.gather(self.own_lse), logits.logsumexp(-1))[..., None]
        return self._errors(logits, lse, sigma) > self.tolerance, lse

    def retrieve(
        self,
        tile: Tiles,
        columns: Columns,
        log_size: Tensor,
        opened: Tensor,
        logits: Tensor,
        lse: Tensor,
        sigma: Tensor,
    ) -> Tensor:
        """(T, m, seen, U) bool: the buckets that each query retrieves, of the clusters that it opens.

        A large bucket must be that much worse: retrieving it costs more. Few are wanted: they are counted one by one.
        """
        errors = self._errors(logits, lse, sigma).mul_(exp_(0.5 * (math.log(self.mean_bucket) - log_size)))
        errors = errors.unflatten(-1, (-1, columns.width))
        wanted = (errors > self.tolerance) & columns.gather(opened)[:, :, None] & tile.valid[..., None, None]
        where = wanted.nonzero(as_tuple=True)
        head = tile.rows[where[:2]] // self.rows_per_head
        bins = error_bins(errors[where])
        self.counts.view(-1).add_(torch.bincount(head * ERROR_BINS + bins, minlength=self.counts.numel()))
        wanted[where] = bins >= self.lowest_bin[head]
        return wanted

    def _errors(self, logits: Tensor, lse: Tensor, sigma: Tensor) -> Tensor:
        weights = exp_(logits - torch.where(lse == -torch.inf, 0, lse))
        if self.caution > 0:
            sigma = exp_((self.caution * sigma).clamp_(max=LARGEST_GROWTH)).sub_(1).div_(self.caution)
        return torch.where(logits == -torch.inf, 0, weights * sigma)


def select_and_attend(
    scored: Scored, rule: Tolerance | None, selection: Selection, partial: Partial, *, is_causal: bool
) -> None:
    """Fill in the rows of `partial`, attention to the summary terms that `selection` leaves.

    With a `rule`, the rows of `selection` are filled in first. What is filled in has a spare last row.
    """
    for tile, where in scored.walk(is_causal=is_causal):
        clusters, cluster_logits, cluster_sigma = scored.clusters(tile, where)
        key_clusters = cluster_logits.shape[-1]
        if rule is not None:
            opened, lse = rule.open(tile, cluster_logits, _certain(cluster_sigma))
            tile.scatter(selection.opened, pack_bits(opened))
        else:
            opened = unpack_bits(tile.gather(selection.opened), key_clusters)
        columns = where.columns(opened.any(1))
        blocks, block_logits, block_sigma = scored.blocks(tile, columns)
        if rule is not None:
            log_size = columns.copy_spread(_certain(scored.second_order).of_buckets).log_size
            retrieved = rule.retrieve(tile, columns, log_size, opened, block_logits, lse, _certain(block_sigma))
            _mark(tile, columns, retrieved, selection.retrieved)
        else:
            retrieved = _retrieved(tile, columns, selection, key_clusters)
        _keep_only_terms(cluster_logits, block_logits, columns, opened, retrieved)
        attend_to_terms(tile, [cluster_logits, block_logits], [clusters.values, blocks.values], partial)


def attend_backward(
    scored: Scored, selection: Selection, gradients: Gradients, *, is_causal: bool, fill_in: Tensor
) -> None:
    """Add to the `gradients` of the summaries; those of the residuals go to `fill_in`, (rows + 1, D)."""
    for tile, where in scored.walk(is_causal=is_causal):
        clusters, cluster_logits, _ = scored.clusters(tile, where)
        opened = unpack_bits(tile.gather(selection.opened), cluster_logits.shape[-1])
        columns = where.columns(opened.any(1))
        blocks, block_logits, _ = scored.blocks(tile, columns)
        retrieved = _retrieved(tile, columns, selection, cluster_logits.shape[-1])
        _keep_only_terms(cluster_logits, block_logits, columns, opened, retrieved)
        to_residuals = gradients.add_clusters(tile, where, clusters, cluster_logits)
        to_residuals += gradients.add_blocks(tile, columns, blocks, block_logits)
        tile.scatter(fill_in, to_residuals)


def _mark(tile: Tiles, columns: Columns, retrieved: Tensor, words: Tensor) -> None:
    """Set the bits of the few buckets that are `retrieved`, (T, m, seen, U) bool, in (rows + 1, nb, words)."""
    which, query, block, column = retrieved.nonzero(as_tuple=True)
    cluster = columns.index[2][which, 0, column]
    at = (tile.rows[which, query] * words.shape[1] + block) * words.shape[2] + cluster // BITS
    # (No bit is set twice: their sum is their union.)
    words.view(-1).index_add_(0, at, torch.ones_like(at, dtype=words.dtype) << (cluster % BITS).to(words.dtype))


def _retrieved(tile: Tiles, columns: Columns, selection: Selection, key_clusters: int) -> Tensor:
    """(T, m, seen, U) bool"""
    seen = columns.segments.seen
    words = tile.gather(selection.retrieved)[:, :, :seen]
    which, query, block, word = words.nonzero(as_tuple=True)
    number, bit = unpack_bits(words[which, query, block, word][:, None], BITS).nonzero(as_tuple=True)
    which, query, block, cluster = which[number], query[number], block[number], word[number] * BITS + bit
    place = torch.zeros(columns.index[2].shape[0], key_clusters, dtype=torch.int64, device=words.device)
    place.scatter_(
        1, columns.index[2][:, 0], torch.arange(columns.width, device=words.device).expand(place.shape[0], -1)
    )
    retrieved = torch.zeros(*words.shape[:3], columns.width, dtype=torch.bool, device=words.device)
    retrieved[which, query, block, place[which, cluster]] = True
    return retrieved


def _keep_only_terms(
    cluster_logits: Tensor, block_logits: Tensor, columns: Columns, opened: Tensor, retrieved: Tensor
) -> None:
    """Set to -inf, in place, clusters that were opened, blocks that were retrieved, and blocks of other clusters."""
    cluster_logits.masked_fill_(opened, -torch.inf)
    no_term = retrieved | ~columns.gather(opened)[:, :, None]
    block_logits.unflatten(-1, (-1, columns.width)).masked_fill_(no_term, -torch.inf)


def _certain(found: Kind | None) -> Kind:
    """Of summaries of second order, which a tolerance always has."""
    assert found is not None
    return found
