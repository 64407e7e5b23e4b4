"""The backend `triton`, for CUDA: each pass is one list of launches, run by `schedule`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from muse_attention.backends.protocol import Backend
from muse_attention.backends.triton import far_field
from muse_attention.backends.triton.block_choice import choose_blocks
from muse_attention.backends.triton.blockwise import backend as blockwise
from muse_attention.backends.triton.clustering import find_clusters, shuffled_positions
from muse_attention.backends.triton.integer_tables import size_of_tables
from muse_attention.backends.triton.layout import Plan
from muse_attention.backends.triton.limits import MOST_PROGRAMS
from muse_attention.backends.triton.lloyd import start_positions
from muse_attention.backends.triton.runtime import schedule
from muse_attention.backends.triton.runtime.schedule import aligned
from muse_attention.config import MuSeConfig
from muse_attention.core import local
from muse_attention.core.call import Attended, Call, without_far_field
from muse_attention.core.precision import compute_dtype
from muse_attention.core.sides import join_sides, sides_to_cluster
from muse_attention.core.structures import Clusters, Partial, Selection


class TritonBackend(Backend):
    def find_clusters(
        self, query: Tensor, key: Tensor, config: MuSeConfig, *, is_causal: bool, scale: float
    ) -> Clusters:
        if config.tolerance is not None:
            return blockwise.find_clusters(query, key, config, is_causal=is_causal, scale=scale)
        sides = sides_to_cluster(query, key, config, scale=scale)
        order = shuffled_positions(key.shape[2], config.seed, key.device)
        side_settings = tuple((side.factor, side.clusters, side.cap) for side in sides)
        starts = [start_positions(key.shape[2:3], side.clusters, config.seed, key.device) for side in sides]
        tensors = (order, *starts, *(aligned(side.vectors) for side in sides))
        return join_sides(query, *schedule.run(find_clusters, tensors, (side_settings, config)))

    def choose_blocks(self, query: Tensor, means: Tensor, config: MuSeConfig, *, is_causal: bool) -> Selection:
        return Selection(*schedule.run(choose_blocks, (aligned(query), aligned(means)), (config, is_causal)))

    def forward(self, call: Call, chosen: Selection | None) -> Attended:
        own = local.attend(call)
        if not call.has_far_field:
            return without_far_field(call, own, chosen)
        merged = Partial(aligned(own.out), aligned(own.lse))
        tensors = (*_inputs(call), merged.out, merged.lse, *_picks(call.config, chosen))
        settings = (call.config, call.is_causal, call.scale)
        if call.config.tolerance is None:
            memory, *selected = schedule.run(far_field.attend, tensors, settings)
        else:
            memory, *selected = schedule.run(blockwise.attend, tensors, (*settings, call.first_block))
            if chosen is None:
                selected.insert(0, call.query.new_empty(*call.query.shape[:2], 0, dtype=torch.uint8))
        return Attended(merged, chosen or Selection(*selected), memory)

    def backward(
        self, call: Call, attended: Attended, grad_out: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        merged, selected, memory = attended
        own = local.attend_backward(call, merged, grad_out, grad_lse)
        if not call.has_far_field:
            return own
        grad_query, grad_key, grad_value = (aligned(gradient) for gradient in own)
        tensors = (
            *_inputs(call),
            grad_query,
            grad_key,
            grad_value,
            aligned(grad_out),
            None if grad_lse is None else aligned(grad_lse),
            aligned(merged.out),
            aligned(merged.lse),
            *_picks(call.config, selected),
            aligned(memory),
        )
        attend_backward = far_field.attend_backward if call.config.tolerance is None else blockwise.attend_backward
        schedule.run(attend_backward, tensors, (call.config, call.is_causal, call.scale))
        return grad_query, grad_key, grad_value

    def lse_dtype(self, query: Tensor) -> torch.dtype:
        return compute_dtype(query.dtype)

    def memory_size(self, call: Call, retrieved: Tensor) -> int:
        if not call.has_far_field:
            return 0
        if call.config.tolerance is not None:
            return blockwise.memory_size(call)
        batch, heads, length, _ = call.query.shape
        picks = math.prod(retrieved.shape[-2:])
        query_clusters = call.clusters.query_centroids.shape[2]
        return size_of_tables(
            Plan.shapes(call.config, batch * heads, batch * call.key.shape[1], length, query_clusters, picks)
        )

    def sequences_at_once(self, heads: int) -> int:
        return MOST_PROGRAMS // heads


def _inputs(call: Call) -> tuple[Tensor, ...]:
    """Queries, keys, values, and the parts of their clusters that the method reads."""
    clusters, wide = call.clusters, compute_dtype(call.query.dtype)
    tensors = (
        aligned(call.query),
        aligned(call.key),
        aligned(call.value),
        aligned(clusters.query_centroids, wide),
        aligned(clusters.query_assignment, torch.int32),
        aligned(clusters.key_assignment, torch.int32),
    )
    if call.config.tolerance is None:
        return tensors
    assert clusters.key_spread is not None
    return (*tensors, aligned(clusters.key_spread, wide))


def _picks(config: MuSeConfig, selection: Selection | None) -> tuple[Tensor | None, ...]:
    """The tensors of a selection that the method reads; None, which it writes, without a selection."""
    if config.tolerance is not None:
        return (None if selection is None else aligned(selection.retrieved),)
    if selection is None:
        return None, None
    return aligned(selection.opened, torch.int32), aligned(selection.retrieved, torch.int32)
