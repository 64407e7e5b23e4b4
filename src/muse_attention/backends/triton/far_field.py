"""Everything beyond the own block, as a sequence of kernels. No size is ever read back: nothing waits for the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muse_attention.backends.triton import (
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
from muse_attention.backends.triton.filling import copied
from muse_attention.backends.triton.grouping import Groups, group_by_cluster_and_block, tiles_of_groups
from muse_attention.backends.triton.key_offset import find_key_offset
from muse_attention.backends.triton.numbers import cdiv
from muse_attention.backends.triton.opened import list_opened, list_opened_bits
from muse_attention.backends.triton.plan import Plan, pairs_per_query
from muse_attention.backends.triton.rows import square_distances, take_residuals, take_rows
from muse_attention.backends.triton.runtime import schedule
from muse_attention.backends.triton.segments import ROWS_OF_TILE, Segments
from muse_attention.config import MuSeConfig
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Clusters, Partial, Selection, SelectionShapes, Side

WORKSPACE_BYTES = 1 << 30
WORKSPACE_OF_INPUTS = 2
"""Intermediate results held at a time, about: so many bytes, or so many times the bytes of the inputs if that is more.
Key heads go in groups that need no more."""


def find_clusters(sides: list[Side], config: MuSeConfig) -> tuple[list[tuple[Tensor, ...]], Tensor | None]:
    """Centroids and assignment of each side, and how the keys, the last one, are spread about theirs."""
    keys = sides[-1].vectors
    order = clustering.shuffled_positions(keys.shape[2], config.seed, keys.device)
    how = tuple((side.factor, side.clusters, side.cap) for side in sides)
    vectors = [schedule.aligned(side.vectors) for side in sides]
    tables = schedule.run(_find_clusters, (order, *vectors), (how, config))
    found = [tables[2 * number : 2 * number + 2] for number in range(len(sides))]
    return found, tables[-1] if config.needs_spread else None


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
    merged = Partial(schedule.aligned(own.out), schedule.aligned(own.lse))
    picked = (None, None) if chosen is None else _as_integers(chosen.opened, chosen.retrieved)
    tensors = (*_inputs(query, key, value, clusters), merged.out, merged.lse, *picked)
    memory, *selected = schedule.run(_attend_in_groups, tensors, (shapes, config, is_causal, scale))
    return merged, Selection(*selected) if chosen is None else chosen, memory


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
    grad_query, grad_key, grad_value = (schedule.aligned(gradient) for gradient in own)
    tensors = (
        *_inputs(query, key, value, clusters),
        grad_query,
        grad_key,
        grad_value,
        schedule.aligned(grad_out),
        None if grad_lse is None else schedule.aligned(grad_lse),
        schedule.aligned(merged.out),
        schedule.aligned(merged.lse),
        *_as_integers(selected.opened, selected.retrieved),
        schedule.aligned(memory),
    )
    schedule.run(_attend_backward_in_groups, tensors, (config, is_causal, scale))
    return grad_query, grad_key, grad_value


def _inputs(query: Tensor, key: Tensor, value: Tensor, clusters: Clusters) -> tuple[Tensor | None, ...]:
    """What `_Heads.of` reads."""
    return (
        schedule.aligned(query),
        schedule.aligned(key),
        schedule.aligned(value),
        schedule.aligned(clusters.query_centroids, compute_dtype(query.dtype)),
        *_as_integers(clusters.query_assignment, clusters.key_assignment),
        None if clusters.key_spread is None else schedule.aligned(clusters.key_spread),
    )


def _as_integers(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return schedule.aligned(first, torch.int32), schedule.aligned(second, torch.int32)


def _find_clusters(order: Tensor, *tensors_and_settings: Any) -> tuple[Tensor, ...]:
    """Tables of each side, (batch, heads, clusters, D) and (batch, heads, N), and the (batch, key heads, D) spread of
    keys."""
    *tensors, how, config = tensors_and_settings
    sides = [Side(tensor.flatten(0, 1), *of_side) for tensor, of_side in zip(tensors, how, strict=True)]
    if len({side.clusters for side in sides}) == 1:
        # Clustering is a chain of small steps: queries and keys take them together.
        together = clustering.cluster(sides, order, config)
        found = [(copied(centroids), copied(assignment)) for centroids, assignment in together]
    else:
        found = [of_side for side in sides for of_side in clustering.cluster([side], order, config)]
    tables = [
        table.unflatten(0, tensor.shape[:2])
        for tensor, of_side in zip(tensors, found, strict=True)
        for table in of_side
    ]
    if config.needs_spread:
        spread = key_spread.find_key_spread(sides[-1].vectors, *found[-1])
        tables.append(spread.unflatten(0, tensors[-1].shape[:2]))
    return tuple(tables)


def _attend_in_groups(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_centroids: Tensor,
    query_assignment: Tensor,
    key_assignment: Tensor,
    key_spread: Tensor | None,
    out: Tensor,
    lse: Tensor,
    opened: Tensor | None,
    retrieved: Tensor | None,
    shapes: SelectionShapes,
    config: MuSeConfig,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Merge the far field into `out` and `lse`; the memory of a `Plan`, and a selection if there was none."""
    heads = _Heads.of(query, key, value, query_centroids, query_assignment, key_assignment, key_spread)
    is_chosen = opened is not None and retrieved is not None
    of_rows = query.shape[:3]
    if opened is None or retrieved is None:
        opened = query_assignment.new_empty(*of_rows, *shapes.opened)
        retrieved = query_assignment.new_empty(*of_rows, *shapes.retrieved)
    rows = Selection(opened.flatten(0, 1), retrieved.flatten(0, 1))
    out, lse = out.flatten(0, 1), lse.flatten(0, 1)
    picks = pairs_per_query(config, rows.retrieved.shape[-2:])
    of_plan = heads.plan_shapes(config, picks)
    memory = query_assignment.new_empty(Plan.size(of_plan))
    plan = Plan.of(memory, of_plan)
    for group in heads.groups(config, picks, is_backward=False):
        some = heads[group]
        of_queries = some.slice_of_queries(group)
        _attend(
            Partial(out[of_queries], lse[of_queries]),
            some,
            Selection(rows.opened[of_queries], rows.retrieved[of_queries]),
            plan.of_heads(group, of_queries),
            picks,
            config,
            is_chosen=is_chosen,
            is_causal=is_causal,
            scale=scale,
        )
    return (memory,) if is_chosen else (memory, opened, retrieved)


