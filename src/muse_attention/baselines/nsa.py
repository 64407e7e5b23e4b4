"""Native sparse attention (Yuan et al., 2025): the blocks whose mean key fits a group of queries best.

Its kernels are those of flash-linear-attention. A trained model has gates for its branches. Here the gate of the
retrieved blocks is 1 and that of the block means is 0, which leaves the part of NSA that approximates softmax
attention. The branch of the means still runs, as it chooses the blocks. There is no sliding window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from muse_attention.core.arguments import check_arguments

_SMALLEST_GROUP = 16


def nsa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    block_size: int = 64,
    retrieved_blocks: int = 16,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, None]:
    """Causal attention to `retrieved_blocks` blocks of `block_size`: the first, the last two, and the best others.

    With `return_lse` the lse is None: the kernels do not give it.
    """
    query, factor = check_arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    check_nsa(query.device.type, query.shape[1], key.shape[1], is_causal=is_causal)
    rows = [tensor.transpose(1, 2) for tensor in (query, key, value)]  # (batch, length, heads, head_dim)
    out: Tensor = _load()(
        *rows,
        g_cmp=query.new_zeros(rows[0].shape[:3]),
        block_counts=retrieved_blocks,
        block_size=block_size,
        window_size=0,
        scale=factor,
    ).transpose(1, 2)
    return (out, None) if return_lse else out


def check_nsa(device: str, heads: int, key_heads: int, *, is_causal: bool) -> None:
    """Raise ValueError unless the kernels serve such a call, and are installed."""
    if device != "cuda":
        raise ValueError(f"nsa has kernels for CUDA, not for {device}; use moba there")
    if not is_causal:
        raise ValueError("nsa is causal; leave out --no-causal, or pass is_causal=True")
    group = heads // key_heads
    if group < _SMALLEST_GROUP or group & (group - 1):
        raise ValueError(
            f"nsa needs {_SMALLEST_GROUP}, 32, 64, ... heads for each key head, not {group}; use 64 heads, 4 key heads"
        )
    _load()


def _load() -> Callable[..., Any]:
    try:
        from fla.ops.nsa import parallel_nsa
    except ImportError as error:
        raise ValueError(f"nsa needs flash-linear-attention ({error}); pip install flash-linear-attention") from None
    return parallel_nsa
