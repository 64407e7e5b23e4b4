"""Where exact attention runs instead, with a warning, and what every attention of the library refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from muse_attention.documents.boundaries import DocumentBoundaries
from muse_attention.huggingface.masks import GENERAL, Visible, is_general

_OTHER_SOFTMAX = {
    "softcap": "caps its logits",
    "indices": "selects the keys of each query",
    "block_indices": "selects the keys of each query",
}
_WINDOWED = ("sliding_attention", "chunked_attention")
_EXACT_ONLY = ("position_bias", "cache")
"""Arguments that change the attention, and that transformers' exact attention understands."""
SHORT = "the input, or every document in it, is no longer than one block"
_said: set[tuple[str, str]] = set()
"""Attentions and reasons that a warning has named."""


class ExactAttentionWarning(UserWarning):
    """Exact attention runs where another attention was requested."""


def why_exact(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    seen: Visible,
    dropout: float,
    others: dict[str, Any],
    longest_exact: Callable[[DocumentBoundaries | None, int], int],
) -> str | None:
    """Why exact attention runs; None if documents attend to all of themselves, or to all of their past.

    Args:
        longest_exact: called with the documents and the longest length; returns the longest that is attended to exactly
    """
    if not attends_to_everything(module, others):
        return "a layer with a sliding window or chunks keeps them"
    queries, keys = query.shape[2], key.shape[2]
    if queries == 1:
        return "decoding attends to a KV cache"
    if seen.mask is not None and is_general(seen.mask):
        raise ValueError(f"{type(module).__name__}: {GENERAL}")
    if any(others.get(argument) is not None for argument in _EXACT_ONLY):
        return "a layer adds a bias to its logits, or reads a paged KV cache"
    if seen.mask is not None:
        return "the batch continues a KV cache, has padding inside a document, or is padded in a compiled model"
    if queries != keys and not (seen.is_causal and queries < keys):
        return "queries attend to another sequence"
    if dropout > 0:
        return "the model trains with attention dropout (attention_dropout=0 in its config switches it off)"
    longest = queries if seen.documents is None else seen.documents.longest
    if longest <= longest_exact(seen.documents, longest):
        return SHORT
    return None


def is_exact_only(dropout: float, others: dict[str, Any]) -> bool:
    return dropout > 0 or any(others.get(argument) is not None for argument in _EXACT_ONLY)


def attends_to_everything(module: torch.nn.Module, others: dict[str, Any]) -> bool:
    """Whether the layer has no window. Masks of short inputs do not show a window, so the layer is asked."""
    own = getattr(module, "sliding_window", None)  # the same in all layers of some models, which pass it in some
    if others.get("sliding_window", own) is not None:
        return False
    kind = getattr(module, "layer_type", None)
    if isinstance(kind, str):
        return kind not in _WINDOWED
    types = getattr(getattr(module, "config", None), "layer_types", None) or []
    windowed = [index for index, kind in enumerate(types) if kind in _WINDOWED]
    # (Last, because a compiled layer that asks for its index serves no other layer.)
    return not windowed or getattr(module, "layer_idx", None) not in windowed


def refuse_other_softmax(module: torch.nn.Module, others: dict[str, Any]) -> None:
    """Raise ValueError for attention that is not a plain softmax: transformers' SDPA would ignore the rest."""
    reasons = [difference for argument, difference in _OTHER_SOFTMAX.items() if others.get(argument) is not None]
    if getattr(module, "compressor", None) is not None:  # of DeepSeek V4: their mask is no boolean one
        reasons.append("adds keys of its own")
    if reasons:
        raise ValueError(f"{type(module).__name__} {reasons[0]}: only attn_implementation='eager' does that; use it")


def warn_once(attention: str, reason: str) -> None:
    if (attention, reason) not in _said:
        _said.add((attention, reason))
        warnings.warn(f"{attention}: exact attention runs where {reason}", ExactAttentionWarning, stacklevel=2)


warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in config.py: said when it is compiled


def warn_again() -> None:
    """Let each warning appear once more."""
    _said.clear()
