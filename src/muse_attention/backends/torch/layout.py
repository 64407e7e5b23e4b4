"""How heads, queries and keys are laid out for the stages.

Every (batch, key head) is one of `G` key heads; the `R` query heads that share it come with it. Queries are rows,
(G R N, ...), keys and values stay (G, N, ...). To the stages, the query clusters of all the query heads of a key head
are simply its query clusters, so that none of them knows of grouped-query attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.backends.torch import summaries
from muse_attention.backends.torch.grouping import Groups, group_rows, head_groups
from muse_attention.backends.torch.selection import Scored
from muse_attention.config import MuSeConfig
from muse_attention.core.call import Call
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Clusters, Selection

SUMMARY_ELEMENTS = 1 << 23
"""Numbers in the summaries held at a time: beyond that, query clusters go in groups."""


def with_key_heads(call: Call) -> Call:
    """The call with every key head as a sequence of its own, which the query heads that share it attend to."""
    shared_by = call.query.shape[1] // call.key.shape[1]
    query, centroids, assignment = (
        by_key_head(tensor, shared_by)
        for tensor in (call.query, call.clusters.query_centroids, call.clusters.query_assignment)
    )
    key, value, key_assignment = (
        by_key_head(tensor, 1) for tensor in (call.key, call.value, call.clusters.key_assignment)
    )
    clusters = Clusters(centroids, assignment, call.clusters.key_centroids, key_assignment)
    return dataclasses.replace(call, query=query, key=key, value=value, clusters=clusters)


def groups_of_heads(call: Call) -> list[slice]:
    """Groups of key heads small enough for the workspace."""
    config = call.config
    key_heads, shared_by, length, head_dim = call.query.shape
    value_dim, query_clusters = call.value.shape[-1], call.clusters.query_centroids.shape[2]
    of_summaries = query_clusters * config.key_clusters * config.number_of_blocks(length) * (head_dim + value_dim)
    picks = min(config.retrieved_clusters * config.retrieved_blocks, 16)
    of_rows = length * (4 * head_dim + picks * value_dim)
    return head_groups(key_heads, shared_by * (4 * min(SUMMARY_ELEMENTS, of_summaries) + of_rows))


def as_rows(tensor: Tensor) -> Tensor:
    """(G, R, N, X) -> (G R N, X), in the dtype of the computation."""
    return tensor.to(compute_dtype(tensor.dtype)).flatten(0, 2)


def far_field(call: Call, group: slice) -> FarField:
    """The inputs of the stages beyond the own block, for a group of key heads of a call `with_key_heads`."""
    config, clusters = call.config, call.clusters
    query, key, value = call.query[group], call.key[group], call.value[group]
    key_heads, query_heads, length, _ = query.shape
    blocks = config.number_of_blocks(length)
    queries = as_rows(query) * call.scale
    device = queries.device
    block = torch.arange(length, device=device) // config.block_size
    head = torch.arange(key_heads, device=device)[:, None]
    per_head = clusters.query_centroids.shape[2]
    query_clusters = query_heads * per_head
    centroids, assignment = _largest_first(
        clusters.query_centroids[group].to(queries.dtype), clusters.query_assignment[group].long()
    )
    centroids = centroids.flatten(1, 2)  # (G, R Q, D)
    query_cluster = assignment + torch.arange(query_heads, device=device)[:, None] * per_head  # (G, R, N)
    key_cluster = clusters.key_assignment[group, 0].long()  # (G, N)
    segment = (block * key_heads + head[..., None]) * query_clusters + query_cluster
    bucket = (head * blocks + block) * config.key_clusters + key_cluster
    own_centroid = centroids.flatten(0, 1)[(head[..., None] * query_clusters + query_cluster).flatten()]
    return FarField(
        queries=queries,
        residuals=queries - own_centroid,
        keys=key[:, 0].to(queries.dtype).contiguous(),
        values=value[:, 0].to(queries.dtype).contiguous(),
        centroids=centroids,
        key_cluster=key_cluster,
        segments=group_rows(segment.flatten(), key_heads * blocks * query_clusters),
        buckets=group_rows(bucket.flatten(), key_heads * blocks * config.key_clusters),
        blocks=blocks,
        query_heads=query_heads,
        config=config,
        is_causal=call.is_causal,
    )


@dataclass(frozen=True)
class FarField:
    """Queries as rows, keys and values per key head, and the groups they fall into."""

    queries: Tensor
    """(G R N, D), scaled"""
    residuals: Tensor
    """(G R N, D)"""
    keys: Tensor
    """(G, N, D)"""
    values: Tensor
    """(G, N, Dv)"""
    centroids: Tensor
    """(G, R Q, D)"""
    key_cluster: Tensor
    """(G, N) int64"""
    segments: Groups
    """rows of queries by (block, key head, query head, query cluster)"""
    buckets: Groups
    """rows of keys by (key head, block, key cluster)"""
    blocks: int
    query_heads: int
    config: MuSeConfig
    is_causal: bool

    @property
    def key_rows(self) -> Tensor:
        return self.keys.flatten(0, 1)

    @property
    def value_rows(self) -> Tensor:
        return self.values.flatten(0, 1)

    def parts(self) -> Iterator[FarField]:
        """The far field of some query clusters at a time: only the queries of a cluster read its summaries.

        A dipole's correction is found for all of them together.
        """
        query_clusters, config = self.centroids.shape[1], self.config
        elements = self.keys.shape[0] * self.blocks * config.key_clusters * (self.keys.shape[2] + self.values.shape[2])
        at_once = query_clusters if config.dipole != "none" else max(1, SUMMARY_ELEMENTS // elements)
        for begin in range(0, query_clusters, at_once):
            some = slice(begin, begin + at_once)
            of_segments = (
                part.view(-1, query_clusters)[:, some].flatten() for part in (self.segments.starts, self.segments.sizes)
            )
            yield dataclasses.replace(
                self, centroids=self.centroids[:, some], segments=Groups(self.segments.order, *of_segments)
            )

    def score(self) -> Scored:
        """The queries, and the summaries of each bucket and of what each block sees."""
        of_buckets = summaries.summarise(
            self.keys, self.values, self.centroids, self.buckets, self.blocks, self.config.key_clusters
        )
        seen = summaries.accumulate(of_buckets, is_causal=self.is_causal)
        return Scored(self.residuals, self.segments, of_buckets, seen, self.is_causal)

    def picks(self, selected: Selection) -> Tensor:
        """(G R N, picks) int64: the buckets that each query retrieves; -1 for none."""
        head = torch.arange(self.queries.shape[0], device=self.queries.device)
        head = head // (self.queries.shape[0] // self.keys.shape[0])
        block = selected.retrieved.long()
        bucket = (head[:, None, None] * self.blocks + block) * self.config.key_clusters
        return torch.where(block < 0, -1, bucket + selected.opened.long()[..., None]).flatten(1)


def by_key_head(tensor: Tensor, heads: int) -> Tensor:
    """(batch, key heads * heads, ...) -> (G, heads, ...)"""
    return tensor.reshape(tensor.shape[0] * tensor.shape[1] // heads, heads, *tensor.shape[2:])


def _largest_first(centroids: Tensor, assignment: Tensor) -> tuple[Tensor, Tensor]:
    """Renumber the query clusters of each head by size, so that neighbours have segments of similar size."""
    sizes = torch.zeros_like(centroids[..., 0], dtype=torch.int64)
    sizes.scatter_add_(2, assignment, torch.ones_like(assignment))
    order = sizes.argsort(dim=2, descending=True, stable=True)  # (G, R, Q)
    return centroids.gather(2, order[..., None].expand_as(centroids)), order.argsort(dim=2).gather(2, assignment)
