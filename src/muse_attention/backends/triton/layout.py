"""How heads, queries and keys are laid out for the kernels, and how many heads go through them at a time."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from muse_attention.backends.triton.accumulation import accumulate
from muse_attention.backends.triton.bucket_summaries import ROWS_OF_TILE as KEYS_OF_TILE
from muse_attention.backends.triton.bucket_summaries import summarise
from muse_attention.backends.triton.grouping import Groups
from muse_attention.backends.triton.key_offset import find_key_offset
from muse_attention.backends.triton.numbers import cdiv
from muse_attention.backends.triton.plan import Plan
from muse_attention.backends.triton.rows import take_residuals, take_rows
from muse_attention.backends.triton.segments import ROWS_OF_TILE, Segments
from muse_attention.backends.triton.summaries import Accumulated
from muse_attention.backends.triton.tiles import tiles_of_groups
from muse_attention.config import MuSeConfig
from muse_attention.core.structures import Summaries

WORKSPACE_BYTES = 1 << 30
WORKSPACE_OF_INPUTS = 2
"""Intermediate results held at a time, about: so many bytes, or so many times the bytes of the inputs if that is more.
Key heads go in groups that need no more."""


@dataclass(frozen=True)
class Heads:
    """Some key heads, of any sequence, and the query heads that share them."""

    queries: Tensor
    """(H, N, D), unscaled"""
    keys: Tensor
    """(G, N, D)"""
    values: Tensor
    """(G, N, Dv)"""
    query_centroids: Tensor
    """(H, Q, D)"""
    query_assignment: Tensor
    """(H, N) int32"""
    key_assignment: Tensor
    """(G, N) int32"""
    key_offset: Tensor
    """(G, D): the point from which the means of keys are stored"""

    @classmethod
    def of(cls, *tensors: Tensor) -> Heads:
        """From the same with the axes batch and heads, without `key_offset`, which it finds."""
        flat = [tensor.flatten(0, 1) for tensor in tensors]
        flat.append(find_key_offset(flat[1]))
        return cls(*flat)

    @property
    def shared_by(self) -> int:
        return self.queries.shape[0] // self.keys.shape[0]

    def __getitem__(self, group: slice) -> Heads:
        of_queries = self.slice_of_queries(group)
        return Heads(
            self.queries[of_queries],
            self.keys[group],
            self.values[group],
            self.query_centroids[of_queries],
            self.query_assignment[of_queries],
            self.key_assignment[group],
            self.key_offset[group],
        )

    def slice_of_queries(self, group: slice) -> slice:
        return slice(group.start * self.shared_by, group.stop * self.shared_by)

    def plan_shapes(self, config: MuSeConfig, picks: int) -> list[tuple[int, int]]:
        key_heads, length, _ = self.keys.shape
        return Plan.shapes(config, self.queries.shape[0], key_heads, length, self.query_centroids.shape[1], picks)

    def groups(self, config: MuSeConfig, picks: int, *, is_backward: bool) -> list[slice]:
        """Groups of key heads, of equal size or nearly so, that fit the workspace."""
        key_heads, length, head_dim = self.keys.shape
        value_dim = self.values.shape[-1]
        both = head_dim + value_dim
        buckets = config.number_of_blocks(length) * config.key_clusters
        of_summaries = self.shared_by * self.query_centroids.shape[1] * buckets * both
        of_pairs = self.shared_by * length * picks
        if is_backward:
            # Two kinds of summaries and their gradients; then one of these, the gradient of each pair's query, and
            # those of keys and values in pieces.
            of_rows = (2 * self.shared_by + 1) * length * both
            of_pieces = (length + KEYS_OF_TILE * buckets) * both if of_pairs else 0
            numbers = of_rows + max(4 * of_summaries, of_summaries + of_pairs * head_dim + of_pieces)
        else:
            # Two kinds of summaries; then the output of each pair.
            of_rows = (self.shared_by + 1) * length * both
            numbers = of_rows + max(2 * of_summaries, of_pairs * value_dim)
        of_inputs = sum(tensor.nbytes for tensor in (self.queries, self.keys, self.values))
        room = max(WORKSPACE_BYTES, WORKSPACE_OF_INPUTS * of_inputs)
        number = cdiv(key_heads, max(1, room // (numbers * self.keys.element_size())))
        at_once = cdiv(key_heads, number)
        return [slice(begin, min(begin + at_once, key_heads)) for begin in range(0, key_heads, at_once)]


@dataclass(frozen=True)
class FarField:
    """Queries, keys and values in the order of their groups."""

    segments: Segments
    buckets: Groups
    keys: Tensor
    values: Tensor
    key_offset: Tensor
    centroids: Tensor

    @classmethod
    def of(cls, heads: Heads, plan: Plan, config: MuSeConfig, *, is_causal: bool, scale: float) -> FarField:
        """`plan` holds the orders."""
        in_segments = Groups(plan.segment_order, plan.segment_starts)
        buckets = Groups(plan.bucket_order, plan.bucket_starts)
        residuals, shift = take_residuals(
            heads.queries, heads.query_centroids, heads.query_assignment, heads.key_offset, in_segments, scale=scale
        )
        return cls(
            Segments(
                residuals,
                shift,
                in_segments,
                tiles_of_groups(in_segments, ROWS_OF_TILE),
                config.number_of_blocks(heads.keys.shape[1]),
                heads.query_centroids.shape[1],
                config.key_clusters,
                is_causal,
            ),
            buckets,
            take_rows(heads.keys, buckets),
            take_rows(heads.values, buckets),
            heads.key_offset,
            heads.query_centroids,
        )

    def summaries(self) -> tuple[Summaries, Accumulated]:
        """Of every bucket for every query cluster, and what is seen of them from each block."""
        of_buckets = summarise(
            self.keys, self.values, self.centroids, self.buckets, self.key_offset, blocks=self.segments.blocks
        )
        return of_buckets, accumulate(of_buckets, is_causal=self.segments.is_causal)
