"""The tables that hold summaries, what is seen of them from each block, and their gradients.

Means of keys are stored less the `key_offset` of their head, wherever a structure or an argument holds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.backends.triton.numbers import gradient_dtype
from muse_attention.core.structures import Summaries


@dataclass(frozen=True)
class Accumulated:
    """For each block, one summary per key cluster of all the blocks it sees: the earlier ones, or all others."""

    seen: Summaries
    """(H, Q, nb, K, ...)"""
    mass_before: Tensor
    """(H, Q, nb, K): log-mass of the blocks before; the log-mass of `seen` itself if these are all it sees"""
    mass_after: Tensor
    """(H, Q, nb, K): log-mass of the blocks after; `mass_before` if nothing after is seen"""


@dataclass(frozen=True)
class PairGradients:
    """Gradients of the keys and values of each bucket tile, in pieces to be summed."""

    keys: Tensor
    """(G, pieces, rows of a tile, D)"""
    values: Tensor
    """(G, pieces, rows of a tile, Dv)"""
    before: Tensor
    """(G, bucket tiles + 1) int32: the pieces of a tile are those from one entry to the next"""

    @property
    def pieces(self) -> int:
        """Room for so many in each head."""
        return self.keys.shape[1]


def new_gradient(of_buckets: Summaries) -> Summaries:
    """Room for the gradient of summaries; every entry is to be written."""
    dtype = gradient_dtype(of_buckets.key_mean.dtype)
    return Summaries(
        torch.empty_like(of_buckets.log_mass),
        torch.empty_like(of_buckets.key_mean, dtype=dtype),
        torch.empty_like(of_buckets.value_mean, dtype=dtype),
    )


def pointers(summaries: Summaries, prefix: str = "") -> dict[str, Tensor]:
    """Log-masses and means, or their gradients, as kernels take them."""
    return {**pointers_of_logits(summaries, prefix), f"{prefix}value_mean_ptr": summaries.value_mean}


def pointers_of_logits(summaries: Summaries, prefix: str = "") -> dict[str, Tensor]:
    """What tells logits, as kernels take it: all but the means of values."""
    return {f"{prefix}mass_ptr": summaries.log_mass, f"{prefix}key_mean_ptr": summaries.key_mean}
