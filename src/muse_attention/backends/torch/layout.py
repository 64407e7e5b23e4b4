"""How heads, queries and keys are laid out for the stages.

Every (batch, key head) is one of `G` key heads; the `R` query heads that share it come with it. Queries are rows,
(G R N, ...), keys and values stay (G, N, ...). To the stages, the query clusters of all the query heads of a key head
are simply its query clusters, so that none of them knows of grouped-query attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muse_attention.backends.torch import summaries
from muse_attention.backends.torch.grouping import Groups, group_rows, head_groups
from muse_attention.backends.torch.segments import Scored
from muse_attention.config import MuSeConfig
from muse_attention.core.call import Call
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Selection

SUMMARY_ELEMENTS = 1 << 23
"""Numbers in the summaries held at a time: beyond that, query clusters go in groups."""


@dataclass(frozen=True)
class Heads:
    """Some key heads, of any sequence, and the query heads that share them."""

    query: Tensor
    """(G, R, N, D), unscaled, in the dtype of the inputs"""
    key: Tensor
    """(G, 1, N, D)"""
    value: Tensor
    """(G, 1, N, Dv)"""
    query_centroids: Tensor
    """(G, R, Q, D)"""
    query_assignment: Tensor
    """(G, R, N)"""
    key_assignment: Tensor
    """(G, N)"""
    scale: float
    config: MuSeConfig
    is_causal: bool

    @classmethod
    def of(cls, call: Call) -> Heads:
        """All heads of a call."""
        shared_by, clusters = call.query.shape[1] // call.key.shape[1], call.clusters
        return cls(
            query=by_key_head(call.query, shared_by),
            key=by_key_head(call.key, 1),
            value=by_key_head(call.value, 1),
            query_centroids=by_key_head(clusters.query_centroids, shared_by),
            query_assignment=by_key_head(clusters.query_assignment, shared_by),
            key_assignment=by_key_head(clusters.key_assignment, 1)[:, 0],
            scale=call.scale,
            config=call.config,
            is_causal=call.is_causal,
        )

    def groups(self) -> list[slice]:
        """Groups of key heads small enough for the workspace."""
        config = self.config
        key_heads, shared_by, length, head_dim = self.query.shape
        value_dim, query_clusters = self.value.shape[-1], self.query_centroids.shape[2]
        of_summaries = query_clusters * config.key_clusters * config.number_of_blocks(length) * (head_dim + value_dim)
        picks = min(config.retrieved_clusters * config.retrieved_blocks, 16)
        of_rows = length * (4 * head_dim + picks * value_dim)
        return head_groups(key_heads, shared_by * (4 * min(SUMMARY_ELEMENTS, of_summaries) + of_rows))

    def __getitem__(self, group: slice) -> Heads:
        own: dict[str, Any] = {name: part[group] for name, part in vars(self).items() if isinstance(part, Tensor)}
        return dataclasses.replace(self, **own)

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.query.dtype)

    def rows(self, tensor: Tensor) -> Tensor:
        """(G, R, N, X) -> (G R N, X), in the dtype of the computation."""
        return tensor.to(self.dtype).flatten(0, 2)

    def far_field(self) -> FarField:
        """The inputs of the stages beyond the own block."""
        config = self.config
        key_heads, query_heads, length, _ = self.query.shape
        blocks = config.number_of_blocks(length)
        queries = self.rows(self.query) * self.scale
        device = queries.device
        block = torch.arange(length, device=device) // config.block_size
        head = torch.arange(key_heads, device=device)[:, None]
        per_head = self.query_centroids.shape[2]
        query_clusters = query_heads * per_head
        centroids, assignment = _largest_first(self.query_centroids.to(self.dtype), self.query_assignment.long())
        centroids = centroids.flatten(1, 2)  # (G, R Q, D)
        query_cluster = assignment + torch.arange(query_heads, device=device)[:, None] * per_head  # (G, R, N)
        key_cluster = self.key_assignment.long()  # (G, N)
        segment = (block * key_heads + head[..., None]) * query_clusters + query_cluster
        bucket = (head * blocks + block) * config.key_clusters + key_cluster
        own_centroid = centroids.flatten(0, 1)[(head[..., None] * query_clusters + query_cluster).flatten()]
        return FarField(
            queries=queries,
            residuals=queries - own_centroid,
            keys=self.key[:, 0].to(self.dtype).contiguous(),
            values=self.value[:, 0].to(self.dtype).contiguous(),
            centroids=centroids,
            key_cluster=key_cluster,
            segments=group_rows(segment.flatten(), key_heads * blocks * query_clusters),
            buckets=group_rows(bucket.flatten(), key_heads * blocks * config.key_clusters),
            blocks=blocks,
            query_heads=query_heads,
            config=config,
            is_causal=self.is_causal,
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
