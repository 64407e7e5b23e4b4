"""Lloyd's k-means: centroids start as vectors, move to the means of the vectors nearest to them, and are assigned."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.device_functions import add_dot, load_rows, log2_floor, store_rows
from muse_attention.backends.triton.nearest import (
    Sequences,
    affinity,
    argmax,
    half_norms,
    load_centroids,
    load_vectors,
    nearest_in_chunks,
    rows_of_head,
)
from muse_attention.backends.triton.numbers import cdiv, padded
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.runtime.remembering import once
from muse_attention.config import MuSeConfig
from muse_attention.core.shuffle import seeded_shuffle

_SIZES = ("query_heads", "generations", "seen_blocks", "length", "block_size", "query_clusters", "key_clusters")


def start_positions(lengths: tuple[int, ...], clusters: int, seed: int, device: torch.device) -> Tensor:
    """(sequences, clusters) int32: the positions in sequences of these lengths of the vectors that centroids start as,
    at equal distances in the seeded order."""

    def find() -> Tensor:
        rows = {}
        for length in set(lengths):
            order = seeded_shuffle(length, seed, device)
            rows[length] = order[(torch.arange(clusters, device=device) * max(1, length // clusters)) % length]
        return torch.stack([rows[length] for length in lengths]).int()

    return once((*lengths, clusters, seed), device, find)


def take_starts(sequences: Sequences, query_starts: Tensor, key_starts: Tensor) -> None:
    """Centroids start as the vectors at these `start_positions`."""
    _take_starts[(cdiv(sequences.clusters, 16), *_grid(sequences))](
        **sequences.arguments, query_starts_ptr=query_starts, key_starts_ptr=key_starts, TILE=16
    )


def lloyd_iteration(
    sequences: Sequences, config: MuSeConfig, parts: int, launch: dict[str, int], *, is_rounded: bool = False
) -> None:
    """Move centroids to the means of the sampled vectors nearest to them, which `parts` programs of a sequence sum up.

    If `is_rounded`, centroids are rounded to the vectors' dtype.
    """
    clusters, centroids = sequences.clusters, sequences.query_centroids
    number = sum(table.shape[0] * table.shape[1] for table in (centroids, sequences.key_centroids))
    sums = centroids.new_empty(number, parts, clusters, centroids.shape[3])
    in_parts = {"sums_ptr": sums, "sizes_ptr": centroids.new_empty(number, parts, clusters)}
    if sequences.is_cut:  # (Only whole sequences have so many centroids.)
        assign_to_nearest(sequences, stride=config.lloyd_stride(sequences.length, clusters))
    _sum_members[(parts * cdiv(clusters, sequences.at_once), *_grid(sequences))](
        **sequences.arguments, **sequences.assignments, **in_parts, sample=min(config.lloyd_sample, sequences.length),
        **sequences.chunks,
        **launch,
    )  # fmt: skip
    _move_to_means[(cdiv(clusters, 16), *_grid(sequences))](
        **sequences.arguments, **in_parts, parts=parts, IS_ROUNDED=is_rounded, TILE=16
    )


def assign_to_nearest(sequences: Sequences, *, tiles: int = 16, stride: int = 1) -> None:
    """Write the assignments, of every `stride`-th vector; a program has so many tiles of vectors."""
    size, chunks = sequences.block_size, sequences.chunks
    grid = (cdiv(size, stride * chunks["TILE"] * tiles), cdiv(sequences.length, size), sequences.heads)
    _assign_to_nearest[grid](
        **sequences.arguments, **sequences.assignments, stride=stride, **chunks, TILES=tiles, num_warps=4
    )


def _grid(sequences: Sequences) -> tuple[int, int]:
    """All sequences of all heads."""
    return max(sequences.query_centroids.shape[1], sequences.key_centroids.shape[1]), sequences.heads


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
    store_rows(centroids_ptr, 0, offs_cluster, mask_cluster, x.to(ACC), D)


@kernel(stage="clustering", do_not_specialize=[*_SIZES, "sample"])
def _sum_members(
    queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, query_assignment_ptr, key_assignment_ptr, sums_ptr,
    sizes_ptr, query_heads, generations, seen_blocks, length, block_size, query_clusters, key_clusters, sample,
    FACTOR: tl.constexpr, IS_CAUSAL: tl.constexpr, D: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Sum and count the vectors nearest to each centroid, in a part of the samples of a sequence.

    Grid: (parts and chunks of centroids, sequences, H + G). `query_assignment_ptr`: (H, N) and `key_assignment_ptr`:
    (G, N), int32, read only if there are several chunks; `sums_ptr`: (all sequences, parts, C, D) and `sizes_ptr`: (all
    sequences, parts, C), with the larger number of clusters; the others as in `_take_starts`.
    """
    sequence, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    vectors_ptr, first, number, sequence_index, centroids_ptr, clusters = _pick_sequence(
        queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, sequence, head, query_heads, generations,
        seen_blocks, length, block_size, query_clusters, key_clusters, IS_CAUSAL, D,
    )  # fmt: skip
    if number == 0:
        return
    chunks = 1 if CHUNK == CP else tl.cdiv(clusters, CHUNK)
    part, parts = tl.program_id(0) // chunks, tl.num_programs(0) // chunks
    offs_cluster = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
    stride = tl.maximum(1, number // (sample * clusters))
    sampled = tl.cdiv(number, stride)
    if CHUNK == CP:
        current = load_centroids(centroids_ptr, 0, clusters, D, CP)  # [CP, D]
        rounded, norms = half_norms(current, 0, clusters, CP, queries_ptr.dtype.element_ty, ACC)  # [CP, D], [CP]
    else:
        assignment_ptr = rows_of_head(query_assignment_ptr, key_assignment_ptr, head, query_heads, length, 1)
    total = tl.zeros([CHUNK, padded(D)], ACC)  # [CHUNK, D]
    count = tl.zeros([CHUNK], ACC)
    rows = tl.cdiv(tl.cdiv(sampled, parts), TILE) * TILE
    for begin in range(part * rows, tl.minimum((part + 1) * rows, sampled), TILE):
        offs_row = (begin + tl.arange(0, TILE)) * stride  # [TILE]
        mask_row = offs_row < number  # [TILE]
        x = load_vectors(vectors_ptr, first + offs_row, mask_row, head < query_heads, FACTOR, D, ACC)  # [TILE, D]
        if CHUNK == CP:
            nearest = argmax(affinity(x, rounded, norms, ACC), CP, x.dtype)  # [TILE]
        else:
            nearest = tl.load(assignment_ptr + first + offs_row, mask=mask_row, other=-1)
        member = ((nearest[:, None] == offs_cluster[None, :]) & mask_row[:, None]).to(x.dtype)  # [TILE, CHUNK]
        total = add_dot(tl.trans(member), x, total)
        count += tl.sum(member.to(ACC), 0)
    base = (sequence_index * parts + part) * tl.maximum(query_clusters, key_clusters)
    mask_cluster = offs_cluster < clusters  # [CHUNK]
    store_rows(sums_ptr, base, offs_cluster, mask_cluster, total, D)
    tl.store(sizes_ptr + base + offs_cluster, count, mask=mask_cluster)


@kernel(stage="clustering", do_not_specialize=[*_SIZES, "parts"])
def _move_to_means(
    queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, sums_ptr, sizes_ptr, query_heads, generations,
    seen_blocks, length, block_size, query_clusters, key_clusters, parts, FACTOR: tl.constexpr, IS_CAUSAL: tl.constexpr,
    IS_ROUNDED: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Move centroids to the means of their members; a centroid without members stays.

    Grid: (C / TILE, sequences, H + G). As in `_sum_members`.
    """
    sequence, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    _, _, number, sequence_index, centroids_ptr, clusters = _pick_sequence(
        queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, sequence, head, query_heads, generations,
        seen_blocks, length, block_size, query_clusters, key_clusters, IS_CAUSAL, D,
    )  # fmt: skip
    first = tl.program_id(0) * TILE
    if (number == 0) | (first >= clusters):
        return
    offs_cluster = first + tl.arange(0, TILE)
    mask_cluster = offs_cluster < clusters  # [TILE]
    total = tl.zeros([TILE, padded(D)], ACC)  # [TILE, D]
    count = tl.zeros([TILE], ACC)
    for part in range(parts):
        base = (sequence_index * parts + part) * tl.maximum(query_clusters, key_clusters)
        total += load_rows(sums_ptr, base, offs_cluster, mask_cluster, D)
        count += tl.load(sizes_ptr + base + offs_cluster, mask=mask_cluster, other=0.0)
    mean = total / tl.maximum(count, 1.0)[:, None]  # [TILE, D]
    if IS_ROUNDED:
        mean = mean.to(queries_ptr.dtype.element_ty).to(ACC)
    store_rows(centroids_ptr, 0, offs_cluster, mask_cluster & (count > 0), mean, D)


@kernel(stage="clustering", do_not_specialize=_SIZES)
def _assign_to_nearest(
    queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, query_assignment_ptr, key_assignment_ptr,
    query_heads, generations, seen_blocks, length, block_size, query_clusters, key_clusters, stride,
    FACTOR: tl.constexpr, IS_CAUSAL: tl.constexpr, D: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The nearest centroid of some vectors of a block, of every `stride`-th; 0 for queries that see no other block, and
    for unseen keys. (A `stride` of 1 is a constant for the compiler.)

    Grid: (B / (stride TILE TILES), nb, H + G). `query_assignment_ptr`: (H, N) and `key_assignment_ptr`: (G, N), int32;
    the others as in `_take_starts`.
    """
    block, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    sequence, has_centroids = block, block < seen_blocks
    if head < query_heads:
        sequence = log2_floor(tl.maximum(block, 1)) if IS_CAUSAL else block * 0
        has_centroids = (block > 0) | (not IS_CAUSAL)
    vectors_ptr, _, _, _, centroids_ptr, clusters = _pick_sequence(
        queries_ptr, keys_ptr, query_centroids_ptr, key_centroids_ptr, tl.where(has_centroids, sequence, 0), head,
        query_heads, generations, seen_blocks, length, block_size, query_clusters, key_clusters, IS_CAUSAL, D,
    )  # fmt: skip
    assignment_ptr = rows_of_head(query_assignment_ptr, key_assignment_ptr, head, query_heads, length, 1)
    if CHUNK == CP:
        current = load_centroids(centroids_ptr, 0, clusters, D, CP)  # [CP, D]
        rounded, norms = half_norms(current, 0, clusters, CP, queries_ptr.dtype.element_ty, ACC)  # [CP, D], [CP]
    rows = stride * TILE * TILES
    start = block * block_size + tl.program_id(0) * rows
    end = tl.minimum((block + 1) * block_size, length)
    for begin in range(start, tl.minimum(start + rows, end), stride * TILE):
        offs_row = begin + tl.arange(0, TILE) * stride  # [TILE]
        mask_row = offs_row < end  # [TILE]
        x = load_vectors(vectors_ptr, offs_row, mask_row, head < query_heads, FACTOR, D, ACC)  # [TILE, D]
        if CHUNK == CP:
            nearest = argmax(affinity(x, rounded, norms, ACC), CP, x.dtype)  # [TILE]
        else:
            nearest = nearest_in_chunks(x, centroids_ptr, assignment_ptr, clusters, False, D, CHUNK, ACC)
        tl.store(assignment_ptr + offs_row, tl.where(has_centroids, nearest, 0), mask=mask_row)
