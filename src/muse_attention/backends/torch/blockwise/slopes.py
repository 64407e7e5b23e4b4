"""How the values of summaries change with a query's residual: one matrix for all the buckets that a block sees.

For each bucket that is the covariance of its keys and values. It is a constant for the gradient: what flows through it
to keys and values takes their gradients further from those of exact attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.backends.torch.blockwise.buckets import Buckets
from muse_attention.backends.torch.clustering import finite
from muse_attention.backends.torch.grouping import take_rows
from muse_attention.core.generations import Generations
from muse_attention.core.slopes import LARGEST_REACH, TILT_OF_SLOPE


@dataclass(frozen=True)
class Slopes:
    """The slopes of `R` query heads."""

    matrix: Tensor
    """(R, nb, D, Dv)"""
    spread: Tensor
    """(R, nb): variance of the keys about the means of their buckets"""

    def of_rows(self, place: int, block: int, reach: Tensor) -> tuple[Tensor, Tensor]:
        """The (D, Dv) matrix of a head and block, and its factor for queries of this reach."""
        reach = reach * self.spread[place, block].sqrt()
        return self.matrix[place, block], LARGEST_REACH / reach.clamp(min=LARGEST_REACH)


def find_slopes(buckets: Buckets, centroids: Tensor, generations: Generations) -> Slopes:
    """The slopes for (R, S, Q, D) centroids."""
    heads, head_dim, value_dim = centroids.shape[0], buckets.keys.shape[1], buckets.values.shape[1]
    slopes = Slopes(
        centroids.new_zeros(heads, generations.blocks, head_dim, value_dim),
        centroids.new_zeros(heads, generations.blocks),
    )
    for head in range(heads):
        for generation in range(generations.number):
            centre = TILT_OF_SLOPE * centroids[head, generation].mean(0)
            of_blocks = [_of_block(buckets, block, centre) for block in range(generations.sees(generation))]
            mass, matrix, spread = (torch.stack(parts) for parts in zip(*of_blocks, strict=True))
            for block in range(1 if generations.is_causal else 0, generations.blocks):
                if generations.of_block(block) != generation:
                    continue
                sees = torch.arange(len(of_blocks), device=mass.device)
                sees = sees < block if generations.is_causal else sees != block
                share = torch.softmax(mass[sees], 0)
                # NaN and inf must reach what attends to them, not every output that has a slope.
                slopes.matrix[head, block] = finite(torch.tensordot(share, matrix[sees], 1))
                slopes.spread[head, block] = finite(share @ spread[sees])
    return slopes


def _of_block(buckets: Buckets, block: int, centre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-mass of the keys of a block, covariance of keys and values in its buckets, and variance of keys."""
    rows, within = buckets.rows_of_block(block), buckets.bucket_of_rows(block)
    keys, values = buckets.keys[rows], buckets.values[rows]
    logits = keys @ centre
    mass = logits.logsumexp(0)
    weights = (logits - torch.where(mass == -torch.inf, 0, mass)).exp_()
    total = weights.new_zeros(buckets.key_clusters).index_add_(0, within, weights)
    mean = keys.new_zeros(buckets.key_clusters, keys.shape[1]).index_add_(0, within, keys * weights[:, None])
    off = keys - take_rows(mean / torch.where(total > 0, total, 1)[:, None], within)
    weighted = off * weights[:, None]
    return mass, weighted.mT @ values, (weighted * off).sum() / keys.shape[1]
