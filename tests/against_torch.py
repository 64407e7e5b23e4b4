"""The Triton backend against the `torch` backend: the same clusters and selection, at most twice the error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from muse_attention import MuSeConfig, ops
from muse_attention.backends.reference import reference_attention
from muse_attention.core.call import Call
from tests.shapes import Shape


def assert_at_most_twice_the_error_of_torch(
    shape: Shape, dtype: torch.dtype, *, poison_memory: Callable[[], None] = lambda: None
) -> None:
    """Output, lse and all gradients, against the reference in float64. `poison_memory` comes before either pass."""
    config = MuSeConfig.parse(shape.config)
    inputs = shape.tensors(dtype)
    arguments = {"is_causal": shape.is_causal, "scale": shape.head_dim**-0.5}
    clusters = ops.cluster(*inputs[:2], config, **arguments, backend="triton")
    poison_memory()
    call = Call(*inputs, clusters, config, **arguments)
    merged, selection = ops.attend(call, "triton")
    weights = [torch.randn_like(merged.out), torch.randn_like(merged.lse)]
    poison_memory()
    actual = [merged.out, merged.lse, *torch.autograd.grad(list(vars(merged).values()), inputs, weights)]
    other, _ = ops.attend(call, "torch", selection)
    theirs = [other.out, other.lse, *torch.autograd.grad(list(vars(other).values()), inputs, weights)]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = reference_attention(
        *wide,
        config,
        **arguments,
        clusters=replace(clusters, query_centroids=clusters.query_centroids.double()),
        selection=selection,
    )
    gradients = torch.autograd.grad([exact.out, exact.lse], wide, [weight.double() for weight in weights])
    for name, ours, torchs, expected in zip(
        ("out", "lse", "grad query", "grad key", "grad value"),
        actual,
        theirs,
        [exact.out, exact.lse, *gradients],
        strict=True,
    ):
        error, allowed = _error(ours, expected), 2 * _error(torchs, expected)
        if name == "lse":
            # The `torch` backend has it in float32. Here logits are products of numbers in `dtype`.
            allowed = max(allowed, torch.finfo(dtype).eps / 4)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected.detach()).square().mean().sqrt())
