"""Centroids of the keys of each block that is seen, and of the queries before each generation: Lloyd's k-means.

A *sequence* is clustered on its own: the queries before a generation, or the keys of a block. Sequences of queries and
of keys share every launch. The spread of the keys about their centroids is the metric of each generation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import Geometry
from muse_attention.backends.triton.device_functions import load_rows
from muse_attention.backends.triton.lloyd import assign_to_nearest, lloyd_iteration, start_positions, take_starts
from muse_attention.backends.triton.nearest import Sequences
from muse_attention.backends.triton.numbers import accumulator, cdiv, fitting, padded, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel

_PARTS = 8
"""Programs that share a sequence."""
_PARTS_OF_SPREAD = 8
"""Programs that share a block when squares are summed."""
_TILES = 4
"""Tiles of vectors per program."""
SUM_MEMBERS = {
    128: {"num_warps": 4, "num_stages": 1, "maxnreg": 128},
    512: {"num_warps": 4, "num_stages": 1, "maxnreg": 168},
}
"""For up to 128 clusters, by the bytes of a vector."""
SUM_MEMBERS_OF_MANY = {"num_warps": 8, "num_stages": 2}


def find_start_positions(geometry: Geometry, device: torch.device) -> tuple[Tensor, Tensor]:
    """(S, Q) and (seen blocks, K) int32: positions in their sequence of the vectors that centroids start as."""
    generations, config = geometry.generations, geometry.config
    size, length = config.block_size, geometry.length
    query_lengths = tuple(min(length, generations.past(number) * size) for number in range(generations.number))
    key_lengths = tuple(min(size, length - block * size) for block in range(geometry.seen_blocks))
    return (
        start_positions(query_lengths, config.query_clusters, config.seed, device),
        start_positions(key_lengths, config.key_clusters, config.seed, device),
    )


def cluster(
    queries: Tensor, keys: Tensor, query_starts: Tensor, key_starts: Tensor, geometry: Geometry, *, scale: float
) -> tuple[Tensor, ...]:
    """Cluster (H, N, D) queries, times the scale, and (G, N, D) keys. Returns centroids (H, S, Q, D) and assignment
    (H, N) int32 of queries, then (G, seen blocks, K, D) and (G, N) int32 of keys."""
    config, head_dim = geometry.config, queries.shape[2]
    shapes = (geometry.generations.number, config.query_clusters), (geometry.seen_blocks, config.key_clusters)
    sequences = Sequences.new(queries, keys, *shapes, scale, config.block_size, geometry.is_causal)
    clusters = sequences.clusters
    parts = min(_PARTS, cdiv(min(geometry.length, 2 * config.lloyd_sample * clusters), sequences.chunks["TILE"]))
    launch = fitting(SUM_MEMBERS, head_dim, head_dim, queries.dtype) if clusters <= 128 else SUM_MEMBERS_OF_MANY
    take_starts(sequences, query_starts, key_starts)
    for _ in range(config.lloyd_iterations):
        lloyd_iteration(sequences, config, parts, launch)
    assign_to_nearest(sequences, tiles=_TILES)
    return sequences.tables


def find_key_spread(keys: Tensor, centroids: Tensor, assignment: Tensor, geometry: Geometry) -> Tensor:
    """(G, S, D): variance of the keys about their centroids in each dimension over the past of each generation, scaled
    to a mean of 1."""
    key_heads, length, head_dim = keys.shape
    blocks, generations = geometry.seen_blocks, geometry.generations.number
    parts = blocks * _PARTS_OF_SPREAD
    sums = centroids.new_empty(key_heads, parts, head_dim)
    largest = centroids.new_empty(key_heads, parts)
    spread = centroids.new_empty(key_heads, generations, head_dim)
    widths = {"D": head_dim, "ACC": accumulator(keys.dtype)}
    _sum_squares_of_block[(_PARTS_OF_SPREAD, blocks, key_heads)](
        keys_ptr=keys, centroids_ptr=centroids, assignment_ptr=assignment, sums_ptr=sums, largest_ptr=largest,
        length=length, block_size=geometry.config.block_size, clusters=centroids.shape[2], TILE=64, num_warps=4,
        **widths,
    )  # fmt: skip
    _scale_spread[(generations, key_heads)](
        sums_ptr=sums, largest_ptr=largest, spread_ptr=spread, parts=parts, PARTS_OF_BLOCK=_PARTS_OF_SPREAD,
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
    """Sums over a part of the keys of a block, in units of its largest residual: squares of large ones would overflow.

    Grid: (parts of a block, blocks, G). `keys_ptr`: (G, N, D); `centroids_ptr`: (G, blocks, K, D); `assignment_ptr`:
    (G, N) int32; `sums_ptr`: (G, parts, D); `largest_ptr`: (G, parts).
    """
    part, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    block_index = head * tl.num_programs(1) + block
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
        residual = key - load_rows(centroids_ptr, block_index * clusters, cluster, mask_row, D).to(ACC)  # [TILE, D]
        larger = tl.maximum(unit, tl.max(tl.max(tl.abs(residual), 1), 0))
        scaled = residual / tl.where(larger > 0, larger, 1.0)  # [TILE, D]
        total = total * _square_of_ratio(unit, larger) + tl.sum(scaled * scaled, 0)
        unit = larger
    offs_d = tl.arange(0, padded(D))  # [D]
    base = block_index * tl.num_programs(0) + part
    tl.store(sums_ptr + base * D + offs_d, total, mask=offs_d < D)
    tl.store(largest_ptr + base, unit)


@kernel(stage="clustering", do_not_specialize=["parts"])
def _scale_spread(
    sums_ptr, largest_ptr, spread_ptr, parts, PARTS_OF_BLOCK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    PARTS: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The sums over the blocks before a generation, divided by their mean over the dimensions; 1 where all are 0.

    Grid: (S, G). `sums_ptr`: (G, parts, D); `largest_ptr`: (G, parts); `spread_ptr`: (G, S, D).
    """
    generation, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_part, offs_d = tl.arange(0, PARTS), tl.arange(0, padded(D))  # [PARTS], [D]
    past = tl.minimum(parts, PARTS_OF_BLOCK << generation) if IS_CAUSAL else parts
    units = tl.load(largest_ptr + head * parts + offs_part, mask=offs_part < past, other=0.0)  # [PARTS]
    part_sums = load_rows(sums_ptr, head * parts, offs_part, offs_part < past, D)  # [PARTS, D]
    total = tl.sum(part_sums * _square_of_ratio(units, tl.max(units, 0))[:, None], 0)  # [D]
    mean = tl.sum(total, 0) / D
    ptrs = spread_ptr + (head * tl.num_programs(0) + generation) * D + offs_d  # [D]
    tl.store(ptrs, tl.where(mean > 0, total / tl.where(mean > 0, mean, 1.0), 1.0), mask=offs_d < D)
