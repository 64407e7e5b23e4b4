"""Exact attention by the fused operators, with a differentiable lse: to all, or inside each block alone."""

from __future__ import annotations

from torch import Tensor

from muse_attention import ops
from muse_attention.config import MuSeConfig
from muse_attention.core.arguments import check_arguments
from muse_attention.core.call import Call
from muse_attention.core.sides import single_cluster

_ONE_BLOCK = 1 << 40
"""A block longer than any sequence."""


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each query to all it may see: one block, attended to exactly."""
    return block_diagonal_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        block_size=_ONE_BLOCK,
        return_lse=return_lse,
    )


def block_diagonal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    block_size: int,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each query to its own block: MuSe attention with neither summaries nor retrieval."""
    query, factor = check_arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    config = MuSeConfig(query_clusters=1, key_clusters=1, retrieved_clusters=0, monopole=False, block_size=block_size)
    call = Call(query, key, value, single_cluster(query, key), config, is_causal, factor)
    merged, _ = ops.attend(call, "torch")
    return (merged.out, merged.lse) if return_lse else merged.out
