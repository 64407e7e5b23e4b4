"""Everything beyond the own block, as a sequence of kernels. No size is ever read back: nothing waits for the GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.config import MuSeConfig
from muse_attention.kernels import (
    clustering,
    error_control,
    key_spread,
    merging,
    pairs,
    retrieval,
    selection,
    summaries,
    terms,
)
from muse_attention.kernels.grouping import Groups, group_by_cluster_and_block, tiles_of_groups
from muse_attention.kernels.launching import ALIGNMENT
from muse_attention.kernels.numbers import cdiv
from muse_attention.kernels.opened import list_opened, list_opened_bits
from muse_attention.kernels.plan import Plan, pairs_per_query
from muse_attention.kernels.rows import square_distances, take_residuals, take_rows
from muse_attention.kernels.segments import ROWS_OF_TILE, Segments
from muse_attention.precision import compute_dtype
from muse_attention.structures import Clusters, Partial, Selection, SelectionShapes, Side

WORKSPACE_BYTES = 7 << 28
WORKSPACE_OF_INPUTS = 2
"""Intermediate results held at a time, about: so many bytes, or so many times the bytes of the inputs if that is more.
Key heads go in groups that need no more."""


def cluster(sides: list[Side], clusters: int, config: MuSeConfig) -> list[tuple[Tensor, Tensor]]:
    """Centroids and assignment of one or two sides."""
    found = clustering.cluster([side._replace(vectors=_by_head(side.vectors)) for side in sides], clusters, config)
    return [
        (
            centroids.clone().view(*side.vectors.shape[:2], clusters, side.vectors.shape[3]),
            assignment.clone().view(side.vectors.shape[:3]),
        )
        for side, (centroids, assignment) in zip(sides, found, strict=True)
    ]


def find_key_spread(key: Tensor, centroids: Tensor, assignment: Tensor) -> Tensor:
    """(batch, key heads, D): variance of the keys about their centroids in each dimension, scaled to a mean of 1."""
    spread = key_spread.find_key_spread(_by_head(key), _by_head(centroids), _by_head(assignment))
    return spread.view(*key.shape[:2], key.shape[3])


def attend(
    own: Partial,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Clusters,
    chosen: Selection | None,
    shapes: SelectionShapes,
    config: MuSeConfig,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Partial, Selection, Tensor]:
    """Merge the far field into `own`; also the selection, `chosen` if there is one, else of these `shapes`, and what
    `attend_backward` wants to be told."""
    heads = _Heads.of(query, key, value, clusters)
    merged = Partial(_by_head(own.out), _by_head(own.lse))
    rows = None if chosen is None else _selection_by_head(chosen)
    picks = pairs_per_query(config, shapes.retrieved if rows is None else rows.retrieved.shape[-2:])
    of_plan = heads.plan_shapes(config, picks)
    memory = torch.empty(sum(map(math.prod, of_plan)), dtype=torch.int32, device=query.device)
    plan = Plan.of(memory, of_plan)
    parts = []
    for group in heads.groups(config, picks):
        some = heads[group]
        of_queries = some.slice_of_queries(group)
        some_merged = Partial(merged.out[of_queries], merged.lse[of_queries])
        picked = None if rows is None else Selection(rows.opened[of_queries], rows.retrieved[of_queries])
        parts.append(
            _attend(
                some_merged,
                some,
                picked,
                plan.of_heads(group, of_queries),
                shapes,
                picks,
                config,
                is_causal=is_causal,
                scale=scale,
            )
        )
    if chosen is None:
        opened = parts[0].opened if len(parts) == 1 else torch.cat([part.opened for part in parts])
        retrieved = parts[0].retrieved if len(parts) == 1 else torch.cat([part.retrieved for part in parts])
        of_rows = query.shape[:3]
        chosen = Selection(opened.view(*of_rows, *shapes.opened), retrieved.view(*of_rows, *shapes.retrieved))
    return Partial(merged.out.view(own.out.shape), merged.lse.view(own.lse.shape)), chosen, memory


def attend_backward(
    own: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Clusters,
    selected: Selection,
    merged: Partial,
    memory: Tensor,
    config: MuSeConfig,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add the gradients of the far field to those of the own block. `memory` is what `attend` left."""
    heads = _Heads.of(query, key, value, clusters)
    rows = _selection_by_head(selected)
    gradients = [_by_head(gradient) for gradient in own]
    grad_out, out = _by_head(grad_out), _by_head(merged.out)
    lse = _by_head(merged.lse)
    grad_lse = None if grad_lse is None else _by_head(grad_lse)
    picks = pairs_per_query(config, rows.retrieved.shape[-2:])
    plan = Plan.of(memory, heads.plan_shapes(config, picks))
    for group in heads.groups(config, picks):
        some = heads[group]
        of_queries = some.slice_of_queries(group)
        _attend_backward(
            (gradients[0][of_queries], gradients[1][group], gradients[2][group]),
            grad_out[of_queries],
            None if grad_lse is None else grad_lse[of_queries],
            Partial(out[of_queries], lse[of_queries]),
            some,
            Selection(rows.opened[of_queries], rows.retrieved[of_queries]),
            plan.of_heads(group, of_queries),
            picks,
            config,
            is_causal=is_causal,
            scale=scale,
        )
    grad_query, grad_key, grad_value = gradients
    return grad_query.view(query.shape), grad_key.view(key.shape), grad_value.view(value.shape)


