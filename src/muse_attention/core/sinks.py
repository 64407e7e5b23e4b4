"""Attention sinks: one more logit for each head, which takes weight and has no value.

With the lse of an attention, a sink is a factor of its output: `exp(lse) / (exp(lse) + exp(sink))`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

_MULTIPLE = 8
"""The fused operators need head dimensions that are multiples of this."""


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The output of an attention, (batch, heads, N, Dv), with sinks, (heads,), added to its softmax."""
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
    return out * share[..., None].to(out.dtype)


def exact_attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    attention_mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """PyTorch's exact attention with any mask: a sink is a key of its own, which every query sees.

    Args:
        query: (batch, heads, queries, D)
        key: (batch, key heads, keys, D)
        value: (batch, key heads, keys, Dv)
        sinks: (heads,)
        attention_mask: boolean or added to the logits, (batch, heads or 1, queries, keys); None for a mask by
            `is_causal`, aligned to the first key

    Returns:
        (batch, heads, queries, Dv)
    """
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    batch, heads, queries, dim = query.shape
    keys = key.shape[2]
    key, value = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key, value))
    if attention_mask is None:
        attention_mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device)
        attention_mask = attention_mask.tril() if is_causal else attention_mask
    visible = attention_mask.new_full((1,), 1 if attention_mask.dtype == torch.bool else 0)
    attention_mask = torch.cat([attention_mask, visible.expand(*attention_mask.shape[:3], 1)], -1)
    # One more dimension, in which the sink's key is 1 and all others are 0, and queries are the logit.
    width = -(-(dim + 1) // _MULTIPLE) * _MULTIPLE - dim - 1
    logit = (sinks.to(query.dtype) / scale)[:, None, None].expand(batch, heads, queries, 1)
    query = pad(torch.cat([query, logit], -1), (0, width))
    sink_key = pad(key.new_ones(batch, heads, 1, 1), (dim, width))
    key = torch.cat([pad(key, (0, 1 + width)), sink_key], 2)
    return scaled_dot_product_attention(
        query, key, pad(value, (0, 0, 0, 1)), attn_mask=attention_mask, dropout_p=dropout, scale=scale
    )
