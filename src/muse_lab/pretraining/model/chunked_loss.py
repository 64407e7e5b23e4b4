"""Cross-entropy of a language model without all of its logits: they exist for a few rows at a time.

The gradient of a logit is `softmax - onehot`, known as soon as the logit is. So the forward pass turns each chunk of
logits into its share of the loss and of both gradients, and forgets it; the backward pass only scales them. To autograd
and `torch.compile` it is one operator, `muse_attention::chunked_cross_entropy`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muse_attention.backends.triton.limits import HAS_TRITON
from muse_attention.core.precision import compute_dtype
from muse_attention.ops import NAMESPACE

CHUNK_BYTES = 1 << 28
"""Bytes of logits that are in memory at the same time: with a vocabulary of 32768, 2048 rows in float32."""
IGNORED = -100
"""The target of a row that does not count."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """`cross_entropy(hidden @ weight.T, targets)`, in nats, with the softmax in at least float32.

    Args:
        hidden: (N, d); under autocast it and `weight` are multiplied in the autocast dtype
        weight: (vocabulary, d)
        targets: (N) integers below the vocabulary, or `IGNORED`
        reduction: "mean", over the rows that count (nan if there are none), or "sum"
        chunk_size: rows whose logits are in memory at the same time; None is as many as `CHUNK_BYTES` hold
    """
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets is {targets.dtype} {tuple(targets.shape)}; it must be int64 ({hidden.shape[0]},)")
    dtype = hidden.dtype
    if dtype != torch.float64 and torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    if chunk_size is None:
        chunk_size = max(1, CHUNK_BYTES // (weight.shape[0] * dtype.itemsize))
    differentiate = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    total, _, _ = _forward(hidden, weight, targets, chunk_size, dtype, differentiate)
    return total / (targets != IGNORED).sum() if reduction == "mean" else total


@torch.library.custom_op(f"{NAMESPACE}::chunked_cross_entropy", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_size: int,
    dtype: torch.dtype,
    differentiate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss, and its gradients for an incoming gradient of one; empty if they are not needed."""
    wide = compute_dtype(dtype)
    total = hidden.new_zeros((), dtype=wide)
    grad_hidden = torch.empty_like(hidden) if differentiate else hidden.new_empty(0)
    grad_weight = torch.zeros_like(weight, dtype=wide) if differentiate else weight.new_empty(0)
    with torch.autocast(hidden.device.type, enabled=False):
        output_weight = weight.to(dtype)
        for begin in range(0, hidden.shape[0], chunk_size):
            rows = slice(begin, begin + chunk_size)
            states = hidden[rows].to(dtype)
            loss, grad_logits = _loss_of_rows(states @ output_weight.mT, targets[rows], differentiate=differentiate)
            total += loss
            if differentiate:
                grad_hidden[rows] = grad_logits @ output_weight
                grad_weight += grad_logits.mT @ states
    return total, grad_hidden, grad_weight.to(weight.dtype)


def _loss_of_rows(logits: Tensor, targets: Tensor, *, differentiate: bool) -> tuple[Tensor, Tensor]:
    """The summed loss of some rows, and the gradients of their logits if wanted; overwrites the logits."""
    if logits.device.type == "cuda" and HAS_TRITON and logits.dtype != torch.float64:
        from muse_lab.pretraining.model.loss_kernel import replace_by_gradients

        losses = replace_by_gradients(logits, targets, ignore_index=IGNORED, differentiate=differentiate)
        return losses.sum(), logits
    dtype, counts = logits.dtype, targets[:, None] != IGNORED
    target = torch.where(counts, targets[:, None], 0)
    logits = logits.to(compute_dtype(dtype))
    lse = logits.logsumexp(-1, keepdim=True)
    loss = torch.where(counts, lse - logits.gather(1, target), 0).sum()
    if differentiate:
        logits.sub_(lse).exp_()
        logits.scatter_add_(1, target, logits.new_full((1, 1), -1).expand_as(target)).mul_(counts)
    return loss, logits.to(dtype)


@_forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_size: int,
    dtype: torch.dtype,
    differentiate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty((), dtype=compute_dtype(dtype)),
        torch.empty_like(hidden) if differentiate else hidden.new_empty(0),
        torch.empty_like(weight) if differentiate else weight.new_empty(0),
    )


@torch.library.custom_op(f"{NAMESPACE}::chunked_cross_entropy_backward", mutates_args=())
def _backward(grad_total: Tensor, grad_hidden: Tensor, grad_weight: Tensor) -> tuple[Tensor, Tensor]:
    return grad_hidden * grad_total, grad_weight * grad_total


@_backward.register_fake
def _(grad_total: Tensor, grad_hidden: Tensor, grad_weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad_hidden), torch.empty_like(grad_weight)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, grad_hidden, grad_weight = output
    ctx.mark_non_differentiable(grad_hidden, grad_weight)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad_hidden, grad_weight)


def _differentiate(ctx: Any, grad_total: Tensor | None, *_: None) -> tuple[Any, ...]:
    if grad_total is None:
        return (None,) * 6
    return (*_backward(grad_total, *ctx.saved_tensors), *(None,) * 4)


_forward.register_autograd(_differentiate, setup_context=_save_for_backward)


def _refuse_double_backward(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(
        "chunked_cross_entropy can be differentiated only once: for second derivatives use torch's cross_entropy"
    )


_backward.register_autograd(_refuse_double_backward)
