"""The one place for tolerances: two errors, kept apart.

A backend in float64 equals the reference to rounding. A backend in a lower precision is at most twice as far from the
reference in float64 as the reference itself is when plain PyTorch evaluates it in that lower precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDING = 1e-11
"""Of float64 results of order 1 after sums over a few thousand terms."""


def assert_equal_to_rounding(actual: Tensor, expected: Tensor, name: str = "") -> None:
    torch.testing.assert_close(
        actual, expected, rtol=ROUNDING, atol=ROUNDING, msg=lambda text: f"{name}: {text}", check_stride=False
    )


def gradients(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of one seeded function of the results."""
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in results]
    return torch.autograd.grad(
        sum((part.double() * weight).sum() for part, weight in zip(results, weights, strict=True)), inputs
    )


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor], inputs: Sequence[Tensor], what: str = "") -> None:
    """Output, lse, and the gradients of the inputs."""
    ours, theirs = ((*results, *gradients(results, inputs)) for results in (actual, expected))
    names = ("output", "lse", *(f"gradient {index}" for index in range(len(inputs))))
    for name, own, other in zip(names, ours, theirs, strict=True):
        assert_equal_to_rounding(own, other, f"{name} {what}")


def assert_as_accurate_as_pytorch(
    actual: Tensor, in_same_precision: Tensor, exact: Tensor, name: str = "", *, terms: float = 0.0
) -> None:
    """Both the largest and the root-mean-square error are within twice those of plain PyTorch.

    Args:
        terms: size of what cancels in a fused backward pass, in float32. It forms `dO . v` and `delta` separately, so
            their rounding stays where little is left of them, as in the gradient of a single query.
    """
    actual, in_same_precision, exact = actual.detach(), in_same_precision.detach(), exact.detach()
    # Four units in the last place are always allowed: plain PyTorch may happen to be exact.
    rounding = torch.finfo(in_same_precision.dtype).eps * float(exact.abs().max())
    slack = 4 * (rounding + torch.finfo(torch.float32).eps * terms)
    for measure in (lambda error: error.abs().max(), lambda error: error.square().mean().sqrt()):
        ours = float(measure(actual.double() - exact))
        theirs = float(measure(in_same_precision.double() - exact))
        assert ours <= 2 * theirs + slack, f"{name}: error {ours:.3g}, plain PyTorch has {theirs:.3g}"
