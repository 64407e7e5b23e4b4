"""How far the gradients of an attention are from those of exact attention.

The gradient of the output is Gaussian noise from a seed, for each head as large as the exact output. A head's error is
that of its whole gradient: `sum |dq - dq_exact|^2 / sum |dq_exact|^2` over all queries, and likewise for keys and
values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muse_attention.baselines import exact_attention
from muse_attention.registry import Attention

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of query, key and value."""


@dataclass(frozen=True)
class GradientErrors:
    """Relative squared errors of each head's gradient, float64."""

    query_gradient_error: Tensor
    """(batch, query heads)"""
    key_gradient_error: Tensor
    """(batch, key heads)"""
    value_gradient_error: Tensor
    """(batch, key heads)"""


@dataclass(frozen=True)
class ExactGradients:
    """Gradients of exact attention, with which several attentions are compared on the same tensors."""

    grad_out: Tensor
    gradients: Gradients

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, *, seed: int = 0, **arguments: Any) -> ExactGradients:
        with torch.no_grad():
            out = exact_attention(query, key, value, **arguments)
        assert isinstance(out, Tensor)
        size = out.double().square().mean((2, 3), keepdim=True).sqrt()
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.device)
        grad_out = (noise * size).to(out.dtype)
        return cls(grad_out, _gradients(exact_attention, query, key, value, grad_out, arguments))


def measure_gradients(
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    exact: ExactGradients | None = None,
    **arguments: Any,
) -> GradientErrors:
    """Gradients of an attention against those of exact attention on the same tensors; pass `exact` if it is known."""
    exact = exact or ExactGradients.of(query, key, value, **arguments)
    gradients = _gradients(attention, query, key, value, exact.grad_out, arguments)
    return GradientErrors(*(_error(*pair) for pair in zip(gradients, exact.gradients, strict=True)))


def _gradients(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, arguments: dict[str, Any]
) -> Gradients:
    with torch.enable_grad():
        query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
        out = attention(query, key, value, **arguments)
        grad_query, grad_key, grad_value = torch.autograd.grad(out, (query, key, value), grad_out)
    return grad_query, grad_key, grad_value


def _error(gradient: Tensor, exact: Tensor) -> Tensor:
    error = (gradient.double() - exact.double()).square().sum((2, 3))
    return torch.where(error == 0, 0, error / exact.double().square().sum((2, 3)))
