"""Whether a query that must look something up finds it: how much of exact attention's weight on it is attended to
token by token, in the query's own block or in a bucket that it retrieves. What is not stays in a summary. A summary of
one key is that key: such a key need not be retrieved, and is not lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muse_attention.config import MuSeConfig
from muse_attention.core.recording import recorded_calls
from muse_attention.core.structures import Clusters, Selection
from muse_attention.fidelity.retrieved import bucket_sizes, opened_clusters, retrieved_buckets


@dataclass(frozen=True)
class Lookup:
    """Of one query in each head, (batch, query heads)."""

    weight: Tensor
    """exact attention's weight on the needle's tokens, float64"""
    found: Tensor
    """the part of it that lies in the query's own block or in a bucket that it retrieves, float64"""
    exact: Tensor
    """the part of it that is attended to exactly: what is found, and keys that are the only one of their summary,
    float64"""
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
        clusters, selection: those that `ops.attend` was called with and returned
        scale: factor of the logits
    """
    length, group = key.shape[2], query.shape[1] // key.shape[1]
    needle = torch.as_tensor(needle_positions, device=key.device).long()
    seen = position + 1 if is_causal else length
    if not 0 <= position < length or not len(needle) or not 0 <= int(needle.min()) <= int(needle.max()) < seen:
        raise ValueError(
            f"the query at {position} cannot look up tokens {needle.tolist()} of {length}; choose tokens that it sees"
        )
    queries = query[:, :, position].double().unflatten(1, (-1, group))  # (batch, key heads, group, D)
    logits = scale * queries @ key[:, :, :seen].double().mT
    weights = logits.softmax(-1)[..., needle].flatten(1, 2)
    of_query = Selection(selection.opened[:, :, position, None], selection.retrieved[:, :, position, None])
    retrieved = retrieved_buckets(of_query, config, length)[:, :, 0]
    opened = opened_clusters(of_query, config)[:, :, 0]
    own = position // config.block_size
    block, cluster = needle // config.block_size, clusters.key_assignment[:, :, needle].long()
    sizes = bucket_sizes(clusters.key_assignment, config)
    number = torch.arange(sizes.shape[2], device=key.device)
    in_cluster = sizes[:, :, number < own if is_causal else number != own].sum(2).gather(2, cluster)
    in_bucket = sizes.flatten(2).gather(2, block * config.key_clusters + cluster)
    cluster, in_cluster, in_bucket = (
        tensor.repeat_interleave(group, dim=1) for tensor in (cluster, in_cluster, in_bucket)
    )
    is_retrieved = retrieved.flatten(2).gather(2, block * config.key_clusters + cluster)
    is_found = is_retrieved | (block == own)
    is_alone = torch.where(opened.gather(2, cluster), in_bucket, in_cluster) == 1
    return Lookup(
        weight=weights.sum(-1),
        found=(weights * is_found).sum(-1),
        exact=(weights * (is_found | (is_alone & config.monopole))).sum(-1),
        pairs=retrieved.sum((2, 3)),
    )


def look_up(
    attention: Callable[..., object],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Iterable[tuple[int, Sequence[int]]],
    **arguments: Any,
) -> list[Lookup]:
    """What a causal call of an attention of this library finds: for each query, by its position, and its needle."""
    with recorded_calls() as calls, torch.no_grad():
        attention(query, key, value, is_causal=True, **arguments)
    (call,) = calls
    of_call = (call.query, call.key, call.clusters, call.selection, call.config)
    return [found_weight(*of_call, position, needle, scale=call.scale) for position, needle in places]
