"""Documents in the arguments of an attention function of transformers.

They are given by `cu_seq_lens_q` and `cu_seq_lens_k`, else by `position_ids` that restart, and by a padding mask, which
leaves one document in each row. `find_documents` and `documents_in_rows` make them `DocumentBoundaries`.

Where there is another mask, the mask must separate the documents. transformers does so where it gets restarting
`position_ids`, no `attention_mask` and no KV cache. Everywhere else it lets documents see each other, under every
attention without variable lengths: `refuse_packed_documents` makes that an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muse_attention.documents.boundaries import DocumentBoundaries, refuse_capture

REFUSAL = (
    "packed documents would see each other: put one document into a row, or pass position_ids with use_cache=False and "
    "without attention_mask"
)


def find_documents(batch: int, queries: int, arguments: dict[str, Any]) -> DocumentBoundaries | None:
    """The documents that the arguments describe, in all rows one after another; None if each row is one document.

    Args:
        batch: rows of the input
        queries: tokens in a row
        arguments: the keyword arguments of the attention function. `cu_seq_lens_q` and `cu_seq_lens_k` are 0 and the
            ends of all documents in all rows, `position_ids` are (batch or 1, queries) or (components, batch, queries)
    """
    ends, of_keys = (arguments.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    positions = arguments.get("position_ids")
    if ends is not None:
        boundaries = DocumentBoundaries.read(ends, "cu_seq_lens_q")
        other = boundaries if of_keys is None or of_keys is ends else DocumentBoundaries.read(of_keys, "cu_seq_lens_k")
        if other != boundaries:
            raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ: documents attend to themselves; pass the same")
        if boundaries.tokens != batch * queries:
            raise ValueError(f"cu_seq_lens_q ends at {boundaries.tokens}, the batch has {batch * queries} tokens")
    elif isinstance(positions, Tensor) and not positions.is_meta and positions.shape[-1] == queries > 1:
        refuse_capture(positions, "position_ids")
        boundaries = documents_in_rows(starts_by_positions(positions).expand(batch, -1), None, None)
    else:
        return None
    return None if are_whole_rows(boundaries, batch) else boundaries


def documents_in_rows(starts: Tensor, real: Tensor | None, positions: Tensor | None) -> Any:
    """The documents of all rows one after another. None if a document has padding inside.

    Args:
        starts: whether a document starts at each token but the first of a row, (batch, queries - 1)
        real: which tokens are not padding, (batch, queries); None if all
        positions: (batch, queries). After padding, a document starts at position 0
    """
    edges = torch.nn.functional.pad(starts, (1, 0), value=True)
    if real is not None:
        edges = edges | torch.nn.functional.pad(real[:, 1:] != real[:, :-1], (1, 0), value=True)
    place = edges.flatten().nonzero()[:, 0]
    columns = [place]
    for tensor, otherwise in ((real, 1), (positions, 1)):
        columns.append(torch.full_like(place, otherwise) if tensor is None else tensor.flatten()[place].to(place.dtype))
    rows, queries = edges.shape
    begins, ends = [], []
    runs = torch.stack(columns, 1).tolist()
    has_document, follows_padding = False, False
    for (begin, is_real, position), (end, *_) in zip(runs, [*runs[1:], [rows * queries]], strict=True):
        if begin % queries == 0:
            has_document, follows_padding = False, False
        if is_real:
            if has_document and follows_padding and position != 0:
                return None
            begins.append(begin)
            ends.append(end)
            has_document, follows_padding = True, False
        else:
            follows_padding = True
    return DocumentBoundaries(tuple(begins), tuple(ends), rows * queries) if begins else None


def are_whole_rows(boundaries: DocumentBoundaries, batch: int) -> bool:
    """Whether each row is one document, without padding."""
    return boundaries.lengths == (boundaries.tokens // batch,) * batch


def refuse_packed_documents(batch: int, queries: int, attention_mask: Tensor | None, arguments: dict[str, Any]) -> None:
    """Raise a ValueError where a token sees the document before its own.

    Args:
        batch: rows of the input
        queries: tokens in a row
        attention_mask: what a query sees, (batch, heads or 1, queries or 1, keys), boolean or added to the logits; None
            if it sees all of the row, or of its past
        arguments: as for `find_documents`
    """
    if queries == 1:
        return
    for name in ("position_ids", "cu_seq_lens_q"):
        told = arguments.get(name)
        if name == "cu_seq_lens_q" and told is not None and not isinstance(told, Tensor):
            boundaries = DocumentBoundaries.read(told, name)
            device = None if attention_mask is None else attention_mask.device
            told = torch.tensor([*boundaries.begins, boundaries.tokens], dtype=torch.int32, device=device)
        if not isinstance(told, Tensor) or told.is_meta:
            continue
        if name == "cu_seq_lens_q":
            starts = _starts_by_lengths(told, batch, queries)
        elif told.shape[-1] == queries:
            starts = starts_by_positions(told)
        else:
            continue
        if torch.compiler.is_compiling() or (told.is_cuda and torch.cuda.is_current_stream_capturing()):
            torch._assert_async(~(starts & _sees_previous(attention_mask, starts)).any(), REFUSAL)
        elif find_documents(batch, queries, {name: told}) is None:
            continue
        elif (starts & _sees_previous(attention_mask, starts)).any():
            raise ValueError(REFUSAL)


def starts_by_positions(position_ids: Tensor) -> Tensor:
    """Whether a document starts at each token but the first of a row, (batch or 1, queries - 1)."""
    if position_ids.dim() == 3:  # of a multimodal RoPE: the first component is time, which an image does not advance
        return position_ids[0, :, 1:] < position_ids[0, :, :-1]
    previous, following = position_ids[..., :-1], position_ids[..., 1:]
    return (following < previous) | ((following == 0) & (previous == 0))  # or after a document of one token


def _starts_by_lengths(ends: Tensor, batch: int, queries: int) -> Tensor:
    """The same from 0 and the ends of documents, which count over all rows."""
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
