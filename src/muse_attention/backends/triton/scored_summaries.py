"""The tables that hold summaries, what is seen of them from each block, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.backends.triton.numbers import gradient_dtype
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Summaries


@dataclass(frozen=True)
class ScoredSummaries(Summaries):
    """Summaries, and how far the keys behind them are apart. (Without second order nobody looks at that.)"""

    deviation: Tensor
    """(H, Q, nb, K): square root of `E |k - kbar|^2 / D` under the summary's weights"""
    most: Tensor
    """(H, nb, K): `sqrt(2 log n)` of `n` keys"""

    @classmethod
    def new(cls, shape: tuple[int, ...], keys: Tensor, value_dim: int, *, has_spread: bool) -> ScoredSummaries:
        """Room for those of a `shape` (H, Q, nb, K), of `keys`."""
        heads, _, blocks, key_clusters = shape
        log_mass = keys.new_empty(shape, dtype=compute_dtype(keys.dtype))
        return cls(
            log_mass,
            keys.new_empty(*shape, keys.shape[-1]),
            keys.new_empty(*shape, value_dim),
            torch.empty_like(log_mass) if has_spread else log_mass,
            log_mass.new_empty(heads, blocks, key_clusters) if has_spread else log_mass,
        )

    def arguments(self, prefix: str = "") -> dict[str, Tensor]:
        """As kernels take them."""
        return {**means(self, prefix), **self.of_logits(prefix)}

    def of_logits(self, prefix: str = "") -> dict[str, Tensor]:
        """As kernels take what tells logits: all but the means of values."""
        return {
            f"{prefix}mass_ptr": self.log_mass,
            f"{prefix}key_mean_ptr": self.key_mean,
            f"{prefix}deviation_ptr": self.deviation,
            f"{prefix}most_ptr": self.most,
        }


def means(summaries: Summaries, prefix: str = "") -> dict[str, Tensor]:
    """Log-masses and means, or their gradients, as kernels take them."""
    names = (f"{prefix}mass_ptr", f"{prefix}key_mean_ptr", f"{prefix}value_mean_ptr")
    return dict(zip(names, summaries.parts(), strict=True))


@dataclass(frozen=True)
class Accumulated:
    """For each block, one summary per key cluster of all the blocks it sees: the earlier ones, or all others."""

    seen: ScoredSummaries
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
    def most(self) -> int:
        return self.keys.shape[1]


def new_gradient(of_buckets: Summaries) -> Summaries:
    """Room for the gradient of summaries; every entry is to be written."""
    dtype = gradient_dtype(of_buckets.key_mean.dtype)
    return Summaries(
        torch.empty_like(of_buckets.log_mass),
        torch.empty_like(of_buckets.key_mean, dtype=dtype),
        torch.empty_like(of_buckets.value_mean, dtype=dtype),
    )
