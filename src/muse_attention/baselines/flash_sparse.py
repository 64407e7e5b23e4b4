"""Attention of flash-sparse-attn: exact over all tiles of keys but those whose largest weight is below a threshold.

A tile of keys is passed over if no query of a tile would give any of its keys a weight above the threshold, divided by
the number of keys that the query sees. The logits of all keys are computed to find out, so the time still grows with
the square of the length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from muse_attention.core.arguments import check_arguments


def flash_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    threshold: float = 1.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, None]:
    """Attention without the tiles in which all weights are below `threshold` of their mean; the package's default is 1.

    With `return_lse` the lse is None: that of the package has no gradient.
    """
    query, factor = check_arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    check_flash_sparse(query.device.type)
    rows = [tensor.transpose(1, 2) for tensor in (query, key, value)]  # (batch, length, heads, head_dim)
    out: Tensor = _load()(*rows, is_causal=is_causal, softmax_scale=factor, softmax_threshold=threshold).transpose(1, 2)
    return (out, None) if return_lse else out


def check_flash_sparse(device: str) -> None:
    """Raise ValueError unless the kernels run on this kind of device, and are installed."""
    if device != "cuda":
        raise ValueError(f"flash_sparse_attn has kernels for CUDA, not for {device}; use moba there")
    _load()


def _load() -> Callable[..., Any]:
    try:
        from flash_sparse_attn import flash_sparse_attn_func
    except ImportError as error:
        raise ValueError(f"flash_sparse_attn is not installed ({error}); pip install flash-sparse-attn") from None
    return flash_sparse_attn_func
