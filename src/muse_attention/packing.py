"""Packed documents in the arguments of an attention function of transformers.

transformers keeps documents apart, by a mask, where it gets restarting `position_ids`, no `attention_mask` and no KV
cache. Everywhere else it lets them see each other, under every attention without variable lengths: here that is an
error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_REFUSAL = (
    "packed documents would see each other: put one document into a row, or pass position_ids with use_cache=False and "
    "without attention_mask, or pass a 4D attention_mask that separates them"
)


def refuse_packed_documents(batch: int, queries: int, attention_mask: Tensor | None, arguments: dict[str, Any]) -> None:
    """Raise a ValueError where a token sees the document before its own.

    Args:
        batch: rows of the input
        queries: tokens in a row
        attention_mask: what a query sees, (batch, heads or 1, queries or 1, keys), boolean or added to the logits; None
            if it sees all of the row, or of its past
        arguments: the keyword arguments of the attention function. `position_ids`, (batch or 1, queries) or
            (components, batch, queries), and `cu_seq_lens_q`, the ends of all documents in all rows one after another,
            tell where a document starts
    """
    if queries == 1:
        return
    for name in ("position_ids", "cu_seq_lens_q"):
        told = arguments.get(name)
        if not isinstance(told, Tensor) or told.is_meta or _is_known(told):
            continue
        if name == "cu_seq_lens_q":
            starts = _starts_by_lengths(told, batch, queries)
        elif told.shape[-1] == queries:
            starts = _starts_by_positions(told)
        else:
            continue
        if torch.compiler.is_compiling() or (told.is_cuda and torch.cuda.is_current_stream_capturing()):
            torch._assert_async(~(starts & _sees_previous(attention_mask, starts)).any(), _REFUSAL)
        elif not starts.any():
            _remember(told)
        elif (starts & _sees_previous(attention_mask, starts)).any():
            raise ValueError(_REFUSAL)


def _starts_by_positions(position_ids: Tensor) -> Tensor:
    """Whether a document starts at each token but the first of a row, (batch or 1, queries - 1)."""
    if position_ids.dim() == 3:  # of a multimodal RoPE: the first component is time, which an image does not advance
        return position_ids[0, :, 1:] < position_ids[0, :, :-1]
    previous, following = position_ids[..., :-1], position_ids[..., 1:]
    return (following < previous) | ((following == 0) & (previous == 0))  # or after a document of one token


def _starts_by_lengths(ends: Tensor, batch: int, queries: int) -> Tensor:
    """The same from the ends of documents, 0 before them, in all rows one after another."""
    starts = torch.zeros(batch * queries + 1, dtype=torch.bool, device=ends.device)
    return starts.index_fill(0, ends.long().clamp(max=batch * queries), True)[:-1].view(batch, queries)[:, 1:]


def _sees_previous(attention_mask: Tensor | None, starts: Tensor) -> Tensor:
    """Whether each token but the first sees the one before it, (batch, queries - 1). Padding sees nothing."""
    if attention_mask is None:
        return torch.ones_like(starts)
    queries, keys = starts.shape[-1] + 1, attention_mask.shape[-1]
    attention_mask = attention_mask.expand(-1, -1, queries, -1)
    if queries != keys:
        # Where the queries stand among the keys of a cache is not known: a first token sees itself alone.
        return _visible(attention_mask).any(1).sum(-1)[:, 1:] > 1
    previous = _visible(attention_mask.diagonal(-1, -2, -1))
    itself = _visible(attention_mask.diagonal(0, -2, -1))[..., 1:]
    return (previous & itself).any(1)


def _visible(attention_mask: Tensor) -> Tensor:
    if attention_mask.dtype == torch.bool:
        return attention_mask
    return attention_mask > torch.finfo(attention_mask.dtype).min / 2


_known = WeakIdKeyDictionary()
"""Tensors that tell of no second document, with the version in which they were read: a read waits for the device, and
all layers get the same tensor."""


def _is_known(told: Tensor) -> bool:
    if torch.compiler.is_compiling() or told.is_inference():  # an inference tensor has no version
        return False
    return _known.get(told) == told._version


def _remember(told: Tensor) -> None:
    if not told.is_inference():
        _known[told] = told._version
