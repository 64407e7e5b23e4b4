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
from muse_attention.fidelity.error import pool
from muse_attention.registry import Attention

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of query, key and value, or the leaves that they belong to."""


@dataclass(frozen=True)
class GradientErrors:
    """Relative squared errors of each head's gradient, float64."""

    query_gradient_error: Tensor
    """(batch, query heads)"""
    key_gradient_error: Tensor
    """(batch, key heads)"""
    value_gradient_error: Tensor
    """(batch, key heads)"""

    def pooled(self) -> dict[str, float]:
        """Each error averaged over all heads, by name."""
        return pool(vars(self))


@dataclass(frozen=True)
class ExactGradients:
    """Gradients of exact attention, with which several attentions are compared on the same tensors."""

    grad_out: Tensor
    gradients: Gradients

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, *, seed: int = 0, **arguments: Any) -> ExactGradients:
        out, leaves = _forward(exact_attention, query, key, value, arguments)
        size = out.detach().double().square().mean((2, 3), keepdim=True).sqrt()
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.device)
        grad_out = (noise * size).to(out.dtype)
        return cls(grad_out, _backward(out, leaves, grad_out))


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
    gradients = _backward(*_forward(attention, query, key, value, arguments), exact.grad_out)
    return GradientErrors(*(_error(*pair) for pair in zip(gradients, exact.gradients, strict=True)))


def _forward(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]
) -> tuple[Tensor, Gradients]:
    """The output, recorded by autograd, and the leaves of its graph."""
    with torch.enable_grad():
        query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
        out = attention(query, key, value, **arguments)
    assert isinstance(out, Tensor)
    return out, (query, key, value)


def _backward(out: Tensor, leaves: Gradients, grad_out: Tensor) -> Gradients:
    grad_query, grad_key, grad_value = torch.autograd.grad(out, leaves, grad_out)
    return grad_query, grad_key, grad_value


def _error(gradient: Tensor, exact: Tensor) -> Tensor:
    error = (gradient.double() - exact.double()).square().sum((2, 3))
    return torch.where(error == 0, 0, error / exact.double().square().sum((2, 3)))
