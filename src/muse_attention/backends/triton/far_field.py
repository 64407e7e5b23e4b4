"""Attention beyond the own block, as a sequence of kernels. The host reads nothing back and never waits for the GPU."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from muse_attention.backends.triton import merging, retrieval, selection, terms
from muse_attention.backends.triton.accumulation import accumulate_backward
from muse_attention.backends.triton.bucket_summaries import ROWS_OF_TILE, new_gradient, summarise_backward
from muse_attention.backends.triton.grouping import group_by_cluster_and_block, sort_picks
from muse_attention.backends.triton.integer_tables import size_of_tables
from muse_attention.backends.triton.layout import FarField, Heads, Plan
from muse_attention.backends.triton.retrieval import Pairs
from muse_attention.backends.triton.term_bits import find_terms
from muse_attention.backends.triton.tiles import cut_groups
from muse_attention.config import MuSeConfig
from muse_attention.core.selection_shapes import SelectionShapes
from muse_attention.core.structures import Partial, Selection


def attend(*tensors_and_settings: Any) -> tuple[Tensor, ...]:
    """Merge the far field into `out` and `lse`. Returns the memory of a `Plan`, and the selection if none was given.

    `inputs` are the arguments of `Heads.of`; the other tensors also begin with the axes batch and heads.
    """
    *inputs, out, lse, opened, retrieved, config, is_causal, scale = tensors_and_settings
    heads = Heads.of(*inputs)
    is_chosen = opened is not None
    if not is_chosen:
        query = inputs[0]
        new_selection = SelectionShapes.of(config, query.shape[2], is_causal=is_causal).new(query)
        opened, retrieved = new_selection.opened, new_selection.retrieved
    rows = [tensor.flatten(0, 1) for tensor in (out, lse, opened, retrieved)]
    picks = math.prod(retrieved.shape[-2:])
    shapes = heads.plan_shapes(config, picks)
    memory = heads.query_assignment.new_empty(size_of_tables(shapes))
    whole_plan = Plan.of(memory, shapes)
    for key_group, query_group in heads.groups(config, picks, is_backward=False):
        group_heads, plan = heads[key_group], whole_plan.for_heads(key_group, query_group)
        merged = Partial(*(tensor[query_group] for tensor in rows[:2]))
        selected = Selection(*(tensor[query_group] for tensor in rows[2:]))
        query_clusters = group_heads.query_centroids.shape[1]
        group_by_cluster_and_block(group_heads.query_assignment, query_clusters, config.block_size, plan.segments)
        group_by_cluster_and_block(group_heads.key_assignment, config.key_clusters, config.block_size, plan.buckets)
        far = FarField.of(group_heads, plan, config, is_causal=is_causal, scale=scale)
        from_summaries = from_pairs = None
        if config.monopole or not is_chosen:
            from_summaries = _attend_to_summaries(far, selected, config, is_chosen=is_chosen)
        if picks > 0:
            sort_picks(selected, far.segments.blocks, plan.pairs)
            pairs = Pairs.of(plan.pairs, picks)
            from_pairs = retrieval.attend(group_heads.queries, far.keys, far.values, pairs, far.buckets, scale=scale)
        merging.merge(merged, from_summaries, from_pairs, picks)
    return (memory,) if is_chosen else (memory, opened, retrieved)


def _attend_to_summaries(far: FarField, selected: Selection, config: MuSeConfig, *, is_chosen: bool) -> Partial | None:
    bucket_summaries, accumulated = far.summaries()
    if not is_chosen:
        selection.select(far.segments, bucket_summaries, accumulated.seen, fill_in=selected)
    if not config.monopole:
        return None
    left = find_terms(far.segments, selected)
    return terms.attend(far.segments, bucket_summaries, accumulated.seen, left)


def attend_backward(*tensors_and_settings: Any) -> tuple[Tensor, ...]:
    """Add to the gradients in place; returns nothing new. Arguments as in `attend`."""
    *tensors, memory, config, is_causal, scale = tensors_and_settings
    inputs = tensors[:6]
    flat: list[Any] = [None if tensor is None else tensor.flatten(0, 1) for tensor in tensors[6:]]
    grad_queries, grad_keys, grad_values, grad_outs, grad_lses, outs, lses, opened, retrieved = flat
    heads = Heads.of(*inputs)
    picks = math.prod(retrieved.shape[-2:])
    whole_plan = Plan.of(memory, heads.plan_shapes(config, picks))
    for key_group, query_group in heads.groups(config, picks, is_backward=True):
        group_heads, plan = heads[key_group], whole_plan.for_heads(key_group, query_group)
        merged = Partial(outs[query_group], lses[query_group])
        selected = Selection(opened[query_group], retrieved[query_group])
        grad_out, grad_lse = grad_outs[query_group], None if grad_lses is None else grad_lses[query_group]
        far = FarField.of(group_heads, plan, config, is_causal=is_causal, scale=scale)
        bucket_tiles = cut_groups(far.buckets, ROWS_OF_TILE)
        delta, ordered, ordered_delta = merging.find_delta(
            merged, grad_out, grad_lse, far.segments.groups, far.segments.shift
        )
        from_summaries = from_pairs = pair_gradients = grad_buckets = log_mass = None
        if config.monopole:
            bucket_summaries, accumulated = far.summaries()
            left = find_terms(far.segments, selected)
            grad_buckets, grad_seen = (new_gradient(bucket_summaries) for _ in range(2))
            from_summaries = terms.attend_backward(
                ordered.out, ordered.lse, ordered_delta, far.segments, bucket_summaries, accumulated.seen, left,
                fill_in=(grad_buckets, grad_seen),
            )  # fmt: skip
            log_mass = bucket_summaries.log_mass
            accumulate_backward(
                grad_seen, bucket_summaries, accumulated, left.opened.place, far.key_offset, is_causal=is_causal,
                differentiable_aggregation=config.differentiable_aggregation, add_to=grad_buckets,
            )  # fmt: skip
        if picks > 0:
            pairs = Pairs.of(plan.pairs, picks)
            from_pairs, pair_gradients = retrieval.attend_backward(
                grad_out, merged.lse, delta, group_heads.queries, far.keys, far.values, pairs, far.buckets,
                bucket_tiles, far.key_offset, rows_of_bucket_tile=ROWS_OF_TILE, scale=scale,
            )  # fmt: skip
        summarise_backward(
            grad_buckets, log_mass, far.keys, far.values, far.centroids, far.buckets, bucket_tiles, pair_gradients,
            blocks=far.segments.blocks, differentiable_aggregation=config.differentiable_aggregation,
            add_to=(grad_keys[key_group], grad_values[key_group]),
        )  # fmt: skip
        merging.add_to_queries(
            grad_queries[query_group], from_summaries, from_pairs, picks, selected.retrieved, far.key_offset,
            scale=scale,
        )  # fmt: skip
    return ()
