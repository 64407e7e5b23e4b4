"""Centroids of the keys of each block that is seen, and of the queries before each generation: Lloyd's k-means.

A *sequence* is clustered on its own: the queries before a generation, or the keys of a block. Sequences of queries and
of keys share every launch. The spread of the keys about their centroids is the metric of each generation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import Geometry, generation_of_block
from muse_attention.backends.triton.device_functions import add_dot, load_rows
from muse_attention.backends.triton.nearest import (
    affinity,
    argmax,
    half_norms,
    load_centroids,
    load_vectors,
    rows_with_scores,
    store_centroids,
)
from muse_attention.backends.triton.numbers import accumulator, cdiv, fitting, padded, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.runtime.remembering import once
from muse_attention.config import MuSeConfig
from muse_attention.core.precision import compute_dtype
from muse_attention.core.shuffle import seeded_shuffle

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
_SIZES = ("query_heads", "generations", "seen_blocks", "length", "block_size", "query_clusters", "key_clusters")


def find_start_positions(geometry: Geometry, device: torch.device) -> tuple[Tensor, Tensor]:
    """(S, Q) and (seen blocks, K) int32: positions in their sequence of the vectors that centroids start as."""
    generations, config = geometry.generations, geometry.config
    size, length = config.block_size, geometry.length
    query_lengths = tuple(min(length, generations.past(number) * size) for number in range(generations.number))
    key_lengths = tuple(min(size, length - block * size) for block in range(geometry.seen_blocks))
    return (
        _start_positions(query_lengths, config.query_clusters, config, device),
        _start_positions(key_lengths, config.key_clusters, config, device),
    )


def _start_positions(lengths: tuple[int, ...], clusters: int, config: MuSeConfig, device: torch.device) -> Tensor:
    def find() -> Tensor:
        rows = {}
        for length in set(lengths):
            order = seeded_shuffle(length, config.seed, device)
            rows[length] = order[(torch.arange(clusters, device=device) * max(1, length // clusters)) % length]
        return torch.stack([rows[length] for length in lengths]).int()

    return once((*lengths, clusters, config.seed), device, find)


def cluster(
    queries: Tensor, keys: Tensor, query_starts: Tensor, key_starts: Tensor, geometry: Geometry, *, scale: float
) -> tuple[Tensor, ...]:
    """Cluster (H, N, D) queries, times the scale, and (G, N, D) keys. Returns centroids (H, S, Q, D) and assignment
    (H, N) int32 of queries, then (G, seen blocks, K, D) and (G, N) int32 of keys."""
    config, dtype = geometry.config, compute_dtype(queries.dtype)
    heads, key_heads, head_dim = queries.shape[0], keys.shape[0], queries.shape[2]
    generations, blocks = geometry.generations.number, geometry.seen_blocks
    query_centroids = queries.new_empty(heads, generations, config.query_clusters, head_dim, dtype=dtype)
    query_assignment = queries.new_empty(queries.shape[:2], dtype=torch.int32)
    key_centroids = keys.new_empty(key_heads, blocks, config.key_clusters, head_dim, dtype=dtype)
    key_assignment = keys.new_empty(keys.shape[:2], dtype=torch.int32)
    clusters = max(config.query_clusters, config.key_clusters)
    tile = rows_with_scores(clusters)
    parts = min(_PARTS, cdiv(min(geometry.length, 2 * config.lloyd_sample * clusters), tile))
    sequences = heads * generations + key_heads * blocks
    sums = queries.new_empty(sequences, parts, clusters, head_dim, dtype=dtype)
    sizes = queries.new_empty(sequences, parts, clusters, dtype=dtype)
    shared: dict[str, Any] = {
        "queries_ptr": queries,
        "keys_ptr": keys,
        "query_centroids_ptr": query_centroids,
        "key_centroids_ptr": key_centroids,
        "query_heads": heads,
        **geometry.sizes(*_SIZES[1:]),
        "FACTOR": scale,
        "IS_CAUSAL": geometry.is_causal,
        "D": head_dim,
        "ACC": accumulator(queries.dtype),
    }
    sequence_grid = (max(generations, blocks), heads + key_heads)
    in_parts = {"sums_ptr": sums, "sizes_ptr": sizes}
    _take_starts[(cdiv(clusters, 16), *sequence_grid)](
        **shared, query_starts_ptr=query_starts, key_starts_ptr=key_starts, TILE=16
    )
    for _ in range(config.lloyd_iterations):
        _sum_members_of_sequence[(parts, *sequence_grid)](
            **shared, **in_parts, sample=config.lloyd_sample, CP=padded(clusters), TILE=tile,
            **(fitting(SUM_MEMBERS, head_dim, head_dim, queries.dtype) if clusters <= 128 else SUM_MEMBERS_OF_MANY),
        )  # fmt: skip
        _mean_of_sequence[(cdiv(clusters, 16), *sequence_grid)](**shared, **in_parts, parts=parts, TILE=16)
    _assign_to_nearest[(cdiv(config.block_size, tile * _TILES), geometry.blocks, heads + key_heads)](
        **shared, query_assignment_ptr=query_assignment, key_assignment_ptr=key_assignment, CP=padded(clusters),
        TILE=tile, TILES=_TILES, num_warps=4,
    )  # fmt: skip
    return query_centroids, query_assignment, key_centroids, key_assignment


@triton.jit
def _pick_sequence(
    queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, sequence, head, query_heads, generations,
    seen_blocks, length, block_size, query_clusters, key_clusters, IS_CAUSAL: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Pointer to the vectors of a head; the first vector of a sequence and their number, 0 if there is no such
    sequence; its index among all sequences; pointer to its centroids, and their number."""
    if head < query_heads:
        vectors_ptr = queries_ptr + head * length * D
        first, number = sequence * 0, tl.minimum(length, block_size << sequence) if IS_CAUSAL else length
        number = tl.where(sequence < generations, number, 0)
        sequence_index, clusters = head * generations + sequence, query_clusters
        centroids_ptr = query_centroids_ptr + sequence_index * query_clusters * D
    else:
        vectors_ptr = keys_ptr + (head - query_heads) * length * D
        first = sequence * block_size
        number = tl.where(sequence < seen_blocks, tl.minimum(block_size, length - first), 0)
        key_sequence, clusters = (head - query_heads) * seen_blocks + sequence, key_clusters
        sequence_index = query_heads * generations + key_sequence
        centroids_ptr = key_centroids_ptr + key_sequence * key_clusters * D
    return vectors_ptr, first, number, sequence_index, centroids_ptr, clusters


