"""What the reference returns: the output and everything that explains it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from muse_attention.core.structures import Clusters, Selection


@dataclass(frozen=True)
class Reference:
    out: Tensor
    """(batch, heads, N, Dv)"""
    lse: Tensor
    """(batch, heads, N)"""
    clusters: Clusters
    selection: Selection
    weights: Tensor
    """(batch, heads, N, terms): the softmax. Own block by key | retrieved by key | summaries"""
    stands_for: Tensor
    """(batch, heads, N, N) int: in how many of query n's terms key m is contained"""
