"""How far an attention is from exact attention: RSE and cosine as in the paper, the tail of the error, the gap of the
lse, the leak, and what the attention retrieved.

These are measurements of the method. Whether a backend computes the method correctly is checked by the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muse_attention.baselines import exact_attention
from muse_attention.core.recording import recorded_calls
from muse_attention.fidelity.retrieved import Retrieval, measure_retrieval
from muse_attention.registry import Attention

FAR_OFF = 0.1
"""A query with a larger relative squared error counts as far off."""
FOUND = "found_share"
"""The measure that is NaN for heads that look nothing up."""


@dataclass(frozen=True)
class Fidelity:
    """Measures of each head, (batch, heads), float64."""

    relative_squared_error: Tensor
    """`|o - o_exact|^2 / |o_exact|^2`, averaged over queries: the paper's RSE"""
    cosine: Tensor
    """cosine of `o` and `o_exact`, averaged over queries: the paper's correlation"""
    centred_error: Tensor
    """`sum |o - o_exact|^2 / sum |o_exact - m|^2` over queries, where `m` is the mean of `o_exact`: unlike in the RSE,
    a part of the output that all queries share does not hide the error"""
    lse_gap: Tensor | None
    """`lse_exact - lse`, averaged over queries; never negative for MuSe without second order, by Jensen's inequality;
    None for an attention that does not give its lse"""
    error_p99: Tensor
    """`|o - o_exact|^2 / |o_exact|^2` that 99% of the queries do not exceed"""
    error_p999: Tensor
    """likewise 99.9%"""
    share_far_off: Tensor
    """share of queries whose relative squared error is above `FAR_OFF`"""
    retrieval: Retrieval | None = None
    """None where nothing is retrieved, or is not known"""

    def by_head(self) -> dict[str, Tensor]:
        """Each measure by name, (batch, heads), retrieval included. Unknown measures are absent."""
        measures = {**vars(self), **({} if self.retrieval is None else vars(self.retrieval))}
        return {name: tensor for name, tensor in measures.items() if isinstance(tensor, Tensor)}

    def pooled(self) -> dict[str, float]:
        """Each measure averaged over all heads, by name, as `pool` does."""
        return pool(self.by_head())


def pool(measures: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean of each measure; `found_share` is averaged over heads that look anything up, and absent without any."""
    means = {name: float(tensor.mean()) for name, tensor in measures.items() if name != FOUND}
    if FOUND in measures and not measures[FOUND].isnan().all():
        means[FOUND] = float(measures[FOUND].nanmean())
    return means


def compare(
    out: Tensor, exact_out: Tensor, lse: Tensor | None, exact_lse: Tensor, retrieval: Retrieval | None = None
) -> Fidelity:
    """Fidelity of (batch, heads, N, Dv) outputs and (batch, heads, N) lse. Equal outputs have no error, even if 0."""
    out, exact_out = out.detach().double(), exact_out.detach().double()
    error, varying = (out - exact_out).square().sum(-1), exact_out - exact_out.mean(-2, keepdim=True)
    of_queries = _relative(error, exact_out.square().sum(-1))
    ordered = of_queries.sort(-1).values
    return Fidelity(
        relative_squared_error=of_queries.mean(-1),
        cosine=torch.where(error == 0, 1, torch.nn.functional.cosine_similarity(out, exact_out, dim=-1)).mean(-1),
        centred_error=_relative(error.sum(-1), varying.square().sum((-2, -1))),
        lse_gap=None if lse is None else (exact_lse.detach().double() - lse.detach().double()).mean(-1),
        error_p99=_percentile(ordered, 990),
        error_p999=_percentile(ordered, 999),
        share_far_off=(of_queries > FAR_OFF).double().mean(-1),
        retrieval=retrieval,
    )


def position_error(out: Tensor, exact_out: Tensor) -> Tensor:
    """(batch, heads, N): the relative squared error of each query; inf where only the exact output is 0."""
    out, exact_out = out.detach().double(), exact_out.detach().double()
    return _relative((out - exact_out).square().sum(-1), exact_out.square().sum(-1))


def _relative(error: Tensor, energy: Tensor) -> Tensor:
    return torch.where(error == 0, 0, error / energy)


def _percentile(ordered: Tensor, thousandths: int) -> Tensor:
    """The smallest number of the ordered last axis that at least this many in a thousand do not exceed."""
    return ordered[..., -(-ordered.shape[-1] * thousandths // 1000) - 1]


def measure(
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    exact: tuple[Tensor, Tensor] | None = None,
    **arguments: Any,
) -> Fidelity:
    """Run an attention and exact attention on the same tensors, without gradients, and compare them.

    `exact` is the output and lse of exact attention, if they are known already. The result includes what was retrieved
    for the attentions of this library.
    """
    with torch.no_grad():
        exact_out, exact_lse = exact or exact_attention(query, key, value, return_lse=True, **arguments)
        with recorded_calls() as calls:
            out, lse = attention(query, key, value, return_lse=True, **arguments)
        retrieval = measure_retrieval(calls[0], exact_lse) if len(calls) == 1 else None
    return compare(out, exact_out, lse, exact_lse, retrieval)


def future_influence(
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: int,
    *,
    replacement: tuple[Tensor, Tensor, Tensor] | None = None,
    **arguments: Any,
) -> float:
    """How much the outputs before `position` change when all tokens from there on are replaced.

    The paper's method clusters the whole sequence, so a later token can move a centroid, and with it the approximation
    error of an earlier output. No value passes that way, but it is a path from the future, and this is its size: the
    relative squared change of the outputs before `position`, averaged over queries. It is 0 for an attention that is
    causal in every respect, as MuSe with a tolerance is.

    Args:
        replacement: query, key and value of other sequences of the same shapes, whose tokens from `position` on are
            taken; None takes the sequence's own earlier tokens, in reverse. On heads of a model give those of another
            text: there a token's position is part of its query and key.
        arguments: passed to the attention, beside `is_causal=True`
    """
    length = query.shape[2]
    if not 0 < position < length:
        raise ValueError(f"position={position} must lie inside the sequence, between 1 and {length - 1}")
    if replacement is None:
        source = position - 1 - torch.arange(length, device=query.device).sub(position) % position
        replacement = (query[:, :, source], key[:, :, source], value[:, :, source])
    new_query, new_key, new_value = (
        torch.cat([old[:, :, :position], new[:, :, position:]], dim=2)
        for old, new in zip((query, key, value), replacement, strict=True)
    )
    with torch.no_grad():
        before = attention(query, key, value, is_causal=True, **arguments)
        after = attention(new_query, new_key, new_value, is_causal=True, **arguments)
    return float(position_error(after[:, :, :position], before[:, :, :position]).mean())
