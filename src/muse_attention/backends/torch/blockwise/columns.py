"""What the queries of a block read: the summary of every bucket they see, one column each.

A query wants the keys of a bucket whose summary is expected to be wrong by the tolerance or more. Both sides of that
comparison are kept as products of a factor of the query and a factor of the bucket where that is possible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from muse_attention.backends.torch.blockwise.query_slots import Slots, first_to_reach
from muse_attention.backends.torch.grouping import take_rows
from muse_attention.config import MuSeConfig
from muse_attention.core.expected_error import DEVIATIONS_OF_SUSPICION, LARGEST_GROWTH, SUSPICION
from muse_attention.core.exponential import exp2_, exp_


@dataclass(frozen=True)
class Columns:
    """The `S` buckets that a block sees, as one query head reads them."""

    log_mass: Tensor
    """(Q, S): -inf for no term"""
    keys: Tensor
    """(Q, D, S)"""
    values: Tensor
    """(Q, S, Dv)"""
    deviation: Tensor
    """(Q, S): standard deviation of the logits of a bucket's keys, for a query of reach 1"""
    deviation_limit: Tensor
    """(S,): the deviation up to which the mass of so few keys grows with its square"""
    error_deviation: Tensor
    """(Q, S): the deviation from which the expected error follows"""
    error_factor: Tensor
    """(S,): factor of the expected error, smaller for large buckets; nan for no term"""

    def without(self, own: slice) -> Columns:
        """The columns without the buckets of a query's own block."""
        log_mass, error_factor = self.log_mass.clone(), self.error_factor.clone()
        log_mass[:, own], error_factor[own] = -math.inf, math.nan
        return replace(self, log_mass=log_mass, error_factor=error_factor)

    def logits(self, slots: Slots, residuals: Tensor, reach: Tensor, *, second_order: bool, together: bool) -> Tensor:
        """(slots, rows, S): `r . kbar + mu`, and to second order what the spread of keys adds to a bucket's mass.

        `together` is that of `products`.
        """
        logits = products(residuals, self.keys, slots, together=together).add_(self.log_mass[slots.cluster, None])
        if second_order:
            sigma = reach[..., None] * self.deviation[slots.cluster, None]
            # sigma^2 / 2 up to `deviation_limit`, then the line that continues it: so few keys cannot have more.
            within = torch.minimum(sigma, self.deviation_limit)
            logits.add_(sigma.sub_(within, alpha=0.5).mul_(within))
        return logits

    def decide(self, slots: Slots, weights: Tensor, reach: Tensor, log_total: Tensor, config: MuSeConfig) -> Tensor:
        """(slots, tiles, S) uint8: the first row of each tile that wants each bucket.

        `weights` are those of the summaries, `log_total` the logarithm of what would make them shares of a softmax.
        """
        assert config.tolerance is not None
        threshold = config.tolerance * log_total.exp() if config.tolerance > 0 else torch.zeros_like(log_total)
        if config.caution > 0:
            # `expm1(caution sigma) / caution`
            to_base_2 = config.caution * math.log2(math.e)
            error = (reach * to_base_2)[..., None] * self.error_deviation[slots.cluster, None]
            exp2_(error.clamp_(max=LARGEST_GROWTH * math.log2(math.e))).sub_(1).mul_(weights).mul_(self.error_factor)
            threshold = threshold * config.caution
        else:
            # The reach divides the other side: two products fewer for each column.
            error = weights * (self.error_deviation * self.error_factor)[slots.cluster, None]
            threshold = torch.where(threshold == 0, 0, threshold / reach)
        return self._first_to_reach(error, threshold, slots)

    def suspect(self, slots: Slots, weights: Tensor, reach: Tensor, log_total: Tensor, search: float) -> Tensor:
        """(slots, tiles, S) uint8: the first row of each tile that suspects a key of weight `search` in each bucket."""
        growth = (reach * (DEVIATIONS_OF_SUSPICION * math.log2(math.e)))[..., None] * self.error_deviation[
            slots.cluster, None
        ]
        highest = exp2_(growth.clamp_(max=LARGEST_GROWTH * math.log2(math.e))).mul_(weights)
        # (What is no term has weight 0, which no threshold above 0 admits.)
        return self._first_to_reach(highest, SUSPICION * search * log_total.exp(), slots)

    def _first_to_reach(self, scores: Tensor, least: Tensor, slots: Slots) -> Tensor:
        tiles = (slots.tiles.shape[1], -1)
        row_in_tile = slots.row_in_tile.unflatten(1, tiles)
        return first_to_reach(scores.unflatten(1, tiles), least.unflatten(1, tiles), row_in_tile)


def kept(slots: Slots, first: Tensor, like: Tensor) -> Tensor:
    """(slots, rows, S), 1 where a row attends to a bucket's summary and 0 where it attends to the keys; `like` has the
    shape and dtype of the result."""
    row = slots.row_in_tile.unflatten(1, (first.shape[1], -1))[..., None]
    result = torch.empty_like(like)
    torch.lt(row.to(like.dtype), first[:, :, None].to(like.dtype), out=result.unflatten(1, row.shape[1:3]))
    return result


def weigh(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`exp(logits - shift)`, in place, and the shift, (slots, rows)."""
    shift = logits.amax(-1)
    shift = torch.where(shift == -torch.inf, 0, shift)
    return exp_(logits.sub_(shift[..., None])), shift


def products(rows: Tensor, tables: Tensor, slots: Slots, *, together: bool = False) -> Tensor:
    """(slots, rows, X): `rows` of each slot times the table of its cluster.

    If `together`, all rows of a cluster are in one product, without a copy of its table. The rounding of a row then
    depends on how many there are, which it must not in the forward pass.
    """
    if not together:
        return torch.bmm(rows, take_rows(tables, slots.cluster))
    result = rows.new_empty(*rows.shape[:2], tables.shape[-1])
    for cluster, run in slots.runs():
        torch.mm(rows[run].flatten(0, 1), tables[cluster], out=result[run].flatten(0, 1))
    return result
