"""How far an attention is from exact attention: the paper's two measures, the gap of the lse, and the leak.

These are measurements of the method, to be reported. Whether a backend computes the method correctly is another
question, and the business of the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muse_attention.baselines import exact_attention
from muse_attention.by_name import Attention


@dataclass(frozen=True)
class Fidelity:
    """Means over the queries of each head, (batch, heads), float64."""

    relative_squared_error: Tensor
    """`|o - o_exact|^2 / |o_exact|^2`, averaged over queries: the paper's RSE"""
    cosine: Tensor
    """cosine of `o` and `o_exact`, averaged over queries: the paper's correlation"""
    energy_error: Tensor
    """`sum |o - o_exact|^2 / sum |o_exact|^2` over queries: unlike the RSE, not ruled by queries with a small output"""
    lse_gap: Tensor
    """`lse_exact - lse`, averaged over queries; never negative for MuSe, by Jensen's inequality"""

    def pooled(self) -> dict[str, float]:
        """Each measure averaged over all heads, by name."""
        return {name: float(tensor.mean()) for name, tensor in vars(self).items()}


def compare(out: Tensor, exact_out: Tensor, lse: Tensor, exact_lse: Tensor) -> Fidelity:
    """Fidelity of (batch, heads, N, Dv) outputs and (batch, heads, N) lse. Equal outputs have no error, even if 0."""
    out, exact_out = out.detach().double(), exact_out.detach().double()
    error, energy = (out - exact_out).square().sum(-1), exact_out.square().sum(-1)
    return Fidelity(
        relative_squared_error=position_error(out, exact_out).mean(-1),
        cosine=torch.where(error == 0, 1, torch.nn.functional.cosine_similarity(out, exact_out, dim=-1)).mean(-1),
        energy_error=_relative(error.sum(-1), energy.sum(-1)),
        lse_gap=(exact_lse.detach().double() - lse.detach().double()).mean(-1),
    )


def position_error(out: Tensor, exact_out: Tensor) -> Tensor:
    """(batch, heads, N): the relative squared error of each query; inf where only the exact output is 0."""
    out, exact_out = out.detach().double(), exact_out.detach().double()
    return _relative((out - exact_out).square().sum(-1), exact_out.square().sum(-1))


def _relative(error: Tensor, energy: Tensor) -> Tensor:
    return torch.where(error == 0, 0, error / energy)


def measure(attention: Attention, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Fidelity:
    """Run an attention and exact attention on the same tensors, without gradients, and compare them."""
    with torch.no_grad():
        exact_out, exact_lse = exact_attention(query, key, value, return_lse=True, **arguments)
        out, lse = attention(query, key, value, return_lse=True, **arguments)
    return compare(out, exact_out, lse, exact_lse)


def future_influence(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, position: int, **arguments: Any
) -> float:
    """How much the outputs before `position` change when all tokens from there on are replaced by other ones.

    The clustering of MuSe is global, so a later token can move a centroid, and with it the approximation error of an
    earlier output. No value passes that way, but it is a path from the future, and this is its size: the relative
    squared change of the outputs before `position`, averaged over queries. It is 0 for an attention that is causal in
    every respect. The replacements are the sequence's own earlier tokens, in reverse. The attention is called with
    `is_causal=True` and the other `arguments`.
    """
    length = query.shape[2]
    if not 0 < position < length:
        raise ValueError(f"position={position} must lie inside the sequence, between 1 and {length - 1}")
    source = torch.arange(length, device=query.device)
    source[position:] = position - 1 - (source[position:] - position) % position
    with torch.no_grad():
        before = attention(query, key, value, is_causal=True, **arguments)
        after = attention(query[:, :, source], key[:, :, source], value[:, :, source], is_causal=True, **arguments)
    return float(position_error(after[:, :, :position], before[:, :, :position]).mean())