@dataclass(frozen=True)
class _Heads:
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
    key_spread: Tensor | None
    """(G, D)"""

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, clusters: Clusters) -> _Heads:
        return cls(
            _by_head(query),
            _by_head(key),
            _by_head(value),
            _by_head(clusters.query_centroids).to(compute_dtype(query.dtype)),
            _by_head(clusters.query_assignment).int(),
            _by_head(clusters.key_assignment).int(),
            None if clusters.key_spread is None else _by_head(clusters.key_spread),
        )

    @property
    def shared_by(self) -> int:
        return self.queries.shape[0] // self.keys.shape[0]

    def __getitem__(self, group: slice) -> _Heads:
        of_queries = self.slice_of_queries(group)
        return _Heads(
            self.queries[of_queries],
            self.keys[group],
            self.values[group],
            self.query_centroids[of_queries],
            self.query_assignment[of_queries],
            self.key_assignment[group],
            None if self.key_spread is None else self.key_spread[group],
        )

    def slice_of_queries(self, group: slice) -> slice:
        return slice(group.start * self.shared_by, group.stop * self.shared_by)

    def plan_shapes(self, config: MuSeConfig, picks: int) -> list[tuple[int, int]]:
        key_heads, length, _ = self.keys.shape
        return Plan.shapes(
            self.queries.shape[0],
            key_heads,
            length,
            config.number_of_blocks(length),
            self.query_centroids.shape[1],
            config.key_clusters,
            picks,
            is_ragged=config.tolerance is not None,
        )

    def groups(self, config: MuSeConfig, picks: int) -> list[slice]:
        """Groups of key heads, of equal size or nearly so, that fit the workspace."""
        key_heads, length, head_dim = self.keys.shape
        both = head_dim + self.values.shape[-1]
        buckets = config.number_of_blocks(length) * config.key_clusters
        of_summaries = self.shared_by * self.query_centroids.shape[1] * buckets * both
        of_rows = (2 * self.shared_by + 1) * length * both
        # Backward holds two kinds of summaries and their gradients; then one of these, the gradient of each pair's
        # query, and those of keys and values in pieces.
        of_pairs = self.shared_by * length * picks * head_dim
        of_pieces = (length + summaries.ROWS_OF_TILE * buckets) * both if of_pairs else 0
        numbers = of_rows + max(4 * of_summaries, of_summaries + of_pairs + of_pieces)
        of_inputs = sum(tensor.nbytes for tensor in (self.queries, self.keys, self.values))
        room = max(WORKSPACE_BYTES, WORKSPACE_OF_INPUTS * of_inputs)
        number = cdiv(key_heads, max(1, room // (numbers * self.keys.element_size())))
        at_once = cdiv(key_heads, number)
        return [slice(begin, min(begin + at_once, key_heads)) for begin in range(0, key_heads, at_once)]


@dataclass(frozen=True)
class _FarField:
    """Queries, keys and values in the order of their groups."""

    segments: Segments
    buckets: Groups
    keys: Tensor
    values: Tensor
    squares: Tensor | None
    """`square_distances` of the keys, if anyone asks how far they are apart"""
    centroids: Tensor

    @classmethod
    def of(cls, heads: _Heads, plan: Plan, config: MuSeConfig, *, is_causal: bool, scale: float) -> _FarField:
        """`plan` holds the orders."""
        in_segments, buckets = (
            Groups(plan.segment_order, plan.segment_starts),
            Groups(plan.bucket_order, plan.bucket_starts),
        )
        residuals, width = take_residuals(
            heads.queries, heads.query_centroids, heads.query_assignment, heads.key_spread, in_segments, scale=scale
        )
        keys, squares = take_rows(heads.keys, buckets), None
        if width is not None:
            squares = square_distances(keys, buckets, heads.key_assignment, config.block_size)
        return cls(
            Segments(
                residuals,
                width,
                config.uses_second_order,
                in_segments,
                tiles_of_groups(in_segments, ROWS_OF_TILE),
                config.number_of_blocks(heads.keys.shape[1]),
                heads.query_centroids.shape[1],
                config.key_clusters,
                is_causal,
            ),
            buckets,
            keys,
            take_rows(heads.values, buckets),
            squares,
            heads.query_centroids,
        )

    def summaries(self) -> tuple[summaries.ScoredSummaries, summaries.Accumulated]:
        return summaries.summarise(
            self.keys,
            self.values,
            self.centroids,
            self.buckets,
            self.segments.blocks,
            self.segments.key_clusters,
            self.squares,
            is_causal=self.segments.is_causal,
        )


def _attend(
    merged: Partial,
    heads: _Heads,
    chosen: Selection | None,
    plan: Plan,
    shapes: SelectionShapes,
    picks: int,
    config: MuSeConfig,
    *,
    is_causal: bool,
    scale: float,
) -> Selection:
    """Merge the far field of some heads into `merged`, and fill in their `plan`."""
    group_by_cluster_and_block(
        heads.query_assignment,
        heads.query_centroids.shape[1],
        config.block_size,
        Groups(plan.segment_order, plan.segment_starts),
    )
    group_by_cluster_and_block(
        heads.key_assignment, config.key_clusters, config.block_size, Groups(plan.bucket_order, plan.bucket_starts)
    )
    far = _FarField.of(heads, plan, config, is_causal=is_causal, scale=scale)
    of_summaries = of_pairs = None
    if config.monopole or chosen is None:
        chosen, of_summaries = _attend_to_summaries(far, merged.lse, chosen, shapes, config)
    found = None
    if picks > 0:
        _sort_pairs(chosen, plan, far.segments.blocks, config)
        found = _pairs(plan, picks, config)
        of_pairs = retrieval.attend(heads.queries, far.keys, far.values, found, far.buckets, scale=scale)
    merging.merge(merged, of_summaries, of_pairs, found, fill_in=merged)
    return chosen


def _attend_to_summaries(
    far: _FarField, own_lse: Tensor, chosen: Selection | None, shapes: SelectionShapes, config: MuSeConfig
) -> tuple[Selection, Partial | None]:
    of_buckets, accumulated = far.summaries()
    if config.tolerance is not None:
        return error_control.select_and_attend(
            far.segments,
            of_buckets,
            accumulated.seen,
            own_lse,
            chosen,
            shapes.opened[0],
            tolerance=config.tolerance,
            caution=config.caution,
            mean_bucket=config.mean_bucket,
            budget=config.retrieved_clusters * own_lse.shape[1],
        )
    if chosen is None:
        clusters, blocks = shapes.retrieved
        chosen = selection.select(far.segments, of_buckets, accumulated.seen, clusters, blocks)
    if not config.monopole:
        return chosen, None
    left = _find_terms(far.segments, chosen, config)
    return chosen, terms.attend(far.segments, of_buckets, accumulated.seen, left)


def _find_terms(segments: Segments, chosen: Selection, config: MuSeConfig) -> terms.Terms:
    if config.tolerance is None:
        return terms.find_terms(segments, chosen, list_opened(segments, chosen.opened))
    return terms.find_terms_of_bits(segments, chosen, list_opened_bits(segments, chosen.opened))


def _sort_pairs(chosen: Selection, plan: Plan, blocks: int, config: MuSeConfig) -> None:
    """Fill in the pairs of a `plan`."""
    groups = Groups(plan.pair_order, plan.pair_starts)
    if config.tolerance is None:
        pairs.sort_picks(chosen, blocks, groups)
    else:
        pairs.sort_bits(chosen, plan.pair_order.shape[0], groups, plan.pair_rows, plan.row_starts)


def _pairs(plan: Plan, picks: int, config: MuSeConfig) -> pairs.Pairs:
    groups = Groups(plan.pair_order, plan.pair_starts)
    return pairs.Pairs.of(groups, picks if config.tolerance is None else 0, plan.pair_rows, plan.row_starts)


def _attend_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    merged: Partial,
    heads: _Heads,
    selected: Selection,
    plan: Plan,
    picks: int,
    config: MuSeConfig,
    *,
    is_causal: bool,
    scale: float,
) -> None:
    far = _FarField.of(heads, plan, config, is_causal=is_causal, scale=scale)
    bucket_tiles = tiles_of_groups(far.buckets, summaries.ROWS_OF_TILE)
    delta, ordered, ordered_delta = merging.shared_delta(merged, grad_out, grad_lse, far.segments.groups)
    of_summaries = of_pairs = to_keys = grad_buckets = log_mass = None
    if config.monopole:
        of_buckets, accumulated = far.summaries()
        left = _find_terms(far.segments, selected, config)
        grad_buckets, grad_seen = (summaries.new_gradient(of_buckets) for _ in range(2))
        of_summaries = terms.attend_backward(
            ordered.out, ordered.lse, ordered_delta, far.segments, of_buckets, accumulated.seen, left,
            differentiable_aggregation=config.differentiable_aggregation, fill_in=(grad_buckets, grad_seen),
        )  # fmt: skip
        log_mass = of_buckets.log_mass
        summaries.accumulate_backward(
            grad_seen, log_mass, accumulated, left.opened.place, is_causal=is_causal, add_to=grad_buckets
        )
        del of_buckets, accumulated, left, grad_seen
    del ordered, ordered_delta
    found = None
    if picks > 0:
        found = _pairs(plan, picks, config)
        of_pairs, to_keys = retrieval.attend_backward(
            grad_out, merged.lse, delta, heads.queries, far.keys, far.values, found, far.buckets, bucket_tiles,
            rows_of_bucket_tile=summaries.ROWS_OF_TILE, scale=scale,
        )  # fmt: skip
    summaries.summarise_backward(
        grad_buckets,
        log_mass,
        far.keys,
        far.values,
        far.centroids,
        far.buckets,
        bucket_tiles,
        to_keys,
        blocks=far.segments.blocks,
        differentiable_aggregation=config.differentiable_aggregation,
        add_to=gradients[1:],
    )
    merging.add_to_queries(gradients[0], of_summaries, of_pairs, found, selected.retrieved, gradients[0], scale=scale)


def _by_head(tensor: Tensor) -> Tensor:
    """(batch, heads, ...) -> (batch heads, ...), contiguous, where kernels expect memory to begin.

    For other addresses Triton compiles other kernels, which may sum in another order.
    """
    rows = tensor.flatten(0, 1).contiguous()
    return rows if rows.data_ptr() % ALIGNMENT == 0 else rows.clone()


def _selection_by_head(selected: Selection) -> Selection:
    return Selection(_by_head(selected.opened).int(), _by_head(selected.retrieved).int())
