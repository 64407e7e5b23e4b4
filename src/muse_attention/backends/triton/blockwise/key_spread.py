"""How the keys are spread about the centroids of their blocks: the metric of each generation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import Geometry
from muse_attention.backends.triton.device_functions import load_rows
from muse_attention.backends.triton.numbers import accumulator, padded, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel

_PARTS = 8
"""Of a block, whose squares are summed by different programs."""


def find_key_spread(keys: Tensor, centroids: Tensor, assignment: Tensor, geometry: Geometry) -> Tensor:
    """(G, S, D): variance of the keys about their centroids in each dimension over the past of each generation, scaled
    to a mean of 1."""
    key_heads, length, head_dim = keys.shape
    blocks, generations = geometry.seen_blocks, geometry.generations.number
    parts = blocks * _PARTS
    sums = centroids.new_empty(key_heads, parts, head_dim)
    largest = centroids.new_empty(key_heads, parts)
    spread = centroids.new_empty(key_heads, generations, head_dim)
    widths = {"D": head_dim, "ACC": accumulator(keys.dtype)}
    _sum_squares_of_block[(_PARTS, blocks, key_heads)](
        keys_ptr=keys, centroids_ptr=centroids, assignment_ptr=assignment, sums_ptr=sums, largest_ptr=largest,
        length=length, block_size=geometry.config.block_size, clusters=centroids.shape[2], TILE=64, num_warps=4,
        **widths,
    )  # fmt: skip
    _scale_spread[(generations, key_heads)](
        sums_ptr=sums, largest_ptr=largest, spread_ptr=spread, parts=parts, PARTS_OF_BLOCK=_PARTS,
        IS_CAUSAL=geometry.is_causal, PARTS=power_of_two(parts), num_warps=8, **widths,
    )  # fmt: skip
    return spread


@triton.jit
def _square_of_ratio(part, whole):
    """`(part / whole)^2`, or `part^2` if the whole is 0."""
    ratio = part / tl.where(whole > 0, whole, 1.0)
    return ratio * ratio


@kernel(stage="clustering", do_not_specialize=["length", "block_size", "clusters"])
def _sum_squares_of_block(
    keys_ptr, centroids_ptr, assignment_ptr, sums_ptr, largest_ptr, length, block_size, clusters, TILE: tl.constexpr,
    D: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of a part of the keys of a block, in units of the largest residual there: squares of large ones would overflow.

    Grid: (parts of a block, blocks, G). `keys_ptr`: (G, N, D); `centroids_ptr`: (G, blocks, K, D); `assignment_ptr`:
    (G, N) int32; `sums_ptr`: (G, parts, D); `largest_ptr`: (G, parts).
    """
    part, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    of_block = head * tl.num_programs(1) + block
    total = tl.zeros([padded(D)], ACC)  # [D]
    unit = tl.max(tl.zeros([TILE], ACC), 0)
    rows = tl.cdiv(tl.cdiv(block_size, tl.num_programs(0)), TILE) * TILE
    first, end = block * block_size + part * rows, tl.minimum((block + 1) * block_size, length)
    for begin in range(first, tl.minimum(first + rows, end), TILE):
        offs_row = begin + tl.arange(0, TILE)  # [TILE]
        mask_row = offs_row < end  # [TILE]
        cluster = tl.load(assignment_ptr + head * length + offs_row, mask=mask_row, other=0)  # [TILE]
        key = load_rows(keys_ptr, head * length, offs_row, mask_row, D).to(ACC)  # [TILE, D]
        key = tl.where(tl.abs(key) < float("inf"), key, 0.0)
        residual = key - load_rows(centroids_ptr, of_block * clusters, cluster, mask_row, D).to(ACC)  # [TILE, D]
        larger = tl.maximum(unit, tl.max(tl.max(tl.abs(residual), 1), 0))
        scaled = residual / tl.where(larger > 0, larger, 1.0)  # [TILE, D]
        total = total * _square_of_ratio(unit, larger) + tl.sum(scaled * scaled, 0)
        unit = larger
    offs_d = tl.arange(0, padded(D))  # [D]
    at = of_block * tl.num_programs(0) + part
    tl.store(sums_ptr + at * D + offs_d, total, mask=offs_d < D)
    tl.store(largest_ptr + at, unit)


@kernel(stage="clustering", do_not_specialize=["parts"])
def _scale_spread(
    sums_ptr, largest_ptr, spread_ptr, parts, PARTS_OF_BLOCK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    PARTS: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The sums of the past of a generation, in units of their mean over the dimensions; 1 where all are 0.

    Grid: (S, G). `sums_ptr`: (G, parts, D); `largest_ptr`: (G, parts); `spread_ptr`: (G, S, D).
    """
    generation, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_part, offs_d = tl.arange(0, PARTS), tl.arange(0, padded(D))  # [PARTS], [D]
    past = tl.minimum(parts, PARTS_OF_BLOCK << generation) if IS_CAUSAL else parts
    units = tl.load(largest_ptr + head * parts + offs_part, mask=offs_part < past, other=0.0)  # [PARTS]
    some = load_rows(sums_ptr, head * parts, offs_part, offs_part < past, D)  # [PARTS, D]
    total = tl.sum(some * _square_of_ratio(units, tl.max(units, 0))[:, None], 0)  # [D]
    mean = tl.sum(total, 0) / D
    ptrs = spread_ptr + (head * tl.num_programs(0) + generation) * D + offs_d  # [D]
    tl.store(ptrs, tl.where(mean > 0, total / tl.where(mean > 0, mean, 1.0), 1.0), mask=offs_d < D)
