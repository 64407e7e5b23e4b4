"""How the values of summaries change with a query's residual: one matrix for all the buckets that a block sees.

It is the weighted sum of the covariances of keys and values in the buckets, `sum w (k - mean) v^T`, and a constant for
the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import Geometry, generation_of_block, generation_of_slot
from muse_attention.backends.triton.blockwise.heads import Heads
from muse_attention.backends.triton.blockwise.summaries import load_numbers, summarise
from muse_attention.backends.triton.device_functions import (
    LOG2_E,
    add_dot,
    dot,
    exp_of_less,
    finite_square,
    in_range,
    load_row,
    load_rows,
    store_rows,
)
from muse_attention.backends.triton.integer_tables import size_of_tables
from muse_attention.backends.triton.numbers import accumulator, cdiv, padded, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.core.precision import compute_dtype
from muse_attention.core.slopes import LARGEST_REACH, TILT_OF_SLOPE

SUM_SLOPES = {
    128: {"KEYS": 64, "num_warps": 4, "num_stages": 3},
    256: {"KEYS": 64, "num_warps": 4, "num_stages": 1},
    512: {"KEYS": 16, "num_warps": 8, "num_stages": 1},
}
_PARTS = 4
"""Programs that share the keys of a block."""
_DIMS = 16
"""Rows of a matrix per program."""
_SUM_SIZES = ("length", "block_size", "key_clusters", "generations", "summarised", "shared_by")
_BLOCK_SIZES = ("blocks", "summarised")


@dataclass(frozen=True)
class Slopes:
    """One slope for each block; not written for blocks that see no other."""

    matrix: Tensor
    """(H, nb, D, Dv)"""
    deviation: Tensor
    """(H, nb): standard deviation of the keys about the means of their buckets"""

    @staticmethod
    def size(geometry: Geometry, head_dim: int, value_dim: int, dtype: torch.dtype) -> int:
        """The number of integers that all of it needs."""
        return sum(_rooms(geometry, head_dim, value_dim, dtype)) if geometry.config.uses_first_order else 0

    @classmethod
    def of(cls, memory: Tensor, geometry: Geometry, head_dim: int, value_dim: int, dtype: torch.dtype) -> Slopes:
        """Views of a tensor of that many integers."""
        blocks, wide = (geometry.heads, geometry.blocks), compute_dtype(dtype)
        if not geometry.config.uses_first_order:  # of which nothing is read
            return cls(memory.new_empty(1, dtype=dtype), memory.new_empty(1, dtype=wide))
        matrix_memory, deviation_memory = memory.split(_rooms(geometry, head_dim, value_dim, dtype))
        return cls(
            matrix_memory.view(dtype)[: math.prod(blocks) * head_dim * value_dim].view(*blocks, head_dim, value_dim),
            deviation_memory.view(wide)[: math.prod(blocks)].view(blocks),
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of kernels."""
        return {"slope_ptr": self.matrix, "slope_deviation_ptr": self.deviation, "LARGEST_REACH": LARGEST_REACH}


def _rooms(geometry: Geometry, head_dim: int, value_dim: int, dtype: torch.dtype) -> list[int]:
    """The numbers of integers that matrices and deviations need."""
    blocks = geometry.heads * geometry.blocks
    sizes = [blocks * head_dim * value_dim * dtype.itemsize, blocks * compute_dtype(dtype).itemsize]
    return [size_of_tables([(cdiv(size, torch.int32.itemsize),)]) for size in sizes]


def find_slopes(heads: Heads, key_assignment: Tensor, slopes: Slopes) -> None:
    """Write the slopes. `key_assignment` is (G, N)."""
    keys, values, centroids, geometry = heads.keys, heads.values, heads.centroids, heads.geometry
    _, generations, clusters, head_dim = centroids.shape
    centres = torch.empty_like(centroids[:, :, :1])
    _find_centre[(generations, geometry.heads)](
        centroids_ptr=centroids, centres_ptr=centres, clusters=clusters, TILT=TILT_OF_SLOPE, D=head_dim,
        QP=padded(clusters), ACC=accumulator(keys.dtype),
    )  # fmt: skip
    columns = summarise(heads, centres)
    slots = (geometry.heads, geometry.generations.summarised_blocks)
    sums = centroids.new_empty(*slots, _PARTS, head_dim, values.shape[-1])
    largest, total, moment = (sums.new_empty(slots) for _ in range(3))
    slot_tables = {"sums_ptr": sums, "largest_ptr": largest, "total_ptr": total, "moment_ptr": moment}
    _sum_slopes_of_part[(_PARTS, *reversed(slots))](
        keys_ptr=keys, values_ptr=values, key_assignment_ptr=key_assignment, centres_ptr=centres,
        key_offset_ptr=heads.key_offset, numbers_ptr=columns.numbers, key_mean_ptr=columns.key_mean, **slot_tables,
        **geometry.sizes(*_SUM_SIZES), IS_CAUSAL=geometry.is_causal,
        KP=padded(geometry.config.key_clusters), **heads.compiled, **heads.fit(SUM_SLOPES),
    )  # fmt: skip
    _add_slopes_of_blocks[(cdiv(head_dim, _DIMS), geometry.blocks, geometry.heads)](
        **slot_tables, slope_ptr=slopes.matrix, slope_deviation_ptr=slopes.deviation, **geometry.sizes(*_BLOCK_SIZES),
        IS_CAUSAL=geometry.is_causal, LARGEST=torch.finfo(keys.dtype).max, DIMS=_DIMS, PARTS=_PARTS,
        BLOCKS=power_of_two(geometry.seen_blocks), num_warps=4, **heads.compiled,
    )  # fmt: skip


