"""Whether a query that must look something up finds it: how much of exact attention's weight on it is attended to
token by token, in the query's own block or in a bucket that it retrieves. What is not stays in a summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.config import MuSeConfig
from muse_attention.retrieved import retrieved_buckets
from muse_attention.structures import Clusters, Selection


@dataclass(frozen=True)
class Lookup:
    """Of one query in each head, (batch, query heads)."""

    weight: Tensor
    """exact attention's weight on the needle's tokens, float64"""
    found: Tensor
    """the part of it that lies in the query's own block or in a bucket that it retrieves, float64"""
    pairs: Tensor
    """buckets that the query retrieves, int64"""


def found_weight(
    query: Tensor,
    key: Tensor,
    clusters: Clusters,
    selection: Selection,
    config: MuSeConfig,
    position: int,
    needle_positions: Sequence[int] | Tensor,
    *,
    scale: float,
    is_causal: bool = True,
) -> Lookup:
    """What the query at `position` finds of a needle, the tokens at `needle_positions`.

    Args:
        query: (batch, query heads, N, D)
        key: (batch, key heads, N, D)
        clusters, selection: those that `operator.attend` was called with and returned
        scale: factor of the logits
    """
    length, group = key.shape[2], query.shape[1] // key.shape[1]
    needle = torch.as_tensor(needle_positions, device=key.device).long()
    seen = position + 1 if is_causal else length
    if not 0 <= position < length or not len(needle) or not 0 <= int(needle.min()) <= int(needle.max()) < seen:
        raise ValueError(
            f"the query at {position} cannot look up tokens {needle.tolist()} of {length}; choose tokens that it sees"
        )
    keys = key[:, :, :seen].double().repeat_interleave(group, dim=1)
    logits = scale * keys @ query[:, :, position, :, None].double()
    weights = logits[..., 0].softmax(-1)[:, :, needle]
    of_query = Selection(selection.opened[:, :, position, None], selection.retrieved[:, :, position, None])
    retrieved = retrieved_buckets(of_query, config, length)[:, :, 0].flatten(2)
    block = needle // config.block_size
    bucket = block * config.key_clusters + clusters.key_assignment[:, :, needle].long()
    is_retrieved = retrieved.gather(2, bucket.repeat_interleave(group, dim=1))
    is_found = is_retrieved | (block == position // config.block_size)
    return Lookup(weights.sum(-1), (weights * is_found).sum(-1), retrieved.sum(-1))
