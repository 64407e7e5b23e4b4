"""Everything beyond the own block, as a sequence of kernels. No size is ever read back: nothing waits for the GPU."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from muse_attention.backends.triton import merging, retrieval, selection, terms
from muse_attention.backends.triton.accumulation import accumulate_backward
from muse_attention.backends.triton.bucket_summaries import ROWS_OF_TILE, new_gradient, summarise_backward
from muse_attention.backends.triton.grouping import group_by_cluster_and_block
from muse_attention.backends.triton.integer_tables import size_of_tables
from muse_attention.backends.triton.layout import FarField, Heads, Plan
from muse_attention.backends.triton.retrieval import Pairs, sort_picks
from muse_attention.backends.triton.term_bits import find_terms
from muse_attention.backends.triton.tiles import tiles_of_groups
from muse_attention.config import MuSeConfig
from muse_attention.core.selection_shapes import SelectionShapes
from muse_attention.core.structures import Partial, Selection


def attend(*tensors_and_settings: Any) -> tuple[Tensor, ...]:
    """Merge the far field into `out` and `lse`; the memory of a `Plan`, and a selection if there was none.

    `inputs` are what `Heads.of` reads; the others have the axes batch and heads first, too.
    """
    *inputs, out, lse, opened, retrieved, config, is_causal, scale = tensors_and_settings
    heads = Heads.of(*inputs)
    is_chosen = opened is not None
    if not is_chosen:
        query = inputs[0]
        found = SelectionShapes.of(config, query.shape[2], is_causal=is_causal).new(query)
        opened, retrieved = found.opened, found.retrieved
    rows = [tensor.flatten(0, 1) for tensor in (out, lse, opened, retrieved)]
    picks = math.prod(retrieved.shape[-2:])
    of_plan = heads.plan_shapes(config, picks)
    memory = heads.query_assignment.new_empty(size_of_tables(of_plan))
    whole_plan = Plan.of(memory, of_plan)
    for group, of_queries in heads.groups(config, picks, is_backward=False):
        some, plan = heads[group], whole_plan.of_heads(group, of_queries)
        merged = Partial(*(tensor[of_queries] for tensor in rows[:2]))
        selected = Selection(*(tensor[of_queries] for tensor in rows[2:]))
        query_clusters = some.query_centroids.shape[1]
        group_by_cluster_and_block(some.query_assignment, query_clusters, config.block_size, plan.segments)
        group_by_cluster_and_block(some.key_assignment, config.key_clusters, config.block_size, plan.buckets)
        far = FarField.of(some, plan, config, is_causal=is_causal, scale=scale)
        of_summaries = of_pairs = None
        if config.monopole or not is_chosen:
            of_summaries = _attend_to_summaries(far, selected, config, is_chosen=is_chosen)
        if picks > 0:
            sort_picks(selected, far.segments.blocks, plan.pairs)
            pairs = Pairs.of(plan.pairs, picks)
            of_pairs = retrieval.attend(some.queries, far.keys, far.values, pairs, far.buckets, scale=scale)
        merging.merge(merged, of_summaries, of_pairs, picks)
    return (memory,) if is_chosen else (memory, opened, retrieved)


def _attend_to_summaries(far: FarField, selected: Selection, config: MuSeConfig, *, is_chosen: bool) -> Partial | None:
    of_buckets, accumulated = far.summaries()
    if not is_chosen:
        selection.select(far.segments, of_buckets, accumulated.seen, fill_in=selected)
    if not config.monopole:
        return None
    left = find_terms(far.segments, selected)
    return terms.attend(far.segments, of_buckets, accumulated.seen, left)


def attend_backward(*tensors_and_settings: Any) -> tuple[Tensor, ...]:
    """Add to the gradients; nothing new. Arguments as in `attend`."""
    *tensors, memory, config, is_causal, scale = tensors_and_settings
    inputs = tensors[:6]
    flat: list[Any] = [None if tensor is None else tensor.flatten(0, 1) for tensor in tensors[6:]]
    grad_queries, grad_keys, grad_values, grad_outs, grad_lses, outs, lses, opened, retrieved = flat
    heads = Heads.of(*inputs)
    picks = math.prod(retrieved.shape[-2:])
    whole_plan = Plan.of(memory, heads.plan_shapes(config, picks))
    for group, of_queries in heads.groups(config, picks, is_backward=True):
        some, plan = heads[group], whole_plan.of_heads(group, of_queries)
        merged = Partial(outs[of_queries], lses[of_queries])
        selected = Selection(opened[of_queries], retrieved[of_queries])
        grad_out, grad_lse = grad_outs[of_queries], None if grad_lses is None else grad_lses[of_queries]
        far = FarField.of(some, plan, config, is_causal=is_causal, scale=scale)
        bucket_tiles = tiles_of_groups(far.buckets, ROWS_OF_TILE)
        delta, ordered, ordered_delta = merging.shared_delta(
            merged, grad_out, grad_lse, far.segments.groups, far.segments.shift
        )
        of_summaries = of_pairs = to_keys = grad_buckets = log_mass = None
        if config.monopole:
            of_buckets, accumulated = far.summaries()
            left = find_terms(far.segments, selected)
            grad_buckets, grad_seen = (new_gradient(of_buckets) for _ in range(2))
            of_summaries = terms.attend_backward(
                ordered.out, ordered.lse, ordered_delta, far.segments, of_buckets, accumulated.seen, left,
                fill_in=(grad_buckets, grad_seen),
            )  # fmt: skip
            log_mass = of_buckets.log_mass
            accumulate_backward(
                grad_seen, of_buckets, accumulated, left.opened.place, far.key_offset, is_causal=is_causal,
                differentiable_aggregation=config.differentiable_aggregation, add_to=grad_buckets,
            )  # fmt: skip
        if picks > 0:
            pairs = Pairs.of(plan.pairs, picks)
            of_pairs, to_keys = retrieval.attend_backward(
                grad_out, merged.lse, delta, some.queries, far.keys, far.values, pairs, far.buckets, bucket_tiles,
                far.key_offset, rows_of_bucket_tile=ROWS_OF_TILE, scale=scale,
            )  # fmt: skip
        summarise_backward(
            grad_buckets, log_mass, far.keys, far.values, far.centroids, far.buckets, bucket_tiles, to_keys,
            blocks=far.segments.blocks, differentiable_aggregation=config.differentiable_aggregation,
            add_to=(grad_keys[group], grad_values[group]),
        )  # fmt: skip
        merging.add_to_queries(
            grad_queries[of_queries], of_summaries, of_pairs, picks, selected.retrieved, far.key_offset, scale=scale
        )
    return ()
