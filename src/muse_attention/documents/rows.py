"""Attention inside the documents of a row of tokens, in as few calls as there are kinds of documents.

Documents that gain nothing from MuSe are attended to exactly: those of one block and, if no `config` is given, those up
to `defaults.LONGEST_EXACT`. On CUDA one call serves all of them (`exact.py`). Longer ones go through
`muse_attention`, on the Triton backend those of equal length together. Nothing is padded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from muse_attention import ops
from muse_attention.attention import muse_attention, resolve_config
from muse_attention.backends.choice import backend_named, resolve_backend
from muse_attention.config import MuSeConfig
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Partial
from muse_attention.defaults import LONGEST_EXACT
from muse_attention.documents import exact
from muse_attention.documents.boundaries import DocumentBoundaries

EXACT = MuSeConfig(query_clusters=1, key_clusters=1, retrieved_clusters=0, block_size=1 << 40)
"""Exact attention: a block is longer than any document."""


def config_of_document(config: MuSeConfig | str | None, length: int) -> MuSeConfig:
    """The configuration for a document of this length; `EXACT` for one that gains nothing from MuSe."""
    if config is None and length <= LONGEST_EXACT:
        return EXACT
    return resolve_config(config, length)


@_disable_dynamo
def attend_to_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: DocumentBoundaries,
    config: MuSeConfig | str | None,
    *,
    is_causal: bool,
    scale: float,
    backend: str = "auto",
    return_lse: bool = False,
    known: Partial | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`muse_attn_varlen_func` after its checks. Tokens in no document have output 0 and lse -inf.

    `known` are the output and the lse of an earlier call with the same arguments: short documents, which need only
    these for their backward pass, are not computed again.
    """
    query, key, value = ops.cast_for_autocast(query, key, value)
    one_call = backend != "reference" and exact.serves(query, value)

    def documents_at_once(config: MuSeConfig, query: Tensor, key: Tensor, value: Tensor) -> int:
        """How many documents share one call."""
        chosen = resolve_backend(backend, query, value, config)
        return 1 if chosen == "reference" else backend_named(chosen).sequences_at_once(query.shape[1] + key.shape[1])

    row = _Row(query, key, value, _pieces(boundaries, config, one_call))
    row.attend_to_short(functools.partial(exact.attend, is_causal=is_causal, scale=scale), known)
    attend: Callable[..., Any] = functools.partial(
        muse_attention, is_causal=is_causal, scale=scale, enable_gqa=True, backend=backend, return_lse=True
    )
    row.attend_to_long(attend, documents_at_once)
    return row.joined(return_lse=return_lse)


