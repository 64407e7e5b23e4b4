"""Tensors of every kind of strides, with NaN in the memory beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def _beside_nan(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return like.new_full(shape, math.nan)


def _inside(tensor: Tensor) -> Tensor:
    around = _beside_nan(tuple(size + 2 for size in tensor.shape), tensor)
    view = around[1:-1, 1:-1, 1:-1, 1:-1]
    view.copy_(tensor)
    return view


def _every_other(dim: int) -> Callable[[Tensor], Tensor]:
    def lay_out(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = 2 * shape[dim] + 1
        around = _beside_nan(tuple(shape), tensor)
        view = around.narrow(dim, 1, 2 * tensor.shape[dim]).unfold(dim, 1, 2).squeeze(-1)
        view.copy_(tensor)
        return view

    return lay_out


def _expanded(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.narrow(dim, 0, 1).contiguous().expand(tensor.shape)


def _windows(tensor: Tensor) -> Tensor:
    """Rows that overlap: each begins one number after the one before."""
    line = tensor.new_empty(tensor.shape[0], tensor.shape[1], tensor.shape[2] + tensor.shape[3] - 1)
    line.copy_(torch.cat([tensor[..., 0], tensor[:, :, -1, 1:]], dim=-1))
    return line.unfold(2, tensor.shape[3], 1)


def _one_number_off(tensor: Tensor) -> Tensor:
    """Contiguous, but not where wide loads of a GPU can begin."""
    view = _beside_nan((tensor.numel() + 1,), tensor)[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor.contiguous(),
    "one number off": _one_number_off,
    "length before heads": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "columns before rows": lambda tensor: tensor.mT.contiguous().mT,
    "channels last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "batch last": lambda tensor: tensor.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0),
    "inside a larger tensor": _inside,
    "every other column": _every_other(3),
    "every other token": _every_other(2),
    "every other head": _every_other(1),
    "one column expanded": _expanded(3),
    "one token expanded": _expanded(2),
    "one head expanded": _expanded(1),
    "overlapping windows": _windows,
}


def against_copies(
    attend: Callable[..., Sequence[Tensor]], strided: Sequence[Tensor], layout: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients for tensors of some strides, and for their contiguous copies.

    `layout` is that of the gradient of the first output, which has the shape of the first tensor.
    """
    copies = [tensor.contiguous().clone().requires_grad_() for tensor in strided]
    strided = [tensor.detach().requires_grad_() for tensor in strided]
    weight = layout(torch.randn_like(copies[0]))
    results = []
    for tensors, of_out in ((strided, weight), (copies, weight.contiguous().clone())):
        outputs = attend(*tensors)
        weights = [of_out, *(torch.ones_like(other) for other in outputs[1:])]
        results.append([*outputs, *torch.autograd.grad(outputs, tensors, weights)])
    return results[0], results[1]


def interleaved(tensors: list[Tensor]) -> list[Tensor]:
    """As one projection to queries, keys and values gives them: rows of one table."""
    rows = [tensor.transpose(1, 2).flatten(2) for tensor in tensors]
    table = torch.cat([*rows, _beside_nan((*rows[0].shape[:2], 1), rows[0])], dim=-1)
    views = table.split([row.shape[-1] for row in rows] + [1], dim=-1)
    return [
        view.unflatten(2, (tensor.shape[1], tensor.shape[3])).transpose(1, 2)
        for view, tensor in zip(views, tensors, strict=False)
    ]
