"""Blockwise MuSe as three lists of launches: find clusters, attend, attend backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muse_attention.backends.triton.blockwise import summaries
from muse_attention.backends.triton.blockwise.backward_to_keys import add_to_keys
from muse_attention.backends.triton.blockwise.backward_to_queries import add_to_queries
from muse_attention.backends.triton.blockwise.backward_to_summaries import find_gradients_of_summaries
from muse_attention.backends.triton.blockwise.clustering import cluster, find_key_spread, find_start_positions
from muse_attention.backends.triton.blockwise.decisions import decide
from muse_attention.backends.triton.blockwise.forward import attend as attend_far
from muse_attention.backends.triton.blockwise.geometry import Geometry
from muse_attention.backends.triton.blockwise.heads import Heads
from muse_attention.backends.triton.blockwise.rows import take_residuals
from muse_attention.backends.triton.blockwise.slopes import Slopes, find_slopes
from muse_attention.backends.triton.blockwise.sorting import Order, sort_keys, sort_queries
from muse_attention.backends.triton.filling import fill
from muse_attention.backends.triton.key_offset import find_key_offset
from muse_attention.backends.triton.merging import find_delta
from muse_attention.backends.triton.runtime import schedule
from muse_attention.backends.triton.runtime.schedule import aligned
from muse_attention.config import MuSeConfig
from muse_attention.core.call import Call
from muse_attention.core.cluster_shapes import ClusterShapes
from muse_attention.core.precision import compute_dtype
from muse_attention.core.query_tiles import NO_ROW
from muse_attention.core.selection_shapes import SelectionShapes
from muse_attention.core.structures import Clusters, Partial


def find_clusters(query: Tensor, key: Tensor, config: MuSeConfig, *, is_causal: bool, scale: float) -> Clusters:
    geometry = Geometry.of(query, key, config, is_causal=is_causal)
    if geometry.seen_blocks == 0:
        return _without_clusters(query, key, config)
    starts = find_start_positions(geometry, query.device)
    tensors = (aligned(query), aligned(key), *starts)
    return Clusters(*schedule.run(_find_clusters, tensors, (config, is_causal, scale)))


def _without_clusters(query: Tensor, key: Tensor, config: MuSeConfig) -> Clusters:
    """Clusters of a causal sequence of one block, which nothing reads: all centroids are 0."""
    shapes = ClusterShapes.of(config, query.shape[2], query.shape[3], is_causal=True)
    assert shapes.key_spread is not None
    wide, integers = compute_dtype(query.dtype), torch.int32
    return Clusters(
        query.new_zeros(*query.shape[:2], *shapes.query_centroids, dtype=wide),
        query.new_zeros(query.shape[:3], dtype=integers),
        key.new_zeros(*key.shape[:2], *shapes.key_centroids, dtype=wide),
        key.new_zeros(key.shape[:3], dtype=integers),
        key.new_ones(*key.shape[:2], *shapes.key_spread, dtype=wide),
    )


def _find_clusters(*tensors_and_settings: Any) -> tuple[Tensor, ...]:
    query, key, query_starts, key_starts, config, is_causal, scale = tensors_and_settings
    geometry = Geometry.of(query, key, config, is_causal=is_causal)
    queries, keys = query.flatten(0, 1), key.flatten(0, 1)
    *query_tables, centroids, assignment = cluster(queries, keys, query_starts, key_starts, geometry, scale=scale)
    key_tables = (centroids, assignment, find_key_spread(keys, centroids, assignment, geometry))
    return (
        *(table.unflatten(0, query.shape[:2]) for table in query_tables),
        *(table.unflatten(0, key.shape[:2]) for table in key_tables),
    )


def attend(*tensors_and_settings: Any) -> tuple[Tensor, ...]:
    """Add the far field to the own block's `out` and `lse`. Returns the memory that `_read` reads, and the first rows
    of the selection if none was given."""
    query, key, value, centroids, assigned, key_assigned, spread, out, lse, chosen, *settings = tensors_and_settings
    config, is_causal, scale, first_block = settings
    geometry = Geometry.of(query, key, config, is_causal=is_causal)
    memory = assigned.new_empty(_memory_size(geometry, key, value))
    order, slopes = _read(memory, geometry, key, value)
    sort_queries(assigned.flatten(0, 1), geometry, order, first_block=first_block)
    sort_keys(key_assigned.flatten(0, 1), geometry, order)
    queries, keys, values, centroids, spread = (
        tensor.flatten(0, 1) for tensor in (query, key, value, centroids, spread)
    )
    first_rows = chosen
    if first_rows is None:
        shape = SelectionShapes.of(config, geometry.length, is_causal=is_causal).retrieved
        first_rows = fill(query.new_empty(*query.shape[:2], *shape, dtype=torch.uint8), NO_ROW)
    offset = find_key_offset(keys, config.block_size)
    heads = Heads(queries, keys, values, centroids, offset, order, geometry, scale)
    columns = summaries.summarise(heads, centroids)
    if config.uses_first_order:
        find_slopes(heads, key_assigned.flatten(0, 1), slopes)
    residuals = take_residuals(heads, spread)
    merged = Partial(out.flatten(0, 1), lse.flatten(0, 1))
    if chosen is None:
        decide(first_rows.flatten(0, 1), merged.lse, key_assigned.flatten(0, 1), heads, residuals, columns)
    attend_far(merged, heads, residuals, columns, slopes, first_rows.flatten(0, 1))
    return (memory,) if chosen is not None else (memory, first_rows)


def attend_backward(*tensors_and_settings: Any) -> tuple[Tensor, ...]:
    """Add the gradients of the far field to those of the own block in place; returns nothing new."""
    *tensors, memory, config, is_causal, scale = tensors_and_settings
    geometry = Geometry.of(tensors[0], tensors[1], config, is_causal=is_causal)
    order, slopes = _read(memory, geometry, *tensors[1:3])
    flat: list[Any] = [None if tensor is None else tensor.flatten(0, 1) for tensor in tensors]
    (
        queries, keys, values, centroids, _, _, spread, grad_queries, grad_keys, grad_values, grad_out, grad_lse, out,
        lse, first_rows,
    ) = flat  # fmt: skip
    offset = find_key_offset(keys, config.block_size)
    heads = Heads(queries, keys, values, centroids, offset, order, geometry, scale)
    columns = summaries.summarise(heads, centroids)
    delta, _, _ = find_delta(Partial(out, lse), grad_out, grad_lse)
    residuals = take_residuals(heads, spread)
    row_softmax = add_to_queries(grad_queries, grad_out, lse, delta, heads, residuals, columns, slopes, first_rows)
    gradients = find_gradients_of_summaries(grad_out, row_softmax, heads, residuals, columns, first_rows)
    add_to_keys(grad_keys, grad_values, gradients, grad_out, row_softmax, heads, columns, first_rows)
    return ()


def memory_size(call: Call) -> int:
    """Integers in the memory that `attend` returns."""
    geometry = Geometry.of(call.query, call.key, call.config, is_causal=call.is_causal)
    return _memory_size(geometry, call.key, call.value)


def _memory_size(geometry: Geometry, key: Tensor, value: Tensor) -> int:
    return Order.size(geometry) + Slopes.size(geometry, key.shape[-1], value.shape[-1], key.dtype)


def _read(memory: Tensor, geometry: Geometry, key: Tensor, value: Tensor) -> tuple[Order, Slopes]:
    slope_memory = memory[Order.size(geometry) :]
    return Order.of(memory, geometry), Slopes.of(slope_memory, geometry, key.shape[-1], value.shape[-1], key.dtype)