def attend_to_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: DocumentBoundaries,
    attention: Callable[..., Any],
    *,
    return_lse: bool,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call an attention like `scaled_dot_product_attention`, with `return_lse`, on one document after another.

    The lse may be None.
    """

    def attend(*tensors: Tensor, config: MuSeConfig) -> tuple[Tensor, Tensor | None]:
        if return_lse:
            out, lse = attention(*tensors, **settings, enable_gqa=True, return_lse=True)
            return out, lse
        return attention(*tensors, **settings, enable_gqa=True), None

    row = _Row(query, key, value, _pieces(boundaries, EXACT, False))
    row.attend_to_long(attend, lambda *_: 1)
    return row.joined(return_lse=return_lse)


@_disable_dynamo
def attend_to_windows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: DocumentBoundaries,
    attention: Callable[..., Tensor],
    *,
    window: int,
    scale: float,
) -> Tensor:
    """Exact attention of each token to itself and the `window - 1` tokens before it in its document.

    `attention` serves one document, (1, heads, length, head_dim), where no operator serves all of them in one call.
    """
    query, key, value = ops.cast_for_autocast(query, key, value)
    row = _Row(query, key, value, _pieces(boundaries, EXACT, exact.serves(query, value)))
    row.attend_to_short(functools.partial(exact.attend, is_causal=True, scale=scale, window=window))
    row.attend_to_long(lambda *tensors, config: (attention(*tensors), None), lambda *_: 1)
    return row.joined(return_lse=False)[0]


class _Piece(NamedTuple):
    """Tokens of the row that follow each other: one document, short ones that share a call, or padding."""

    lengths: tuple[int, ...]
    """lengths of its documents; of padding, its tokens"""
    config: MuSeConfig | None
    """for a document by itself; None for short ones"""
    is_padding: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@functools.lru_cache(maxsize=64)
def _pieces(boundaries: DocumentBoundaries, config: MuSeConfig | str | None, one_call: bool) -> tuple[_Piece, ...]:
    """The row from left to right, cached for the layers of a batch. `one_call`: short documents share a call."""
    pieces: list[_Piece] = []
    at = 0
    for begin, end in zip(boundaries.begins, boundaries.ends, strict=True):
        if begin > at:
            pieces.append(_Piece((begin - at,), None, is_padding=True))
        settings = config_of_document(config, end - begin)
        is_short = one_call and end - begin <= settings.block_size
        pieces.append(_Piece((end - begin,), None if is_short else settings))
        at = end
    if at < boundaries.tokens:
        pieces.append(_Piece((boundaries.tokens - at,), None, is_padding=True))
    joined: list[_Piece] = []
    for (is_alone, is_padding), run in groupby(pieces, lambda piece: (piece.config is not None, piece.is_padding)):
        if is_alone or is_padding:
            joined.extend(run)
        else:
            joined.append(_Piece(tuple(piece.lengths[0] for piece in run), None))
    return tuple(joined)


class _Row:
    """The pieces of a row of queries, keys and values, and the outputs of each."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, pieces: tuple[_Piece, ...]) -> None:
        self.pieces = pieces
        sizes = [piece.tokens for piece in pieces]
        # (`split` has one gradient for all pieces; that of a slice is as long as the row.)
        self.tensors = [tensor.split(sizes) if len(sizes) > 1 else (tensor,) for tensor in (query, key, value)]
        self.outs: list[Any] = [None] * len(pieces)
        """(tokens, heads, value_dim) of each piece"""
        self.lses: list[Any] = [None] * len(pieces)
        """(heads, tokens) of each piece"""
        for index, piece in enumerate(pieces):
            if piece.is_padding:
                self.outs[index] = value.new_zeros(piece.tokens, query.shape[1], value.shape[2])
                self.lses[index] = query.new_full(
                    (query.shape[1], piece.tokens), -math.inf, dtype=compute_dtype(query.dtype)
                )

    def attend_to_short(self, attend: Callable[..., Partial], known: Partial | None = None) -> None:
        """Attend to all short documents in one call, which also gets their part of `known`."""
        short = [index for index, piece in enumerate(self.pieces) if piece.config is None and not piece.is_padding]
        if not short:
            return
        tensors = [_joined([tensor[index] for index in short], 0) for tensor in self.tensors]
        if known is not None:
            sizes = [piece.tokens for piece in self.pieces]
            outs, lses = known.out.split(sizes), known.lse.split(sizes, 1)
            known = Partial(_joined([outs[index] for index in short], 0), _joined([lses[index] for index in short], 1))
        attended = attend(*tensors, sum((self.pieces[index].lengths for index in short), ()), known=known)
        sizes = [self.pieces[index].tokens for index in short]
        is_one = len(short) == 1
        outs, lses = (
            ((attended.out,), (attended.lse,)) if is_one else (attended.out.split(sizes), attended.lse.split(sizes, 1))
        )
        for index, own_out, own_lse in zip(short, outs, lses, strict=True):
            self.outs[index], self.lses[index] = own_out, own_lse

    def attend_to_long(
        self, attend: Callable[..., tuple[Tensor, Tensor | None]], documents_at_once: Callable[..., int]
    ) -> None:
        """Attend to the long documents, those of equal length and configuration `documents_at_once` in a call."""
        groups: dict[tuple[int, MuSeConfig], list[int]] = {}
        for index, piece in enumerate(self.pieces):
            if piece.config is not None:
                groups.setdefault((piece.tokens, piece.config), []).append(index)
        for (_, config), indices in groups.items():
            first = [tensor[indices[0]].transpose(0, 1)[None] for tensor in self.tensors]
            at_once = documents_at_once(config, *first)
            for begin in range(0, len(indices), at_once):
                batch = indices[begin : begin + at_once]
                stacked = [_stacked([tensor[index].transpose(0, 1) for index in batch]) for tensor in self.tensors]
                out, lse = attend(*stacked, config=config)
                for index, document in zip(batch, _unstacked(out.transpose(1, 2)), strict=True):
                    self.outs[index] = document
                if lse is not None:
                    for index, document in zip(batch, _unstacked(lse), strict=True):
                        self.lses[index] = document

    def joined(self, *, return_lse: bool) -> tuple[Tensor, Tensor | None]:
        out = _joined(self.outs, 0).contiguous()
        return out, _joined(self.lses, 1) if return_lse else None


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _stacked(documents: list[Tensor]) -> Tensor:
    return documents[0][None] if len(documents) == 1 else torch.stack(documents)


def _unstacked(documents: Tensor) -> Sequence[Tensor]:
    """(The gradient of `unbind` is a copy.)"""
    return [documents.squeeze(0)] if len(documents) == 1 else documents.unbind()