def _attend_backward_in_groups(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_centroids: Tensor,
    query_assignment: Tensor,
    key_assignment: Tensor,
    key_spread: Tensor | None,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    opened: Tensor,
    retrieved: Tensor,
    memory: Tensor,
    config: MuSeConfig,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Add to the gradients; nothing new."""
    heads = _Heads.of(query, key, value, query_centroids, query_assignment, key_assignment, key_spread)
    gradients = [tensor.flatten(0, 1) for tensor in (grad_query, grad_key, grad_value)]
    grad_out, out, lse = grad_out.flatten(0, 1), out.flatten(0, 1), lse.flatten(0, 1)
    grad_lse = None if grad_lse is None else grad_lse.flatten(0, 1)
    opened, retrieved = opened.flatten(0, 1), retrieved.flatten(0, 1)
    picks = pairs_per_query(config, retrieved.shape[-2:])
    plan = Plan.of(memory, heads.plan_shapes(config, picks))
    for group in heads.groups(config, picks, is_backward=True):
        some = heads[group]
        of_queries = some.slice_of_queries(group)
        _attend_backward(
            (gradients[0][of_queries], gradients[1][group], gradients[2][group]),
            grad_out[of_queries],
            None if grad_lse is None else grad_lse[of_queries],
            Partial(out[of_queries], lse[of_queries]),
            some,
            Selection(opened[of_queries], retrieved[of_queries]),
            plan.of_heads(group, of_queries),
            picks,
            config,
            is_causal=is_causal,
            scale=scale,
        )
    return ()


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
    key_offset: Tensor
    """(G, D): the point from which the means of keys are stored"""

    @classmethod
    def of(cls, *tensors: Tensor | None) -> _Heads:
        """From the same with the axes batch and heads, without `key_offset`, which it finds."""
        flat: list[Any] = [None if tensor is None else tensor.flatten(0, 1) for tensor in tensors]
        flat.append(find_key_offset(flat[1]))
        return cls(*flat)

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
            self.key_offset[group],
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
            of_pieces = (length + summaries.ROWS_OF_TILE * buckets) * both if of_pairs else 0
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
class _FarField:
    """Queries, keys and values in the order of their groups."""

    segments: Segments
    buckets: Groups
    keys: Tensor
    values: Tensor
    key_offset: Tensor
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
        residuals, shift, width = take_residuals(
            heads.queries, heads.query_centroids, heads.query_assignment, heads.key_offset, heads.key_spread,
            in_segments, scale=scale,
        )  # fmt: skip
        keys, squares = take_rows(heads.keys, buckets), None
        if width is not None:
            squares = square_distances(keys, buckets, heads.key_assignment, config.block_size)
        return cls(
            Segments(
                residuals,
                shift,
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
            heads.key_offset,
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
            self.key_offset,
            self.squares,
            is_causal=self.segments.is_causal,
        )


def _attend(
    merged: Partial,
    heads: _Heads,
    selected: Selection,
    plan: Plan,
    picks: int,
    config: MuSeConfig,
    *,
    is_chosen: bool,
    is_causal: bool,
    scale: float,
) -> None:
    """Merge the far field of some heads into `merged`, and fill in their `plan` and their selection, unless that
    `is_chosen` already."""
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
    if config.monopole or not is_chosen:
        of_summaries = _attend_to_summaries(far, merged.lse, selected, config, is_chosen=is_chosen)
    found = None
    if picks > 0:
        _sort_pairs(selected, plan, far.segments.blocks, config)
        found = _pairs(plan, picks, config)
        of_pairs = retrieval.attend(heads.queries, far.keys, far.values, found, far.buckets, scale=scale)
    merging.merge(merged, of_summaries, of_pairs, found, fill_in=merged)


def _attend_to_summaries(
    far: _FarField, own_lse: Tensor, selected: Selection, config: MuSeConfig, *, is_chosen: bool
) -> Partial | None:
    of_buckets, accumulated = far.summaries()
    if config.tolerance is not None:
        return error_control.select_and_attend(
            far.segments,
            of_buckets,
            accumulated.seen,
            own_lse,
            selected,
            is_chosen=is_chosen,
            tolerance=config.tolerance,
            caution=config.caution,
            mean_bucket=config.mean_bucket,
            budget=config.retrieved_clusters * own_lse.shape[1],
        )
    if not is_chosen:
        selection.select(far.segments, of_buckets, accumulated.seen, fill_in=selected)
    if not config.monopole:
        return None
    left = _find_terms(far.segments, selected, config)
    return terms.attend(far.segments, of_buckets, accumulated.seen, left)


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
    delta, ordered, ordered_delta = merging.shared_delta(
        merged, grad_out, grad_lse, far.segments.groups, far.segments.shift
    )
    of_summaries = of_pairs = to_keys = grad_buckets = log_mass = None
    if config.monopole:
        of_buckets, accumulated = far.summaries()
        left = _find_terms(far.segments, selected, config)
        grad_buckets, grad_seen = (summaries.new_gradient(of_buckets) for _ in range(2))
        of_summaries = terms.attend_backward(
            ordered.out, ordered.lse, ordered_delta, far.segments, of_buckets, accumulated.seen, left,
            fill_in=(grad_buckets, grad_seen),
        )  # fmt: skip
        log_mass = of_buckets.log_mass
        summaries.accumulate_backward(
            grad_seen, of_buckets, accumulated, left.opened.place, far.key_offset, is_causal=is_causal,
            differentiable_aggregation=config.differentiable_aggregation, add_to=grad_buckets,
        )  # fmt: skip
    found = None
    if picks > 0:
        found = _pairs(plan, picks, config)
        of_pairs, to_keys = retrieval.attend_backward(
            grad_out, merged.lse, delta, heads.queries, far.keys, far.values, found, far.buckets, bucket_tiles,
            far.key_offset, rows_of_bucket_tile=summaries.ROWS_OF_TILE, scale=scale,
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
    merging.add_to_queries(
        gradients[0], of_summaries, of_pairs, found, selected.retrieved, far.key_offset, gradients[0], scale=scale
    )
