"""The attention functions that transformers calls."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from muse_attention.attention import muse_attention, resolve_config
from muse_attention.core.sinks import exact_attention_with_sinks, with_sinks
from muse_attention.documents.boundaries import DocumentBoundaries
from muse_attention.documents.rows import EXACT, attend_to_documents, attend_to_each, config_of_document
from muse_attention.huggingface.fallbacks import (
    SHORT,
    attends_to_everything,
    is_exact_only,
    refuse_other_softmax,
    warn_once,
    why_exact,
)
from muse_attention.huggingface.masks import DOCUMENTS, stands_for, visible
from muse_attention.registry import get_attention

AttentionFunction = Callable[..., tuple[Tensor, None]]
"""What transformers calls with (module, query, key, value, attention_mask, dropout, scaling, ...): the tensors are
(batch, heads, length, head_dim) after RoPE, key heads not repeated. It returns (batch, length, heads, head_dim), and no
weights."""


class _Chosen(NamedTuple):
    """An attention in place of exact attention."""

    name: str
    """as it was asked for"""
    unpacked: Callable[..., Any]
    """for rows of one document each, with the signature of `scaled_dot_product_attention`, and `return_lse`"""
    packed: Callable[..., tuple[Tensor, Tensor | None]]
    """for several documents, as `attend_to_documents`"""
    longest_exact: Callable[[DocumentBoundaries | None, int], int] = lambda *_: 0
    """called with the documents and the length of a row; returns the longest that is attended to exactly"""


def named_forward(attention: str) -> AttentionFunction:
    """The function of an attention, named as for `get_attention`."""
    named = get_attention(attention)
    kind, _, settings = attention.partition(":")
    if kind == "exact":
        return exact_forward
    if kind == "muse":
        return functools.partial(muse_forward, settings=settings or None, heed_model=False)
    chosen = _Chosen(attention, named, functools.partial(attend_to_each, attention=named))
    return functools.partial(_forward, chosen=chosen)


def muse_forward(
    module: torch.nn.Module, *arguments: Any, settings: str | None, heed_model: bool, **others: Any
) -> tuple[Tensor, None]:
    """As `_forward`. With `heed_model`, the model's own configuration replaces `settings`."""
    if heed_model:
        own = getattr(getattr(module, "config", None), "muse", None)
        if own is not None and not isinstance(own, str):
            raise ValueError(f"model.config.muse={own!r} must be a string like 'QK32R2SP1B1k'")
        settings = settings if own is None else own
    chosen = _Chosen(
        "muse",
        functools.partial(muse_attention, config=settings),
        functools.partial(attend_to_documents, config=settings),
        functools.partial(_longest_exact, settings),
    )
    return _forward(module, *arguments, chosen=chosen, **others)


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    chosen: _Chosen | None,
    **others: Any,
) -> tuple[Tensor, None]:
    refuse_other_softmax(module, others)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # The compiler leaves packed documents out of its graphs: which kernels run depends on their lengths.
    attend = _attend_uncompiled if stands_for(DOCUMENTS, attention_mask) else _attend
    return attend(module, query, key, value, attention_mask, dropout, scaling, is_causal, chosen, others), None


exact_forward: AttentionFunction = functools.partial(_forward, chosen=None)
"""Exact attention: masks, documents, caches, windows, sinks and dropout, but no softcap."""


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool,
    chosen: _Chosen | None,
    others: dict[str, Any],
) -> Tensor:
    """(batch, length, heads, head_dim)"""
    has_window = not attends_to_everything(module, others)
    seen = visible(module, query, key, attention_mask, is_causal, others, has_window=has_window)
    sinks: Tensor | None = others.get("s_aux")
    reason = None if chosen is None else why_exact(module, query, key, seen, dropout, others, chosen.longest_exact)
    if chosen is not None and reason is not None:
        warn_once(chosen.name, reason)
    length = query.shape[2]  # a static cache has room for more keys, which no query sees yet
    if seen.documents is not None and (reason is None or reason == SHORT) and not is_exact_only(dropout, others):
        attend = functools.partial(attend_to_documents, config=EXACT) if chosen is None else chosen.packed
        rows = (tensor[:, :, :length].transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        scale = 1 / math.sqrt(query.shape[3]) if scaling is None else scaling
        settings: dict[str, Any] = {"is_causal": seen.is_causal, "scale": scale, "return_lse": sinks is not None}
        out, lse = attend(*rows, seen.documents, **settings)
        out = out.unflatten(0, (query.shape[0], length)).transpose(1, 2)
        if sinks is not None and lse is not None:
            out = with_sinks(out, lse.unflatten(1, (query.shape[0], length)).transpose(0, 1), sinks)
    elif chosen is None or reason is not None:
        mask = seen.as_mask(query.shape[0], query.device)
        if mask is not None and mask.shape[-1] < key.shape[2] and seen.documents is not None:
            key, value = key[:, :, : mask.shape[-1]], value[:, :, : mask.shape[-1]]
        if sinks is None:
            inputs = (module, query, key, value, mask, dropout, scaling)
            return sdpa_attention_forward(*inputs, is_causal=seen.is_causal, **others)[0]
        is_causal = seen.is_causal and length > 1
        out = exact_attention_with_sinks(
            query, key, value, sinks, mask, is_causal=is_causal, scale=scaling, dropout=dropout
        )
    else:
        key, value = key[:, :, :length], value[:, :, :length]
        settings = {"is_causal": seen.is_causal, "scale": scaling, "enable_gqa": True}
        if sinks is None:
            out = chosen.unpacked(query, key, value, **settings)
        else:
            out, lse = chosen.unpacked(query, key, value, **settings, return_lse=True)
            out = with_sinks(out, lse, sinks)
    return out.transpose(1, 2).contiguous()


_attend_uncompiled = _disable_dynamo(_attend)


def _longest_exact(settings: str | None, documents: DocumentBoundaries | None, length: int) -> int:
    config = resolve_config(settings, length) if documents is None else config_of_document(settings, length)
    return config.block_size
