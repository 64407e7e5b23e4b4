"""Documents in one row of tokens, with FlashAttention's names, layout and argument order.

    out = muse_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)

A packed call means one call for each document: own blocks, own clusters, own causal past. Nothing passes from one
document to another, and what a document costs does not depend on where it lies in the row.

Documents that MuSe has nothing to gain from are attended to exactly: those of one block, and where no `config` is given
those up to `defaults.LONGEST_EXACT`. On CUDA one call serves all of them (`packed_exact`). Longer ones go through
`muse_attention`, on the Triton backend those of equal length together. Nothing is padded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from muse_attention import operator, packed_exact
from muse_attention.attention import muse_attention, resolve_config
from muse_attention.backends import BACKENDS, MOST_PROGRAMS, resolve_backend
from muse_attention.config import MuSeConfig
from muse_attention.defaults import LONGEST_EXACT
from muse_attention.documents import DocumentBoundaries
from muse_attention.precision import compute_dtype
from muse_attention.signature import check_arguments

EXACT = MuSeConfig(query_clusters=1, key_clusters=1, retrieved_clusters=0, block_size=1 << 40)
"""Exact attention: a block is longer than any document."""


@overload
def muse_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: DocumentBoundaries | Tensor | Sequence[int],
    cu_seqlens_k: DocumentBoundaries | Tensor | Sequence[int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    config: MuSeConfig | str | None = None,
    backend: str = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def muse_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: DocumentBoundaries | Tensor | Sequence[int],
    cu_seqlens_k: DocumentBoundaries | Tensor | Sequence[int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    config: MuSeConfig | str | None = None,
    backend: str = "auto",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@_disable_dynamo
def muse_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: DocumentBoundaries | Tensor | Sequence[int],
    cu_seqlens_k: DocumentBoundaries | Tensor | Sequence[int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    config: MuSeConfig | str | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """MuSe attention inside each of the documents in a row, with the same signature as `flash_attn_varlen_func`.

    The host must know the boundaries. It reads a tensor on a GPU once, and waits for the GPU there; calls with the same
    tensor, as those of the next layers, do not wait. A list, a tensor on the CPU, or `DocumentBoundaries` never wait.

    `torch.compile` leaves it out of its graphs, which end before it and go on behind it: which kernels run depends on
    the boundaries, and every batch has others. Nothing is compiled again for other boundaries.

    Args:
        q: (tokens, heads, head_dim)
        k: (tokens, key heads, head_dim); the key heads divide the heads
        v: (tokens, key heads, value_dim)
        cu_seqlens_q: 0 and the end of each document: an int32 tensor on the CPU or where `q` is, a list of integers, or
            `DocumentBoundaries`
        cu_seqlens_k: the same boundaries; documents attend to themselves
        max_seqlen_q: length of the longest document, or more
        max_seqlen_k: likewise
        softmax_scale: factor of the logits, 1/sqrt(head_dim) by default
        causal: attend to the past only
        config: as for `muse_attention`, read for the length of each document. None: exact attention to documents of up
            to 8k tokens, where nothing is faster, and `MuSeConfig.for_length` beyond
        backend: as for `muse_attention`; `reference` is the loop over documents
        return_lse: also return the logsumexp of each query's logits, (heads, tokens), float32 (float64 for float64
            inputs), differentiable

    Returns:
        (tokens, heads, value_dim), or that and the lse.
    """
    query, scale = _check(q, k, v, causal, softmax_scale, backend, "(tokens, heads, head_dim)")
    boundaries = _check_boundaries(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    config_of_document(config, boundaries.longest)  # refuses what is no configuration
    out, lse = attend_to_documents(
        query, k, v, boundaries, config, is_causal=causal, scale=scale, backend=backend, return_lse=return_lse
    )
    return out if lse is None else (out, lse)


@overload
def muse_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    config: MuSeConfig | str | None = None,
    backend: str = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def muse_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    config: MuSeConfig | str | None = None,
    backend: str = "auto",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def muse_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    config: MuSeConfig | str | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """MuSe attention with the same signature as `flash_attn_func`: `muse_attn_varlen_func` of documents of one length.

    Args:
        q: (batch, length, heads, head_dim)
        k: (batch, length, key heads, head_dim); the key heads divide the heads
        v: (batch, length, key heads, value_dim)
        softmax_scale: factor of the logits, 1/sqrt(head_dim) by default
        causal: attend to the past only
        config: as for `muse_attn_varlen_func`
        backend: as for `muse_attention`
        return_lse: also return the lse, (batch, heads, length)

    Returns:
        (batch, length, heads, value_dim), or that and the lse.
    """
    query, scale = _check(q, k, v, causal, softmax_scale, backend, "(batch, length, heads, head_dim)")
    settings = config_of_document(config, query.shape[1])
    out, lse = muse_attention(
        query.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=causal,
        scale=scale,
        enable_gqa=True,
        config=settings,
        backend=backend,
        return_lse=True,
    )
    out = out.transpose(1, 2).contiguous()
    return (out, lse) if return_lse else out


def config_of_document(config: MuSeConfig | str | None, length: int) -> MuSeConfig:
    """The configuration for a document of this length; `EXACT` for one that MuSe has nothing to gain from."""
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
) -> tuple[Tensor, Tensor | None]:
    """`muse_attn_varlen_func` behind its checks. Tokens in no document have output 0 and lse -inf."""
    query, key, value = operator.cast_for_autocast(query, key, value)
    one_call = backend != "reference" and packed_exact.serves(query, value)

    def attend(config: MuSeConfig, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return muse_attention(
            query,
            key,
            value,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=True,
            config=config,
            backend=backend,
            return_lse=True,
        )

    def together(config: MuSeConfig, query: Tensor, key: Tensor, value: Tensor) -> int:
        """How many documents share one call."""
        if resolve_backend(backend, query, value, config) != "triton":
            return 1
        return MOST_PROGRAMS // (query.shape[1] + key.shape[1])

    def attend_exactly(lengths: tuple[int, ...], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        partial = packed_exact.attend(query, key, value, lengths, is_causal=is_causal, scale=scale)
        return partial.out, partial.lse

    row = _Row(query, key, value, _pieces(boundaries, config, one_call))
    row.attend_to_short(attend_exactly)
    row.attend_to_long(attend, together)
    return row.joined(return_lse=return_lse)


def attend_to_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: DocumentBoundaries,
    attention: Callable[..., tuple[Tensor, Tensor | None]],
    *,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Any attention of (1, heads, length, head_dim) tensors, of one document after another. Its lse may be None."""
    row = _Row(query, key, value, _pieces(boundaries, EXACT, False))
    row.attend_to_long(lambda _, *tensors: attention(*tensors), lambda *_: 1)
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

    `attention` is that of one document, (1, heads, length, head_dim), where no operator serves all of them in one call.
    """
    query, key, value = operator.cast_for_autocast(query, key, value)

    def attend(lengths: tuple[int, ...], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        partial = packed_exact.attend(query, key, value, lengths, is_causal=True, scale=scale, window=window)
        return partial.out, partial.lse

    row = _Row(query, key, value, _pieces(boundaries, EXACT, packed_exact.serves(query, value)))
    row.attend_to_short(attend)
    row.attend_to_long(lambda _, *tensors: (attention(*tensors), None), lambda *_: 1)
    return row.joined(return_lse=False)[0]


class _Piece(NamedTuple):
    """Tokens of the row that follow each other: one document, short ones that share a call, or padding."""

    lengths: tuple[int, ...]
    """of its documents; of padding, its tokens"""
    config: MuSeConfig | None
    """for a document by itself; None for short ones"""
    is_padding: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@functools.lru_cache(maxsize=64)
def _pieces(boundaries: DocumentBoundaries, config: MuSeConfig | str | None, one_call: bool) -> tuple[_Piece, ...]:
    """The row from left to right; all layers of a batch ask for the same. `one_call`: short documents share one."""
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
    """The pieces of a row of queries, keys and values, and what came out of each."""

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

    def attend_to_short(self, attend: Callable[..., tuple[Tensor, Tensor]]) -> None:
        """All short documents in one call."""
        short = [index for index, piece in enumerate(self.pieces) if piece.config is None and not piece.is_padding]
        if not short:
            return
        tensors = [_joined([tensor[index] for index in short], 0) for tensor in self.tensors]
        out, lse = attend(sum((self.pieces[index].lengths for index in short), ()), *tensors)
        sizes = [self.pieces[index].tokens for index in short]
        outs, lses = (out.split(sizes), lse.split(sizes, 1)) if len(short) > 1 else ([out], [lse])
        for index, own_out, own_lse in zip(short, outs, lses, strict=True):
            self.outs[index], self.lses[index] = own_out, own_lse

    def attend_to_long(self, attend: Callable[..., tuple[Tensor, Tensor | None]], together: Callable[..., int]) -> None:
        """Documents of one length and configuration in as few calls as `together` allows."""
        groups: dict[tuple[int, MuSeConfig], list[int]] = {}
        for index, piece in enumerate(self.pieces):
            if piece.config is not None:
                groups.setdefault((piece.tokens, piece.config), []).append(index)
        for (_, config), indices in groups.items():
            first = [tensor[indices[0]].transpose(0, 1)[None] for tensor in self.tensors]
            most = together(config, *first)
            for begin in range(0, len(indices), most):
                some = indices[begin : begin + most]
                stacked = [_stacked([tensor[index].transpose(0, 1) for index in some]) for tensor in self.tensors]
                out, lse = attend(config, *stacked)
                for index, document in zip(some, _unstacked(out.transpose(1, 2)), strict=True):
                    self.outs[index] = document
                if lse is not None:
                    for index, document in zip(some, _unstacked(lse), strict=True):
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


def _check(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, backend: str, layout: str
) -> tuple[Tensor, float]:
    """The queries and the softmax scale, which is above 0."""
    axes = layout.count(",") + 1
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != axes:
            found = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"type {type(tensor).__name__}"
            raise ValueError(f"{name} has {found}; it must be a tensor with {axes} axes: {layout}")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}")
    rows = [tensor[None] if axes == 3 else tensor for tensor in (q, k, v)]
    query, key, value = (row.transpose(1, 2) for row in rows)
    query, scale = check_arguments(query, key, value, None, 0.0, causal, softmax_scale, True)
    query = query.transpose(1, 2)
    return query.squeeze(0) if axes == 3 else query, scale  # (The gradient of an index is a copy.)


def _check_boundaries(
    q: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int
) -> DocumentBoundaries:
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if isinstance(ends, Tensor) and ends.device not in (q.device, torch.device("cpu")):
            raise ValueError(f"{name} is on {ends.device}, q on {q.device}; move it there, or to the CPU")
    boundaries = DocumentBoundaries.read(cu_seqlens_q, "cu_seqlens_q")
    if cu_seqlens_k is not cu_seqlens_q and DocumentBoundaries.read(cu_seqlens_k, "cu_seqlens_k") != boundaries:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k differ: documents attend to themselves only; pass the same to both"
        )
    if boundaries.tokens != q.shape[0]:
        raise ValueError(f"cu_seqlens_q ends at {boundaries.tokens}, q has {q.shape[0]} tokens; they must be equal")
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(longest, bool) or not isinstance(longest, int) or longest < boundaries.longest:
            raise ValueError(
                f"{name}={longest!r} must be an integer of at least {boundaries.longest}, the length of the longest "
                "document"
            )
    return boundaries