@kernel(stage="clustering", do_not_specialize=_SIZES)
def _take_starts(
    queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, query_starts_ptr, key_starts_ptr, query_heads,
    generations, seen_blocks, length, block_size, query_clusters, key_clusters, FACTOR: tl.constexpr,
    IS_CAUSAL: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Centroids start as vectors.

    Grid: (C / TILE, sequences, H + G), with the larger number of clusters and of sequences. `queries_ptr`: (H, N, D);
    `keys_ptr`: (G, N, D); `query_centroids_ptr`: (H, S, Q, D); `key_centroids_ptr`: (G, seen blocks, K, D);
    `query_starts_ptr`: (S, Q) and `key_starts_ptr`: (seen blocks, K), int32.
    """
    sequence, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    vectors_ptr, first, number, _, centroids_ptr, clusters = _pick_sequence(
        queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, sequence, head, query_heads, generations,
        seen_blocks, length, block_size, query_clusters, key_clusters, IS_CAUSAL, D,
    )  # fmt: skip
    if number == 0:
        return
    offs_cluster = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    mask_cluster = offs_cluster < clusters  # [TILE]
    if head < query_heads:
        starts_ptr = query_starts_ptr
    else:
        starts_ptr = key_starts_ptr
    offs_row = first + tl.load(starts_ptr + sequence * clusters + offs_cluster, mask=mask_cluster, other=0)  # [TILE]
    x = load_vectors(vectors_ptr, offs_row, mask_cluster, head < query_heads, FACTOR, D, ACC)  # [TILE, D]
    store_centroids(centroids_ptr, sequence * 0, tl.program_id(0) * TILE, clusters, x.to(ACC), D, TILE)


@kernel(stage="clustering", do_not_specialize=[*_SIZES, "sample"])
def _sum_members_of_sequence(
    queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, sums_ptr, sizes_ptr, query_heads, generations,
    seen_blocks, length, block_size, query_clusters, key_clusters, sample, FACTOR: tl.constexpr,
    IS_CAUSAL: tl.constexpr, D: tl.constexpr, CP: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Sum and count the vectors nearest to each centroid, in a part of the samples of a sequence.

    Grid: (parts, sequences, H + G). `sums_ptr`: (all sequences, parts, C, D) and `sizes_ptr`: (all sequences, parts,
    C), with the larger number of clusters; the others as in `_take_starts`.
    """
    part, sequence, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    vectors_ptr, first, number, sequence_index, centroids_ptr, clusters = _pick_sequence(
        queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, sequence, head, query_heads, generations,
        seen_blocks, length, block_size, query_clusters, key_clusters, IS_CAUSAL, D,
    )  # fmt: skip
    if number == 0:
        return
    stride = tl.maximum(1, number // (sample * clusters))
    sampled = tl.cdiv(number, stride)
    current = load_centroids(centroids_ptr, sequence * 0, 0, clusters, D, CP)  # [CP, D]
    rounded, norms = half_norms(current, 0, clusters, CP, queries_ptr.dtype.element_ty, ACC)  # [CP, D], [CP]
    offs_cluster, offs_d = tl.arange(0, CP), tl.arange(0, padded(D))  # [CP], [D]
    total = tl.zeros([CP, padded(D)], ACC)  # [CP, D]
    count = tl.zeros([CP], ACC)
    rows = tl.cdiv(tl.cdiv(sampled, tl.num_programs(0)), TILE) * TILE
    for begin in range(part * rows, tl.minimum((part + 1) * rows, sampled), TILE):
        offs_row = (begin + tl.arange(0, TILE)) * stride  # [TILE]
        mask_row = offs_row < number  # [TILE]
        x = load_vectors(vectors_ptr, first + offs_row, mask_row, head < query_heads, FACTOR, D, ACC)  # [TILE, D]
        nearest = argmax(affinity(x, rounded, norms, ACC), CP, x.dtype)  # [TILE]
        member = ((nearest[:, None] == offs_cluster[None, :]) & mask_row[:, None]).to(x.dtype)  # [TILE, CP]
        total = add_dot(tl.trans(member), x, total)
        count += tl.sum(member.to(ACC), 0)
    base = (sequence_index * tl.num_programs(0) + part) * tl.maximum(query_clusters, key_clusters)
    mask_cluster = offs_cluster < clusters  # [CP]
    offs = (base + offs_cluster)[:, None] * D + offs_d[None, :]  # [CP, D]
    tl.store(sums_ptr + offs, total, mask=mask_cluster[:, None] & (offs_d < D)[None, :])
    tl.store(sizes_ptr + base + offs_cluster, count, mask=mask_cluster)


@kernel(stage="clustering", do_not_specialize=[*_SIZES, "parts"])
def _mean_of_sequence(
    queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, sums_ptr, sizes_ptr, query_heads, generations,
    seen_blocks, length, block_size, query_clusters, key_clusters, parts, FACTOR: tl.constexpr, IS_CAUSAL: tl.constexpr,
    D: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Move centroids to the means of their members; a centroid without members stays.

    Grid: (C / TILE, sequences, H + G). As in `_sum_members_of_sequence`.
    """
    sequence, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    _, _, number, sequence_index, centroids_ptr, clusters = _pick_sequence(
        queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, sequence, head, query_heads, generations,
        seen_blocks, length, block_size, query_clusters, key_clusters, IS_CAUSAL, D,
    )  # fmt: skip
    first = tl.program_id(0) * TILE
    if (number == 0) | (first >= clusters):
        return
    offs_cluster, offs_d = first + tl.arange(0, TILE), tl.arange(0, padded(D))  # [TILE], [D]
    mask_cluster = offs_cluster < clusters  # [TILE]
    total = tl.zeros([TILE, padded(D)], ACC)  # [TILE, D]
    count = tl.zeros([TILE], ACC)
    for part in range(parts):
        base = (sequence_index * parts + part) * tl.maximum(query_clusters, key_clusters)
        total += load_rows(sums_ptr, base, offs_cluster, mask_cluster, D)
        count += tl.load(sizes_ptr + base + offs_cluster, mask=mask_cluster, other=0.0)
    offs = offs_cluster[:, None] * D + offs_d[None, :]  # [TILE, D]
    mask = (mask_cluster & (count > 0))[:, None] & (offs_d < D)[None, :]  # [TILE, D]
    tl.store(centroids_ptr + offs, total / tl.maximum(count, 1.0)[:, None], mask=mask)


@kernel(stage="clustering", do_not_specialize=_SIZES)
def _assign_to_nearest(
    queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, query_assignment_ptr, key_assignment_ptr,
    query_heads, generations, seen_blocks, length, block_size, query_clusters, key_clusters, FACTOR: tl.constexpr,
    IS_CAUSAL: tl.constexpr, D: tl.constexpr, CP: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """The nearest centroid of some vectors of a block; 0 for queries that see no other block, and for unseen keys.

    Grid: (B / (TILE TILES), nb, H + G). `query_assignment_ptr`: (H, N) and `key_assignment_ptr`: (G, N), int32; the
    others as in `_take_starts`.
    """
    block, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    sequence, has_centroids = block, block < seen_blocks
    assignment_ptr = key_assignment_ptr + (head - query_heads) * length
    if head < query_heads:
        sequence, _ = generation_of_block(block, IS_CAUSAL)
        has_centroids = (block > 0) | (not IS_CAUSAL)
        assignment_ptr = query_assignment_ptr + head * length
    vectors_ptr, _, _, _, centroids_ptr, clusters = _pick_sequence(
        queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, tl.where(has_centroids, sequence, 0), head,
        query_heads, generations, seen_blocks, length, block_size, query_clusters, key_clusters, IS_CAUSAL, D,
    )  # fmt: skip
    current = load_centroids(centroids_ptr, sequence * 0, 0, clusters, D, CP)  # [CP, D]
    rounded, norms = half_norms(current, 0, clusters, CP, queries_ptr.dtype.element_ty, ACC)  # [CP, D], [CP]
    start = block * block_size + tl.program_id(0) * TILE * TILES
    end = tl.minimum((block + 1) * block_size, length)
    for begin in range(start, tl.minimum(start + TILE * TILES, end), TILE):
        offs_row = begin + tl.arange(0, TILE)  # [TILE]
        mask_row = offs_row < end  # [TILE]
        x = load_vectors(vectors_ptr, offs_row, mask_row, head < query_heads, FACTOR, D, ACC)  # [TILE, D]
        nearest = argmax(affinity(x, rounded, norms, ACC), CP, x.dtype)  # [TILE]
        tl.store(assignment_ptr + offs_row, tl.where(has_centroids, nearest, 0), mask=mask_row)


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
