"""What the queries of a block read: the summary of every bucket they see, one column each.

A query wants the keys of a bucket whose summary is expected to be wrong by the tolerance or more. Both sides of that
comparison are kept as products of a factor of the query and a factor of the bucket where that is possible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from muse_attention.backends.torch.blockwise.query_slots import Slots
from muse_attention.config import MuSeConfig
from muse_attention.core.expected_error import LARGEST_GROWTH
from muse_attention.core.exponential import exp_
from muse_attention.core.query_tiles import NO_ROW


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

    def logits(self, slots: Slots, residuals: Tensor, reach: Tensor, *, second_order: bool) -> Tensor:
        """(slots, rows, S): `r . kbar + mu`, and to second order what the spread of keys adds to a bucket's mass."""
        logits = residuals.new_empty(*residuals.shape[:2], self.log_mass.shape[1])
        for place, cluster in enumerate(slots.cluster.tolist()):
            torch.addmm(self.log_mass[cluster], residuals[place], self.keys[cluster], out=logits[place])
        if second_order:
            sigma = reach[..., None] * self.deviation[slots.cluster, None]
            # sigma^2 / 2 up to `deviation_limit`, then the line that continues it: so few keys cannot have more.
            within = torch.minimum(sigma, self.deviation_limit)
            logits.addcmul_(within, sigma.sub_(within, alpha=0.5))
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
            error.clamp_(max=LARGEST_GROWTH * math.log2(math.e)).exp2_().sub_(1)
            threshold = threshold * config.caution
        else:
            error = reach[..., None] * self.error_deviation[slots.cluster, None]
        wanted = error.mul_(weights).mul_(self.error_factor) >= threshold[..., None]
        rows = torch.where(wanted, slots.row_in_tile[..., None], NO_ROW)
        return rows.unflatten(1, (slots.tiles.shape[1], -1)).amin(2)


def leave_out_retrieved(table: Tensor, slots: Slots, first: Tensor, filler: float = 0) -> None:
    """Set to `filler`, in place, the (slots, rows, S) weights or logits of buckets whose keys are attended to."""
    tiles = first.shape[1]
    retrieved = slots.row_in_tile.unflatten(1, (tiles, -1))[..., None] >= first[:, :, None]
    table.masked_fill_(retrieved.flatten(1, 2), filler)


def weigh(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`exp(logits - shift)`, in place, and the shift, (slots, rows)."""
    shift = logits.amax(-1)
    shift = torch.where(shift == -torch.inf, 0, shift)
    return exp_(logits.sub_(shift[..., None])), shift


def products(rows: Tensor, tables: Tensor, slots: Slots) -> Tensor:
    """(slots, rows, X): `rows` of each slot times the table of its cluster, without a copy of that."""
    result = rows.new_empty(*rows.shape[:2], tables.shape[-1])
    for place, cluster in enumerate(slots.cluster.tolist()):
        torch.mm(rows[place], tables[cluster], out=result[place])
    return result
