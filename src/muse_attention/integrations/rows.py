"""Attention to batches of rows as trainers lay them out, with or without documents in the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from muse_attention.attention import resolve_config
from muse_attention.config import MuSeConfig
from muse_attention.distributed import ulysses
from muse_attention.documents.boundaries import Boundaries
from muse_attention.documents.varlen import muse_attn_func, muse_attn_varlen_func


def attend_to_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Boundaries | None,
    config: MuSeConfig | str | None,
    *,
    is_causal: bool,
    scale: float | None,
    mesh: DeviceMesh | None = None,
) -> tuple[Tensor, Tensor]:
    """MuSe attention inside each document, or inside each row.

    Args:
        query: (batch, length, heads, head_dim)
        key: (batch, length, key heads, head_dim)
        value: (batch, length, key heads, value_dim)
        documents: boundaries as `muse_attn_varlen_func` takes them, in all rows one after another; None if each row is
            one document
        config: as for `muse_attn_varlen_func`: None attends exactly to documents of up to 8k tokens
        mesh: the ranks that hold parts of the length, of whole rows; boundaries count over whole rows all the same

    Returns:
        The output, (batch, length, heads, value_dim), and the lse, (batch, heads, length).
    """
    if mesh is not None:

        def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
            out, lse = attend_to_rows(query, key, value, documents, config, is_causal=is_causal, scale=scale)
            return out.transpose(1, 2), lse

        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out, lse = ulysses(attend, query, key, value, mesh)
        return out.transpose(1, 2), lse
    if documents is None:
        return muse_attn_func(query, key, value, softmax_scale=scale, causal=is_causal, config=config, return_lse=True)
    return _attend_uncompiled(query, key, value, documents, config, is_causal, scale)


def attend_as_one_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Boundaries,
    config: MuSeConfig | str | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """`attend_to_rows` for trainers whose compiled graphs may not break: one operator, which reads the boundaries.

    Its backward pass attends to long documents once more, so `attend_to_rows` breaks the graph instead.
    """
    batch, tokens = query.shape[0], query.shape[0] * query.shape[1]
    out, lse = muse_attn_varlen_func(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        documents,
        documents,
        tokens,
        tokens,
        softmax_scale=scale,
        causal=is_causal,
        config=config,
        return_lse=True,
    )
    return out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)


@_disable_dynamo
def _attend_uncompiled(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The compiler must not see boundaries, which differ in every batch."""
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a CUDA graph would keep the documents of one batch for all: turn CUDA graphs off (torchtitan: "
            "--training.disable_cuda_graphs)"
        )
    return attend_as_one_row(query, *arguments)


def check_config(config: MuSeConfig | str | None) -> None:
    """Raise ValueError for an invalid configuration, before a model is built with it."""
    resolve_config(config, 1 << 16)
