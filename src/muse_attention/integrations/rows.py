"""Attention to batches of rows as trainers lay them out, with or without documents in the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from muse_attention.attention import resolve_config
from muse_attention.config import MuSeConfig
from muse_attention.documents import DocumentBoundaries
from muse_attention.packed import muse_attn_func, muse_attn_varlen_func


def attend_to_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: DocumentBoundaries | None,
    config: MuSeConfig | str | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """MuSe attention inside each document, or inside each row.

    Args:
        query: (batch, length, heads, head_dim)
        key: (batch, length, key heads, head_dim)
        value: (batch, length, key heads, value_dim)
        documents: in all rows one after another; None if each row is one document
        config: as for `muse_attn_varlen_func`: None attends exactly to documents of up to 8k tokens

    Returns:
        The output, (batch, length, heads, value_dim), and the lse, (batch, heads, length).
    """
    if documents is None:
        return muse_attn_func(query, key, value, scale, is_causal, config=config, return_lse=True)
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a CUDA graph would keep the documents of one batch for all: turn CUDA graphs off (torchtitan: "
            "--training.disable_cuda_graphs)"
        )
    batch = query.shape[0]
    out, lse = muse_attn_varlen_func(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        documents,
        documents,
        documents.longest,
        documents.longest,
        scale,
        is_causal,
        config=config,
        return_lse=True,
    )
    return out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)


def check_config(config: MuSeConfig | str | None) -> None:
    """Raise ValueError for what is no configuration, before a model is built with it."""
    resolve_config(config, 1 << 16)
