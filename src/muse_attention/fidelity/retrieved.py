"""What a selection retrieved: which buckets, how many keys, and whether a head was held back by its budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from muse_attention import ops
from muse_attention.config import MuSeConfig
from muse_attention.core.bits import unpack_bits
from muse_attention.core.recording import RecordedCall
from muse_attention.core.structures import Selection

_BUCKETS_AT_ONCE = 1 << 24
"""Of all queries that are looked at together."""


@dataclass(frozen=True)
class Retrieval:
    """Means over the queries of each head, (batch, query heads), float64."""

    pairs_per_query: Tensor
    """buckets that a query retrieves"""
    keys_per_query: Tensor
    """keys in them"""
    share_retrieving: Tensor
    """share of queries that retrieve anything"""
    at_budget: Tensor | None
    """1 where the budget of the head holds it back: with twice as much it would retrieve more, else 0. None without a
    tolerance: the paper's rule retrieves as much for every query."""


def measure_retrieval(call: RecordedCall) -> Retrieval | None:
    """What a recorded call retrieved; None where there is nothing to retrieve, as in exact attention."""
    config = call.config
    if not config.monopole and config.retrieved_clusters == 0:
        return None
    pairs, keys = _count(call, call.selection)
    return Retrieval(
        pairs_per_query=pairs.mean(-1),
        keys_per_query=keys.mean(-1),
        share_retrieving=(pairs > 0).double().mean(-1),
        at_budget=None if config.tolerance is None else _is_held_back(call, pairs).double(),
    )


def retrieved_buckets(selection: Selection, config: MuSeConfig, length: int) -> Tensor:
    """(batch, query heads, queries, blocks, key clusters) bool: the buckets that each query of a selection retrieves.

    The selection may be of some queries of the `length` alone. This is large: take a few queries at a time.
    """
    if config.tolerance is not None:
        return unpack_bits(selection.retrieved, config.key_clusters)
    blocks = config.number_of_blocks(length)
    nothing = blocks * config.key_clusters
    bucket = selection.retrieved.long() * config.key_clusters + selection.opened[..., None]
    place = torch.where(selection.retrieved < 0, nothing, bucket).flatten(3)
    found = torch.zeros(*place.shape[:3], nothing + 1, dtype=torch.bool, device=place.device)
    return found.scatter_(3, place, True)[..., :nothing].unflatten(3, (blocks, config.key_clusters))


def opened_clusters(selection: Selection, config: MuSeConfig) -> Tensor:
    """(batch, query heads, queries, key clusters) bool: the clusters that each query of a selection opens."""
    if config.tolerance is not None:
        return unpack_bits(selection.opened, config.key_clusters)
    place = torch.where(selection.opened < 0, config.key_clusters, selection.opened).long()
    found = torch.zeros(*place.shape[:3], config.key_clusters + 1, dtype=torch.bool, device=place.device)
    return found.scatter_(3, place, True)[..., : config.key_clusters]


def bucket_sizes(key_assignment: Tensor, config: MuSeConfig) -> Tensor:
    """(batch, key heads, blocks, key clusters) int64: keys in each bucket, of a (batch, key heads, N) assignment."""
    batch, heads, length = key_assignment.shape
    blocks = config.number_of_blocks(length)
    block = torch.arange(length, device=key_assignment.device) // config.block_size
    head = torch.arange(batch * heads, device=key_assignment.device)[:, None]
    place = (head * blocks + block) * config.key_clusters + key_assignment.flatten(0, 1)
    counts = torch.bincount(place.flatten(), minlength=batch * heads * blocks * config.key_clusters)
    return counts.view(batch, heads, blocks, config.key_clusters)


def _count(call: RecordedCall, selection: Selection) -> tuple[Tensor, Tensor]:
    """Buckets that each query retrieves and keys in them, (batch, query heads, N) each, float64."""
    batch, heads, length, _ = call.query.shape
    sizes = bucket_sizes(call.clusters.key_assignment, call.config).flatten(2).double()
    sizes = sizes.repeat_interleave(heads // call.key.shape[1], dim=1)
    counted = torch.stack([torch.ones_like(sizes), sizes], dim=-1)
    at_once = max(1, _BUCKETS_AT_ONCE // (batch * heads * sizes.shape[2]))
    parts = [
        retrieved_buckets(Selection(opened, retrieved), call.config, length).flatten(3).double() @ counted
        for opened, retrieved in zip(
            selection.opened.split(at_once, dim=2), selection.retrieved.split(at_once, dim=2), strict=True
        )
    ]
    pairs, keys = torch.cat(parts, dim=2).unbind(-1)
    return pairs, keys


def _is_held_back(call: RecordedCall, pairs: Tensor) -> Tensor:
    """(batch, query heads) bool"""
    roomier = call.config.replace(retrieved_clusters=max(1, 2 * call.config.retrieved_clusters))
    with torch.no_grad():
        _, selection = ops.attend(replace(call, config=roomier), call.backend)
    return _count(call, selection)[0].sum(-1) > pairs.sum(-1)
