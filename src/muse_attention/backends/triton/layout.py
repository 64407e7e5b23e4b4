"""The layout of heads, queries and keys for the kernels: their orders, and groups of heads that fit the memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.accumulation import Accumulated, accumulate
from muse_attention.backends.triton.bucket_summaries import ROWS_OF_TILE as KEYS_OF_TILE
from muse_attention.backends.triton.bucket_summaries import summarise
from muse_attention.backends.triton.device_functions import in_range, load_row, load_rows, store_rows
from muse_attention.backends.triton.grouping import Groups
from muse_attention.backends.triton.integer_tables import tables_in
from muse_attention.backends.triton.key_offset import find_key_offset
from muse_attention.backends.triton.numbers import accumulator, cdiv
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.segments import ROWS_OF_TILE, Segments
from muse_attention.backends.triton.tiles import cut_groups
from muse_attention.config import MuSeConfig
from muse_attention.core.structures import Summaries

WORKSPACE_BYTES = 1 << 30
WORKSPACE_OF_INPUTS = 2
"""The approximate limit on intermediate results: this many bytes, or this multiple of the inputs' bytes if that is
more. Key heads are processed in groups that stay below it."""
_TILE = 64


@dataclass(frozen=True)
class Plan:
    """What the forward pass saves for the backward pass besides its results: sorted orders.

    They share one tensor of integers, an output of the operator.
    """

    segments: Groups
    """queries, (H, N), by query cluster and block"""
    buckets: Groups
    """keys, (G, N), by key cluster and block"""
    pairs: Groups
    """(G, R N picks), by bucket"""

    @staticmethod
    def shapes(
        config: MuSeConfig, heads: int, key_heads: int, length: int, query_clusters: int, picks: int
    ) -> list[tuple[int, int]]:
        """Of the orders and starts of all three. `picks` is the number of pairs of a query."""
        blocks = config.number_of_blocks(length)
        buckets = config.key_clusters * blocks
        return [
            (heads, length),
            (heads, query_clusters * blocks + 1),
            (key_heads, length),
            (key_heads, buckets + 1),
            (key_heads, heads // key_heads * length * picks),
            (key_heads, buckets + 1),
        ]

    @classmethod
    def of(cls, memory: Tensor, shapes: list[tuple[int, int]]) -> Plan:
        """Views of a tensor that holds tables of these shapes."""
        tables = tables_in(memory, shapes)
        return cls(*map(Groups, tables[::2], tables[1::2]))

    def for_heads(self, group: slice, query_group: slice) -> Plan:
        """The part that belongs to some key heads and their query heads."""
        return Plan(self.segments[query_group], self.buckets[group], self.pairs[group])


@dataclass(frozen=True)
class Heads:
    """Some key heads, of any sequence of the batch, and the query heads that share them."""

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
    """(G, D), which is subtracted from the means of keys"""

    @classmethod
    def of(cls, *tensors: Tensor) -> Heads:
        """From tensors with the axes batch and heads; it computes `key_offset`."""
        flat = [tensor.flatten(0, 1) for tensor in tensors]
        flat.append(find_key_offset(flat[1]))
        return cls(*flat)

    @property
    def shared_by(self) -> int:
        return self.queries.shape[0] // self.keys.shape[0]

    def __getitem__(self, group: slice) -> Heads:
        query_group = self._query_group(group)
        return Heads(
            self.queries[query_group],
            self.keys[group],
            self.values[group],
            self.query_centroids[query_group],
            self.query_assignment[query_group],
            self.key_assignment[group],
            self.key_offset[group],
        )

    def _query_group(self, group: slice) -> slice:
        return slice(group.start * self.shared_by, group.stop * self.shared_by)

    def plan_shapes(self, config: MuSeConfig, picks: int) -> list[tuple[int, int]]:
        key_heads, length, _ = self.keys.shape
        return Plan.shapes(config, self.queries.shape[0], key_heads, length, self.query_centroids.shape[1], picks)

    def groups(self, config: MuSeConfig, picks: int, *, is_backward: bool) -> list[tuple[slice, slice]]:
        """Groups of key heads that fit the workspace, of about equal size, and their query heads."""
        key_heads, length, head_dim = self.keys.shape
        value_dim = self.values.shape[-1]
        dims = head_dim + value_dim
        buckets = config.number_of_blocks(length) * config.key_clusters
        summaries = self.shared_by * self.query_centroids.shape[1] * buckets * dims
        pairs = self.shared_by * length * picks
        if is_backward:
            # Two kinds of summaries and their gradients; then one of these gradients, those of each pair's query, and
            # those of keys and values in pieces.
            rows = (2 * self.shared_by + 1) * length * dims
            pieces = (length + KEYS_OF_TILE * buckets) * dims if pairs else 0
            numbers = rows + max(4 * summaries, summaries + pairs * head_dim + pieces)
        else:
            # Two kinds of summaries; then the output of each pair.
            rows = (self.shared_by + 1) * length * dims
            numbers = rows + max(2 * summaries, pairs * value_dim)
        input_bytes = sum(tensor.nbytes for tensor in (self.queries, self.keys, self.values))
        room = max(WORKSPACE_BYTES, WORKSPACE_OF_INPUTS * input_bytes)
        number = cdiv(key_heads, max(1, room // (numbers * self.keys.element_size())))
        at_once = cdiv(key_heads, number)
        groups = [slice(begin, min(begin + at_once, key_heads)) for begin in range(0, key_heads, at_once)]
        return [(group, self._query_group(group)) for group in groups]


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
        """Sort the heads by the orders of `plan`."""
        residuals, shift = take_residuals(
            heads.queries, heads.query_centroids, heads.query_assignment, heads.key_offset, plan.segments, scale=scale
        )
        return cls(
            Segments(
                residuals,
                shift,
                plan.segments,
                cut_groups(plan.segments, ROWS_OF_TILE),
                config.number_of_blocks(heads.keys.shape[1]),
                heads.query_centroids.shape[1],
                config.key_clusters,
                is_causal,
            ),
            plan.buckets,
            take_rows(heads.keys, plan.buckets),
            take_rows(heads.values, plan.buckets),
            heads.key_offset,
            heads.query_centroids,
        )

    def summaries(self) -> tuple[Summaries, Accumulated]:
        """Summaries of every bucket for every query cluster, and of all that each block sees."""
        bucket_summaries = summarise(
            self.keys, self.values, self.centroids, self.buckets, self.key_offset, blocks=self.segments.blocks
        )
        return bucket_summaries, accumulate(bucket_summaries, is_causal=self.segments.is_causal)


def take_rows(table: Tensor, groups: Groups) -> Tensor:
    """(S, N, X) rows in the order of their groups."""
    _, length, columns = table.shape
    taken = torch.empty_like(table)
    _take_rows[_grid(table)](
        table_ptr=table, order_ptr=groups.order, taken_ptr=taken, length=length, X=columns, TILE=_TILE
    )
    return taken


def take_residuals(
    queries: Tensor,
    centroids: Tensor,
    assignment: Tensor,
    key_offset: Tensor,
    segments: Groups,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Scaled queries less the centroid of their cluster, (H, N, D), in the order of `segments`; and (H, N), the
    products of these residuals with the (G, D) `key_offset`, computed before rounding."""
    heads, length, head_dim = queries.shape
    residuals, shift = torch.empty_like(queries), key_offset.new_empty(heads, length)
    _take_residuals[_grid(queries)](
        queries_ptr=queries, centroids_ptr=centroids, assignment_ptr=assignment, order_ptr=segments.order,
        key_offset_ptr=key_offset, residuals_ptr=residuals, shift_ptr=shift, length=length, clusters=centroids.shape[1],
        shared_by=heads // key_offset.shape[0], SCALE=scale, D=head_dim, TILE=_TILE, ACC=accumulator(queries.dtype),
    )  # fmt: skip
    return residuals, shift


