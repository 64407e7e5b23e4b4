"""Exact attention to many documents in one call: FlashAttention's operator of PyTorch, with a differentiable lse.

It is the operator behind `torch.nn.attention.varlen.varlen_attn`, whose lse has no gradient. It serves float16 and
bfloat16 on CUDA.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from muse_attention.core.local import WIDEST_FLASH, equal_dims, with_gradient_of_lse
from muse_attention.core.structures import Partial

FORWARD = torch.ops.aten._flash_attention_forward.default
BACKWARD = torch.ops.aten._flash_attention_backward.default


def serves(query: Tensor, value: Tensor) -> bool:
    """Whether the operator takes these tensors, and one more column for the gradient of the lse."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and max(query.shape[-1], value.shape[-1] + 1) <= WIDEST_FLASH
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[int, ...],
    *,
    is_causal: bool,
    scale: float,
    window: int | None = None,
    known: Partial | None = None,
) -> Partial:
    """Attention inside each document, documents one after another.

    Args:
        query: (tokens, heads, D)
        key: (tokens, key heads, D)
        value: (tokens, key heads, Dv)
        lengths: lengths of all documents
        window: attend to the last `window` tokens only, the token itself included
        known: output and lse of an earlier call, to differentiate them again without computing them again

    Returns:
        output (tokens, heads, Dv) and lse (heads, tokens) float32
    """
    # The operator takes either a causal mask or a window, which looks back only.
    windows = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    out, lse = _Attention.apply(
        query, key, value, lengths, is_causal and window is None, {"scale": scale, **windows}, known
    )
    return Partial(out, lse)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        is_causal: bool,
        options: dict[str, Any],
        known: Partial | None,
    ) -> tuple[Tensor, Tensor]:
        ends, longest = cumulative_lengths(lengths, query.device), max(lengths)
        if known is None:
            out, lse, *random_state, _ = FORWARD(
                *equal_dims((query, key, value), "flash"), ends, ends, longest, longest, 0.0, is_causal, False,
                **options,
            )  # fmt: skip
            out = out if out.shape[-1] == value.shape[-1] else out[..., : value.shape[-1]].contiguous()
        else:
            out, lse = known.out.contiguous(), known.lse.contiguous()
            # Placeholders for the random state of dropout, which the backward operator takes but does not read.
            random_state = [query.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ())]
        ctx.save_for_backward(query, key, value, out, lse, ends, *random_state)
        ctx.settings = (longest, is_causal, options)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, ends, *random_state = ctx.saved_tensors
        longest, is_causal, options = ctx.settings
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        dims = (query.shape[-1], key.shape[-1], value.shape[-1])
        if grad_lse is not None:
            value, out, grad_out = with_gradient_of_lse(grad_lse.T, value, out, grad_out)
        query, key, value, out, grad_out = equal_dims((query, key, value, out, grad_out), "flash")
        gradients = BACKWARD(
            grad_out, query, key, value, out, lse, ends, ends, longest, longest, 0.0, is_causal, *random_state,
            **options,
        )  # fmt: skip
        return *(gradient[..., :dim] for gradient, dim in zip(gradients, dims, strict=True)), None, None, None, None


def cumulative_lengths(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """0 and the end of each document, int32, on the device. All layers of a batch share it; the host does not wait."""
    return _cumulative_lengths(lengths, device, torch.cuda.current_stream(device).cuda_stream)


@functools.lru_cache(maxsize=64)
def _cumulative_lengths(lengths: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """For one stream: another could read it before it is copied."""
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, pin_memory=True)
    return ends.to(device, non_blocking=True)
