"""Causal attention of each token to itself and the `window - 1` tokens before it, in linear memory.

On CUDA in half precision FlashAttention computes it, on GPUs that have it. Elsewhere the sequence is cut into blocks of
one window. A block sees keys in itself and in the block before, always in the same band, so one (window, 2 window) mask
serves all blocks in one call of `scaled_dot_product_attention`. The first block has none before it, and is causal.

PyTorch's `flex_attention` would compute half as many logits, but has no backward pass on a CPU, and is dense unless it
is compiled. These blocks run wherever `scaled_dot_product_attention` does, compiled or not. At 64k tokens and a window
of 256, their 512 logits for each query are 1/64 of what a causal layer without a window computes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

_MULTIPLE_FLASH = 8
"""FlashAttention serves head dimensions that are multiples of this."""
_WIDE_FLASH, _WIDEST_FLASH = 192, 256
"""The largest head dimension on all GPUs that have it, and on those whose backward pass serves more."""


def sliding_window_attention(query: Tensor, key: Tensor, value: Tensor, *, window: int) -> Tensor:
    """Exact attention to the last `window` tokens, the query's own among them; all are (batch, heads, length, dim)."""
    attend = _attend_by_flash if _has_flash(query) else _attend_in_blocks
    return attend(query, key, value, window)


def _has_flash(query: Tensor) -> bool:
    """Whether FlashAttention serves such tensors on their GPU, gradients included."""
    dim = query.shape[-1]
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and dim % _MULTIPLE_FLASH == 0
        and dim <= _WIDEST_FLASH
        and _may_use_flash(query.device.index)
        and (dim <= _WIDE_FLASH or _serves_widest(query.device.index))
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _may_use_flash(gpu: int) -> bool:
    """Whether the GPU has FlashAttention, and it is not switched off (`torch.backends.cuda.enable_flash_sdp`)."""
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(gpu) >= (8, 0)
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _serves_widest(gpu: int) -> bool:
    """Whether the backward pass fits: it needs the shared memory of an A100 or H100."""
    return torch.cuda.get_device_capability(gpu) in ((8, 0), (9, 0))


def _attend_by_flash(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    length = query.shape[2]
    query, key, value = (_aligned(tensor) for tensor in (query, key, value))
    out, *_ = torch.ops.aten._flash_attention_forward(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)), None, None, length, length, 0.0, False, False,
        window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    out = out.transpose(1, 2)
    return out if torch.compiler.is_compiling() else _WithAlignedGradient.apply(out)


class _WithAlignedGradient(torch.autograd.Function):
    """The identity, with an aligned gradient for FlashAttention's backward pass."""

    @staticmethod
    def forward(ctx: object, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: object, grad_out: Tensor) -> Tensor:
        return _aligned(grad_out)


def _aligned(tensor: Tensor) -> Tensor:
    """Rows are contiguous and begin at a multiple of eight, because FlashAttention reads eight numbers at once."""
    starts: tuple[int | torch.SymInt, ...] = tensor.stride()[:-1]
    if not torch.compiler.is_compiling():  # the compiler knows no offsets, and aligns what it makes
        starts = (tensor.storage_offset(), *starts)
    if tensor.stride(-1) == 1 and all(start % _MULTIPLE_FLASH == 0 for start in starts):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    out = scaled_dot_product_attention(query[:, :, :window], key[:, :, :window], value[:, :, :window], is_causal=True)
    if query.shape[2] <= window:
        return out
    query_blocks, key_blocks, value_blocks = (_cut(tensor, window) for tensor in (query, key, value))
    band = torch.ones(window, 2 * window, dtype=torch.bool, device=query.device).tril(window).triu(1)
    later = scaled_dot_product_attention(
        query_blocks[:, 1:].flatten(0, 1),
        _with_previous(key_blocks).flatten(0, 1),
        _with_previous(value_blocks).flatten(0, 1),
        attn_mask=band,
    )
    later = later.unflatten(0, (query.shape[0], -1)).transpose(1, 2).flatten(2, 3)
    return torch.cat([out, later[:, :, : query.shape[2] - window]], dim=2)


def _cut(tensor: Tensor, window: int) -> Tensor:
    """(batch, blocks, heads, window, X); the last block is filled with zeros, which no real query sees."""
    return pad(tensor, (0, 0, 0, -tensor.shape[2] % window)).unflatten(2, (-1, window)).transpose(1, 2)


def _with_previous(blocks: Tensor) -> Tensor:
    """(batch, blocks - 1, heads, 2 window, X): each block but the first, behind the one before it."""
    return torch.cat([blocks[:, :-1], blocks[:, 1:]], dim=3)
