"""The blocks of keys whose means have the largest logits for each query."""

from __future__ import annotations

import torch
from torch import Tensor

from muse_attention.config import MuSeConfig
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Selection

_QUERY_CHUNK = 4096
"""Queries scored at a time."""


def choose_blocks(query: Tensor, means: Tensor, config: MuSeConfig, *, is_causal: bool) -> Selection:
    length, blocks = query.shape[2], means.shape[2]
    means = means.to(compute_dtype(query.dtype)).repeat_interleave(query.shape[1] // means.shape[1], dim=1)
    owner = torch.arange(blocks, device=query.device) // config.key_clusters
    parts = []
    for begin in range(0, length, _QUERY_CHUNK):
        queries = query[:, :, begin : begin + _QUERY_CHUNK].to(means.dtype)
        own = torch.arange(begin, begin + queries.shape[2], device=query.device)[:, None] // config.block_size
        candidate = owner < own if is_causal else owner != own
        scores = (queries @ means.mT).masked_fill(~candidate, -torch.inf)
        top = scores.topk(min(config.retrieved_clusters, blocks), dim=-1)
        parts.append(torch.where(top.values == -torch.inf, -1, top.indices))
    chosen = torch.cat(parts, dim=2)
    return Selection(
        opened=torch.where(chosen < 0, -1, chosen % config.key_clusters).int(),
        retrieved=torch.where(chosen < 0, -1, chosen // config.key_clusters).int()[..., None],
    )
