"""Documents in one row of tokens, with FlashAttention's names and layout.

    out = muse_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)

A packed call equals one call for each document: own blocks, own clusters, own causal past. Nothing passes from one
document to another, and what a document costs does not depend on where it lies in the row.

`rows.py` attends to documents exactly or with MuSe, as their lengths say. Under `torch.compile` a call is one
operator (`operator.py`).
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from muse_attention import ops
from muse_attention.attention import muse_attention, resolve_config
from muse_attention.backends.choice import BACKENDS
from muse_attention.config import MuSeConfig
from muse_attention.core.arguments import check_arguments, one_line
from muse_attention.documents import operator
from muse_attention.documents.boundaries import Boundaries, DocumentBoundaries, check_ends, read_boundaries
from muse_attention.documents.rows import attend_to_documents, config_of_document


class FlashAttentionArguments(TypedDict, total=False):
    """Arguments of FlashAttention 2 that are accepted only with a value that has no effect.

    Any other value is a ValueError.
    """

    dropout_p: float
    """0.0"""
    window_size: tuple[int, int]
    """(-1, -1)"""
    softcap: float
    """0.0"""
    alibi_slopes: None
    deterministic: bool
    """True requires bitwise reproducible outputs and gradients. A CPU always has them, a GPU after
    `torch.use_deterministic_algorithms(True)`, without which True is a ValueError there."""
    block_table: None
    return_attn_probs: bool
    """False"""


class Settings(FlashAttentionArguments, total=False):
    """Keyword arguments of both functions, without `return_lse`."""

    softmax_scale: float | None
    causal: bool
    config: MuSeConfig | str | None
    backend: str


@overload
def muse_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Boundaries,
    cu_seqlens_k: Boundaries,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = False,
    **settings: Unpack[Settings],
) -> Tensor: ...


@overload
def muse_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Boundaries,
    cu_seqlens_k: Boundaries,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    **settings: Unpack[Settings],
) -> tuple[Tensor, Tensor]: ...


def muse_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Boundaries,
    cu_seqlens_k: Boundaries,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    config: MuSeConfig | str | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    **neutral: Unpack[FlashAttentionArguments],
) -> Tensor | tuple[Tensor, Tensor]:
    """MuSe attention inside each of the documents in a row, with the names and the layout of `flash_attn_varlen_func`.

    Arguments after `max_seqlen_k` are passed by name: their order differs between versions of FlashAttention.

    The host must know the boundaries. Each call reads a tensor on a GPU, and waits for the GPU there. A list, a tensor
    on the CPU, or `DocumentBoundaries`, made once for all layers, never wait.

    `torch.compile` makes it one operator of one graph, which serves all boundaries that are tensors or
    `DocumentBoundaries`; a list is a constant of the graph. The operator's backward pass attends to long documents once
    more: `torch.compiler.disable` of the function is faster, and breaks the graph.

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
        neutral: arguments of FlashAttention without an effect, see `FlashAttentionArguments`

    Returns:
        (tokens, heads, value_dim), or that and the lse.
    """
    query, scale = _check(q, k, v, causal, softmax_scale, backend, "(tokens, heads, head_dim)")
    _check_neutral(neutral, q)
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if isinstance(ends, Tensor):
            check_ends(ends, name)
            if ends.device not in (q.device, torch.device("cpu")):
                raise ValueError(f"{name} is on {ends.device}, q on {q.device}; move it there, or to the CPU")
    if torch.compiler.is_compiling():
        ends_of_both = (_as_tensor(cu_seqlens_q), _as_tensor(cu_seqlens_k), max_seqlen_q, max_seqlen_k)
        query, k, v = ops.cast_for_autocast(query, k, v)
        # The operator reads it for the length of each document.
        text = config if config is None or isinstance(config, str) else resolve_config(config, 1).text
        out, lse, _ = operator.packed_forward(query, k, v, *ends_of_both, text, causal, scale, backend)
        return (out, lse) if return_lse else out
    boundaries = read_boundaries(len(q), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    config_of_document(config, boundaries.longest)  # raises for an invalid configuration
    out, lse = attend_to_documents(
        query, k, v, boundaries, config, is_causal=causal, scale=scale, backend=backend, return_lse=return_lse
    )
    return out if lse is None else (out, lse)


@overload
def muse_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **settings: Unpack[Settings]
) -> Tensor: ...


@overload
def muse_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **settings: Unpack[Settings]
) -> tuple[Tensor, Tensor]: ...


def muse_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    config: MuSeConfig | str | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    **neutral: Unpack[FlashAttentionArguments],
) -> Tensor | tuple[Tensor, Tensor]:
    """MuSe attention with the names and the layout of `flash_attn_func`: documents of one length.

    Arguments after `v` are passed by name.

    Args:
        q: (batch, length, heads, head_dim)
        k: (batch, length, key heads, head_dim); the key heads divide the heads
        v: (batch, length, key heads, value_dim)
        softmax_scale: factor of the logits, 1/sqrt(head_dim) by default
        causal: attend to the past only
        config: as for `muse_attn_varlen_func`
        backend: as for `muse_attention`
        return_lse: also return the lse, (batch, heads, length)
        neutral: as for `muse_attn_varlen_func`

    Returns:
        (batch, length, heads, value_dim), or that and the lse.
    """
    query, scale = _check(q, k, v, causal, softmax_scale, backend, "(batch, length, heads, head_dim)")
    _check_neutral(neutral, q)
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


def _check(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, backend: str, layout: str
) -> tuple[Tensor, float]:
    """The queries and the softmax scale, which is above 0."""
    axes = layout.count(",") + 1
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != axes:
            actual = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"type {type(tensor).__name__}"
            raise ValueError(f"{name} has {actual}; it must be a tensor with {axes} axes: {layout}")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}")
    rows = [tensor[None] if axes == 3 else tensor for tensor in (q, k, v)]
    query, key, value = (row.transpose(1, 2) for row in rows)
    query, scale = check_arguments(query, key, value, None, 0.0, causal, softmax_scale, True)
    query = query.transpose(1, 2)
    return query.squeeze(0) if axes == 3 else query, scale  # (The gradient of an index is a copy.)


_NEUTRAL: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "block_table": None,
    "return_attn_probs": False,
}


def _check_neutral(arguments: FlashAttentionArguments, q: Tensor) -> None:
    for name, given in arguments.items():
        if name == "deterministic":
            if given and q.is_cuda and not torch.are_deterministic_algorithms_enabled():
                raise ValueError("deterministic=True needs torch.use_deterministic_algorithms(True) on a GPU")
        elif name not in _NEUTRAL:
            raise TypeError(f"{name}={one_line(given)} is not an argument of this function; leave it out")
        elif isinstance(given, Tensor) or given != _NEUTRAL[name]:
            raise ValueError(f"{name}={one_line(given)} is not supported; leave it out, or pass {_NEUTRAL[name]}")


def _as_tensor(ends: Boundaries) -> Tensor:
    """The boundaries as a compiled graph takes them; only the operator reads them."""
    if isinstance(ends, DocumentBoundaries):
        return ends.table
    return ends if isinstance(ends, Tensor) else DocumentBoundaries.read(ends, "cu_seqlens_q").table
