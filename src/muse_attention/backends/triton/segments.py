"""The queries of each (query cluster, block): how they are laid out and cut, and scored against summaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.grouping import Groups, Tiles
from muse_attention.backends.triton.numbers import arithmetic, exp_of_less, fitting, load_rows, padded

ROWS_OF_TILE = 64
"""Queries of one segment that one program works on."""


@dataclass(frozen=True)
class Segments:
    """The queries of each (query cluster, block), of all heads."""

    residuals: Tensor
    """(H, N, D), in the order of `groups`"""
    shift: Tensor
    """(H, N), likewise: what the offset of keys, which means of keys lack, adds to all logits of a query"""
    width: Tensor | None
    """(H, N), likewise: norms of the residuals in units of the spread of keys; None if nobody asks for it"""
    adds_mass: bool
    """whether summaries are of second order"""
    groups: Groups
    tiles: Tiles
    blocks: int
    query_clusters: int
    key_clusters: int
    is_causal: bool

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.residuals.shape[1], self.blocks, self.query_clusters, self.key_clusters

    @property
    def constants(self) -> dict[str, Any]:
        head_dim = self.residuals.shape[-1]
        return {
            "D": head_dim,
            "DP": padded(head_dim),
            "IS_CAUSAL": self.is_causal,
            "SECOND_ORDER": self.adds_mass,
            **arithmetic(self.residuals.dtype),
        }

    @property
    def widths(self) -> Tensor:
        """(A kernel takes a tensor even where it does not look at it.)"""
        return self.residuals if self.width is None else self.width

    def few(self, launch: dict[str, int]) -> dict[str, int]:
        """No more columns at a time than there are key clusters."""
        most = padded(self.key_clusters)
        return {name: min(number, most) if name == "CLUSTERS" else number for name, number in launch.items()}

    def fit(self, launch: dict[int, dict[str, int]], value_dim: int) -> dict[str, int]:
        return self.few(fitting(launch, self.residuals.shape[-1], value_dim, self.residuals.dtype))


@triton.jit
def mass_off_centroid(sigma, most):
    """`log E exp(r . (k - kbar))`: `sigma^2 / 2` up to `most`, and from there on the line that continues it: so few
    keys cannot have more."""
    within = tl.minimum(sigma, most)
    return within * (sigma - 0.5 * within)


@triton.jit
def score(
    residual, width, mass, key_mean, deviation, most, first, first_size, cluster, is_cluster, D: tl.constexpr,
    DP: tl.constexpr, SECOND_ORDER: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Means of the keys of the summaries `first + cluster`, and the logits of the queries against them.

    `first_size` is where `most` of these summaries begins.
    """
    means = load_rows(key_mean, first, cluster, is_cluster, D, DP)
    masses = tl.load(mass + first + cluster, mask=is_cluster, other=float("-inf"))
    logits = tl.dot(residual, tl.trans(means), input_precision=PRECISION, out_dtype=ACC) + masses[None, :]
    if SECOND_ORDER:
        deviations = tl.load(deviation + first + cluster, mask=is_cluster, other=0.0)
        mosts = tl.load(most + first_size + cluster, mask=is_cluster, other=0.0)
        logits += mass_off_centroid(width[:, None] * deviations[None, :], mosts[None, :])
    return means, logits


@triton.jit
def include(logits, values, largest, total, weighted, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """Terms into the running softmax."""
    larger = tl.maximum(largest, tl.max(logits, 1))
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    weights = exp_of_less(logits, shift[:, None])
    kept = tl.exp(largest - shift)
    total = total * kept + tl.sum(weights, 1)
    weighted = tl.dot(
        weights.to(values.dtype), values, weighted * kept[:, None], input_precision=PRECISION, out_dtype=ACC
    )
    return larger, total, weighted