def _grid(table: Tensor) -> tuple[int, int]:
    return cdiv(table.shape[1], _TILE), table.shape[0]


@kernel(stage="sorting", do_not_specialize=["length"])
def _take_rows(table_ptr, order_ptr, taken_ptr, length, X: tl.constexpr, TILE: tl.constexpr):
    """Copy rows into the order of their groups.

    Grid: (N / TILE, S). `table_ptr`, `taken_ptr`: (S, N, X); `order_ptr`: (S, N) int32.
    """
    first = tl.program_id(1).to(tl.int64) * length
    offs_place = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    mask_row = offs_place < length  # [TILE]
    offs_row = tl.load(order_ptr + first + offs_place, mask=mask_row, other=0)  # [TILE]
    rows = load_rows(table_ptr, first, offs_row, mask_row, X)  # [TILE, X]
    store_rows(taken_ptr, first, offs_place, mask_row, rows, X)


@kernel(stage="sorting", do_not_specialize=["length", "clusters", "shared_by"])
def _take_residuals(
    queries_ptr, centroids_ptr, assignment_ptr, order_ptr, key_offset_ptr, residuals_ptr, shift_ptr, length, clusters,
    shared_by, SCALE: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Scaled queries less the centroid of their cluster, in the order of the segments.

    Grid: (N / TILE, H). `queries_ptr`, `residuals_ptr`: (H, N, D); `centroids_ptr`: (H, Q, D); `assignment_ptr`,
    `order_ptr`: (H, N) int32; `key_offset_ptr`: (G, D); `shift_ptr`: (H, N).
    """
    head = tl.program_id(1).to(tl.int64)
    first = head * length
    offs_place = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    mask_row = offs_place < length  # [TILE]
    offs_row = tl.load(order_ptr + first + offs_place, mask=mask_row, other=0)  # [TILE]
    cluster = in_range(tl.load(assignment_ptr + first + offs_row, mask=mask_row, other=0), clusters)  # [TILE]
    queries = load_rows(queries_ptr, first, offs_row, mask_row, D).to(ACC)  # [TILE, D]
    residual = queries * SCALE - load_rows(centroids_ptr, head * clusters, cluster, mask_row, D).to(ACC)  # [TILE, D]
    store_rows(residuals_ptr, first, offs_place, mask_row, residual, D)
    offset = load_row(key_offset_ptr, head // shared_by, D)  # [D]
    tl.store(shift_ptr + first + offs_place, tl.sum(residual * offset[None, :], 1), mask=mask_row)