@kernel(stage="summaries", do_not_specialize=["clusters"])
def _find_centre(
    centroids_ptr, centres_ptr, clusters, TILT: tl.constexpr, D: tl.constexpr, QP: tl.constexpr, ACC: tl.constexpr
):
    """The mean centroid of a generation, times `TILT`.

    Grid: (S, H). `centroids_ptr`: (H, S, Q, D); `centres_ptr`: (H, S, 1, D).
    """
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    offs_d, offs_q = tl.arange(0, padded(D)), tl.arange(0, QP)  # [D], [Q]
    centroids = load_rows(centroids_ptr, row * clusters, offs_q, offs_q < clusters, D).to(ACC)  # [Q, D]
    tl.store(centres_ptr + row * D + offs_d, tl.sum(centroids, 0) * TILT / clusters.to(ACC), mask=offs_d < D)


@kernel(stage="summaries", do_not_specialize=_SUM_SIZES)
def _sum_slopes_of_part(
    keys_ptr, values_ptr, key_assignment_ptr, centres_ptr, key_offset_ptr, numbers_ptr, key_mean_ptr, sums_ptr,
    largest_ptr, total_ptr, moment_ptr, length, block_size, key_clusters, generations, summarised, shared_by,
    IS_CAUSAL: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Products of some keys of a block, less the means of their buckets, with their values, with weights relative to
    the heaviest bucket.

    Grid: (parts, T, H). `keys_ptr`: (G, N, D); `values_ptr`: (G, N, DV); `key_assignment_ptr`: (G, N) int32;
    `centres_ptr`: (H, S, 1, D); `key_offset_ptr`: (G, D); summaries as in `Columns`, of the one centre of each
    generation; `sums_ptr`: (H, T, parts, D, DV); `largest_ptr`, `total_ptr`, `moment_ptr`: (H, T).
    """
    part, slot, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head = head // shared_by
    generation, block = generation_of_slot(slot, IS_CAUSAL)
    offs_key = tl.arange(0, KEYS)  # [KEYS]
    centre = load_row(centres_ptr, head * generations + generation, D).to(keys_ptr.dtype.element_ty).to(ACC)  # [D]
    offset = load_row(key_offset_ptr, key_head, D).to(ACC)  # [D]
    slot_base = (head * summarised + slot) * key_clusters
    offs_cluster = tl.arange(0, KP)
    masses, deviations, _, _ = load_numbers(numbers_ptr, slot_base, offs_cluster, offs_cluster < key_clusters)
    largest = tl.max(masses, 0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    if part == 0:
        shares = exp_of_less(masses, shift)  # [KP]
        index = head * summarised + slot
        tl.store(largest_ptr + index, largest)
        tl.store(total_ptr + index, tl.sum(shares, 0))
        tl.store(moment_ptr + index, tl.sum(shares * deviations * deviations, 0))

    sums = tl.zeros([padded(D), padded(DV)], ACC)  # [D, DV]
    rows = tl.cdiv(tl.cdiv(block_size, tl.num_programs(0)), KEYS) * KEYS
    first, end = block * block_size + part * rows, tl.minimum((block + 1) * block_size, length)
    for begin in range(first, tl.minimum(first + rows, end), KEYS):
        mask_key = begin + offs_key < end  # [KEYS]
        keys = load_rows(keys_ptr, key_head * length + begin, offs_key, mask_key, D).to(ACC)  # [KEYS, D]
        values = load_rows(values_ptr, key_head * length + begin, offs_key, mask_key, DV)  # [KEYS, DV]
        logits = tl.sum(keys * centre[None, :], 1)  # [KEYS]
        weights = tl.where(mask_key, exp_of_less(logits, shift), 0.0)  # [KEYS]
        # The mean is subtracted from each key, not from sums: their weights are rounded differently, and a large
        # residual would amplify the difference. (Means are stored without the offset.)
        cluster = tl.load(key_assignment_ptr + key_head * length + begin + offs_key, mask=mask_key, other=0)  # [KEYS]
        means = load_rows(key_mean_ptr, slot_base, in_range(cluster, key_clusters), mask_key, D).to(ACC)  # [KEYS, D]
        weighted = (keys - offset[None, :] - means) * weights[:, None]  # [KEYS, D]
        sums = add_dot(tl.trans(weighted.to(values.dtype)), values, sums)
    index = (head * summarised + slot) * tl.num_programs(0) + part
    offs_d = tl.arange(0, padded(D))  # [D]
    store_rows(sums_ptr, index * D, offs_d, offs_d < D, sums, DV)


@kernel(stage="summaries", do_not_specialize=_BLOCK_SIZES)
def _add_slopes_of_blocks(
    sums_ptr, largest_ptr, total_ptr, moment_ptr, slope_ptr, slope_deviation_ptr, blocks, summarised,
    IS_CAUSAL: tl.constexpr, LARGEST: tl.constexpr, DIMS: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Some rows of the matrix of a block: the sums of all blocks that it sees, weighted as one softmax.

    Grid: (D / DIMS, nb, H). `slope_ptr`: (H, nb, D, DV); `slope_deviation_ptr`: (H, nb); the others as in
    `_sum_slopes_of_part`.
    """
    own_block, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    seen = own_block if IS_CAUSAL else blocks
    if seen == 0:
        return
    _, slot = generation_of_block(own_block, IS_CAUSAL)
    first = head * summarised + slot
    offs_block = tl.arange(0, BLOCKS)
    mask_block = offs_block < seen  # [BLOCKS]
    if not IS_CAUSAL:
        mask_block &= offs_block != own_block
    largest = tl.load(largest_ptr + first + offs_block, mask=mask_block, other=float("-inf"))  # [BLOCKS]
    top = tl.max(largest, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    shares = tl.exp2((largest - top) * LOG2_E)  # [BLOCKS]
    total = tl.sum(tl.load(total_ptr + first + offs_block, mask=mask_block, other=0.0) * shares, 0)
    moment = tl.sum(tl.load(moment_ptr + first + offs_block, mask=mask_block, other=0.0) * shares, 0)
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    offs_d, offs_x = tl.program_id(0) * DIMS + tl.arange(0, DIMS), tl.arange(0, padded(DV))  # [DIMS], [DV]
    mask = (offs_d < D)[:, None] & (offs_x < DV)[None, :]  # [DIMS, DV]
    offs = offs_d[:, None] * DV + offs_x[None, :]  # [DIMS, DV]
    slope = tl.zeros([DIMS, padded(DV)], ACC)  # [DIMS, DV]
    for block in range(0, seen):
        share = tl.exp2((tl.load(largest_ptr + first + block) - top) * LOG2_E)
        if not IS_CAUSAL:
            share = tl.where(block == own_block, 0.0, share)
        for part in range(0, PARTS):
            slope += share * tl.load(sums_ptr + ((first + block) * PARTS + part) * D * DV + offs, mask=mask, other=0.0)
    slope *= inverse
    # What is not finite must poison what attends to it, not every query with a slope.
    slope = tl.where(tl.abs(slope) < LARGEST, slope, 0.0)
    index = head * blocks + own_block
    tl.store(slope_ptr + index * D * DV + offs, slope, mask=mask)
    if tl.program_id(0) == 0:
        tl.store(slope_deviation_ptr + index, tl.sqrt(finite_square(moment * inverse)))


@triton.jit
def load_slope(
    slope_ptr, slope_deviation_ptr, block_index, residual, width, LARGEST_REACH: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The matrix of a block, [D, DV]; the factor that limits residuals, [ROWS]; and what values gain, [ROWS, DV]."""
    offs_d = tl.arange(0, padded(D))  # [D]
    slope = load_rows(slope_ptr, block_index * D, offs_d, offs_d < D, DV)  # [D, DV]
    reach = width * tl.load(slope_deviation_ptr + block_index)  # [ROWS]
    factor = LARGEST_REACH / tl.maximum(reach, LARGEST_REACH)  # [ROWS]
    limited = (residual.to(ACC) * factor[:, None]).to(slope.dtype)  # [ROWS, D]
    return slope, factor, dot(limited, slope, ACC)
