"""PyTorch's `flex_attention` with a sparse mask: a sliding window, or blocks along the diagonal.

The kernel and the mask of a length are compiled at the first call, and kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from muse_attention.core.arguments import check_arguments

Pattern = Literal["window", "blocks"]

_MASKS_KEPT = 4
"""The mask of a million tokens has hundreds of megabytes."""
_MOST_SHAPES = 64
"""The most shapes to compile for in one process."""


def sparse_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    pattern: Pattern,
    size: int,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to the last `size` keys (on either side unless `is_causal`), or to the keys of the own block."""
    query, factor = check_arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    check_flex(query.device.type)
    mask = _block_mask(pattern, size, is_causal, query.shape[2], query.device)
    # Always with the lse, which the kernel needs for its backward pass anyway: one compilation less.
    out, aux = _compile_and_call(
        flex_attention,
        *(query, key, value),
        block_mask=mask,
        scale=factor,
        enable_gqa=enable_gqa,
        return_aux=AuxRequest(lse=True),
    )
    return (out, aux.lse) if return_lse else out


def check_flex(device: str) -> None:
    """Raise ValueError unless it runs on this kind of device."""
    if device != "cuda":
        raise ValueError(f"flex_attention is compiled for CUDA, not for {device}; use block_diagonal there")


def visible(pattern: Pattern, size: int, is_causal: bool) -> Callable[[Any, Any, Any, Any], Tensor]:
    """Which keys a query sees, by their positions."""

    def in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query - key
        return (distance >= 0) & (distance < size) if is_causal else distance.abs() < size

    def in_own_block(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_own = query // size == key // size
        return is_own & (query >= key) if is_causal else is_own

    return in_window if pattern == "window" else in_own_block


@functools.lru_cache(maxsize=_MASKS_KEPT)
def _block_mask(pattern: Pattern, size: int, is_causal: bool, length: int, device: torch.device) -> BlockMask:
    mask: BlockMask = _compile_and_call(
        create_block_mask, visible(pattern, size, is_causal), None, None, length, length, device=device
    )
    return mask


def _compile_and_call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Compile for each shape, and call. As one graph: past the limit PyTorch raises, and runs nothing uncompiled."""
    with torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES):
        return _compiled(function)(*arguments, **options)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)
