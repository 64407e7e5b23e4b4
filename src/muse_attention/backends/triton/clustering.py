"""Stage 1: centroids over the whole sequence, then capped assignment inside each block."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.filling import fill
from muse_attention.backends.triton.grouping import group_by_cluster_and_block
from muse_attention.backends.triton.nearest import (
    affinity,
    argmax,
    best_of_chunk,
    centroids_at_once,
    half_norms,
    load_centroids,
    load_vectors,
    nearest_in_chunks,
    nothing_found,
    vectors_of_sequence,
)
from muse_attention.backends.triton.numbers import arithmetic, cdiv, padded, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.config import MuSeConfig
from muse_attention.core.precision import compute_dtype
from muse_attention.core.shuffle import seeded_shuffle
from muse_attention.core.structures import Side

MINIBATCH = 64
DECAY = 0.9
_PARTS = 16
"""Pieces of a sequence whose members are summed by different programs of a Lloyd iteration."""
_TILES_OF_PART = 16
"""Tiles of vectors that one program assigns."""
SUM_MEMBERS = {"num_warps": 4}
FIND_NEAREST = {"num_warps": 4}


def cluster(sides: list[Side], order: Tensor, config: MuSeConfig) -> list[tuple[Tensor, Tensor]]:
    """Centroids (heads, clusters, D) and assignment (heads, N) int32 of one or two sides of (heads, N, D) vectors.

    Two sides have as many clusters, and the second has factor 1. They go through every kernel together, save what keeps
    them under their caps. `order` is `shuffled_positions`.
    """
    vectors = _Vectors(sides)
    centroids = vectors.new_table()
    vectors.launch(_take, (cdiv(vectors.clusters, 16), vectors.heads), order, centroids, TILE=16)
    if config.clustering != "streaming":
        for _ in range(config.lloyd_iterations):
            _lloyd_iteration(vectors, centroids, config.lloyd_stride(vectors.length, vectors.clusters))
    else:
        _stream_vectors(vectors, order, centroids)
    assignment = _find_nearest_of_all(vectors, centroids)
    sizes = [side.vectors.shape[0] for side in sides]
    found = list(zip(centroids.split(sizes), assignment.split(sizes), strict=True))
    for side, (some_centroids, some_assignment) in zip(sides, found, strict=True):
        if side.cap is not None and side.cap < min(config.block_size, vectors.length):
            _keep_under_cap(_Vectors([side]), some_centroids, some_assignment, side.cap, config)
    return found


class _Vectors:
    """One or two tensors of vectors, as the kernels take them."""

    def __init__(self, sides: list[Side]) -> None:
        self.first, self.factor, self.second = sides[0].vectors, sides[0].factor, sides[-1].vectors
        if len(sides) == 2 and sides[1].factor != 1:
            raise ValueError("the second side has no factor")
        self.of_first = self.first.shape[0]
        self.heads = sum(side.vectors.shape[0] for side in sides)
        self.length, self.head_dim = self.first.shape[1:]
        self.clusters = sides[0].clusters
        self.at_once = centroids_at_once(self.clusters, self.head_dim)

    @property
    def is_cut(self) -> bool:
        """Whether there are too many centroids to hold them all on chip."""
        return self.at_once < self.clusters

    @property
    def chunks(self) -> dict[str, int]:
        return {"CP": padded(self.clusters), "CHUNK": self.at_once}

    def new_table(self) -> Tensor:
        shape = (self.heads, self.clusters, self.head_dim)
        return self.first.new_empty(shape, dtype=compute_dtype(self.first.dtype))

    def launch(self, kernel: Any, grid: tuple[int, ...], *tensors: Tensor | int, **constants: Any) -> None:
        kernel[grid](
            self.first, self.second, *tensors, self.of_first, self.length, self.clusters,
            FACTOR=self.factor, D=self.head_dim, DP=padded(self.head_dim), **arithmetic(self.first.dtype), **constants,
        )  # fmt: skip


def _stream_vectors(vectors: _Vectors, order: Tensor, centroids: Tensor) -> None:
    """Let one vector after another draw its nearest centroid towards it."""
    settings = {"MINIBATCH": MINIBATCH, "DECAY": DECAY, "LOG2_DECAY": math.log2(DECAY), "num_warps": 8}
    if vectors.is_cut:
        weights = fill(centroids.new_empty(centroids.shape[:2]), 1.0)
        vectors.launch(
            _stream_in_chunks, (vectors.heads,), order, centroids, weights, CHUNK=vectors.at_once, **settings
        )
    else:
        vectors.launch(_stream, (vectors.heads,), order, centroids, CP=padded(vectors.clusters), **settings)


def _lloyd_iteration(vectors: _Vectors, centroids: Tensor, stride: int) -> None:
    """Move every centroid to the mean of those nearest to it among every `stride`-th vector."""
    tile = _rows_with_scores(vectors.at_once)
    parts = min(_PARTS, cdiv(vectors.length, tile * stride))
    sums = centroids.new_empty(vectors.heads, parts, *centroids.shape[1:])
    sizes = centroids.new_empty(vectors.heads, parts, vectors.clusters)
    # (A kernel takes a tensor even where it does not look at it.)
    nearest = _find_nearest_of_all(vectors, centroids, stride) if vectors.is_cut else centroids
    vectors.launch(
        _sum_members, (parts, vectors.heads, cdiv(vectors.clusters, vectors.at_once)), centroids, nearest, sums, sizes,
        stride, **vectors.chunks, TILE=tile, **SUM_MEMBERS,
    )  # fmt: skip
    _mean_of_parts[(cdiv(vectors.clusters, 16), vectors.heads)](
        vectors.first, sums, sizes, centroids, parts, vectors.clusters, D=vectors.head_dim, DP=padded(vectors.head_dim),
        ACC=arithmetic(centroids.dtype)["ACC"], TILE=16,
    )  # fmt: skip


def _find_nearest_of_all(vectors: _Vectors, centroids: Tensor, stride: int = 1) -> Tensor:
    """Of every `stride`-th vector."""
    sampled = cdiv(vectors.length, stride)
    assignment = vectors.first.new_empty(vectors.heads, sampled, dtype=torch.int32)
    tile = _rows_with_scores(vectors.at_once)
    vectors.launch(
        _find_nearest, (cdiv(sampled, tile * _TILES_OF_PART), vectors.heads), centroids, assignment, stride,
        **vectors.chunks, TILE=tile, TILES=_TILES_OF_PART, **FIND_NEAREST,
    )  # fmt: skip
    return assignment


def _keep_under_cap(vectors: _Vectors, centroids: Tensor, assignment: Tensor, cap: int, config: MuSeConfig) -> None:
    """Let each centroid have at most `cap` vectors of a block: change the assignment to the nearest.

    In rounds: every unassigned vector proposes to the nearest centroid that has room, and each centroid accepts
    proposals, lowest position first, until it is full.
    """
    proposals = group_by_cluster_and_block(assignment, vectors.clusters, config.block_size)
    blocks = config.number_of_blocks(vectors.length)
    rooms = assignment.new_empty(vectors.heads, blocks, vectors.clusters) if vectors.is_cut else assignment
    vectors.launch(
        _move_overflow, (blocks, vectors.heads), centroids, assignment, proposals.order, proposals.starts,
        torch.empty_like(assignment), rooms, config.block_size, cap, **vectors.chunks,
        TILE=_rows_with_scores(vectors.clusters), SCAN=min(1024, power_of_two(config.block_size)), RANKS=16,
        num_warps=8,
    )  # fmt: skip


def _rows_with_scores(clusters: int) -> int:
    """Rows whose affinity to so many clusters is held on chip at a time."""
    return max(16, min(64, 8192 // padded(clusters)))


def shuffled_positions(length: int, seed: int, device: torch.device) -> Tensor:
    """(length,) int32: the seeded order of positions."""
    return _once((length, seed), device, lambda: seeded_shuffle(length, seed, device).int())


_found: dict[tuple[object, ...], Tensor] = {}
_MOST_FOUND = 64
_read_by_graphs: dict[tuple[object, ...], Tensor] = {}


def _once(numbers: tuple[int, ...], device: torch.device, find: Callable[[], Tensor]) -> Tensor:
    """What depends on a few numbers alone is found once for each stream, not in every call of every layer.

    (Another stream could read it before it is there.) A stream that is being captured comes after all others. What its
    graph reads must outlive it, and what it finds itself belongs to the graph.
    """
    is_cuda = device.type == "cuda"
    what = (*numbers, device)
    if is_cuda and torch.cuda.is_current_stream_capturing():
        for key, tensor in [*_read_by_graphs.items(), *_found.items()]:
            if key[: len(what)] == what:
                _read_by_graphs[what] = tensor
                return tensor
        return find()
    key = (*what, torch.cuda.current_stream(device).cuda_stream if is_cuda else 0)
    if key not in _found:
        while len(_found) >= _MOST_FOUND:
            del _found[next(iter(_found))]
        _found[key] = find()
    return _found[key]


@kernel(do_not_specialize=["of_first", "length", "clusters"])
def _take(
    first, second, order, centroids, of_first, length, clusters, FACTOR: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Centroids start as vectors at equal distances in the shuffled order."""
    sequence = tl.program_id(1)
    number, dim = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DP)
    inside = number < clusters
    place = number * tl.maximum(1, length // clusters) % length
    row = tl.load(order + place, mask=inside, other=0)
    vectors = vectors_of_sequence(first, second, sequence, of_first, length, D)
    x = load_vectors(vectors, row, inside, sequence < of_first, FACTOR, D, DP, ACC)
    at = (sequence.to(tl.int64) * clusters + number)[:, None] * D + dim[None, :]
    tl.store(centroids + at, x.to(ACC), mask=inside[:, None] & (dim < D)[None, :])


@triton.jit
def _decayed(nearest, place, LOG2_DECAY: tl.constexpr, ACC: tl.constexpr):
    """What is left of the vectors of a minibatch when those after them have come to the same centroid."""
    follows = (nearest[:, None] == nearest[None, :]) & (place[:, None] < place[None, :])
    followers = tl.sum(follows.to(tl.int32), 1).to(ACC)
    return tl.exp2(followers * LOG2_DECAY)


@triton.jit
def _receive(
    totals, weights, number, x, nearest, share, DECAY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr
):
    """Totals and weights of the centroids `number` after a minibatch. One that receives `x_1 .. x_m` ends it with the
    total `DECAY^m t + sum_r DECAY^(m-r) x_r`: the closed form of updating it with one vector after another."""
    member = tl.where(nearest[:, None] == number[None, :], share[:, None], 0.0).to(x.dtype)
    received = tl.dot(tl.trans(member), x, input_precision=PRECISION, out_dtype=ACC)
    counted = tl.sum(member.to(ACC), 0)
    # `counted` is 1 + DECAY + .. + DECAY^(m-1), which tells DECAY^m.
    kept = 1.0 - (1.0 - DECAY) * counted
    return totals * kept[:, None] + received, weights * kept + counted


@kernel(do_not_specialize=["of_first", "length", "clusters"])
def _stream(
    first, second, order, centroids, of_first, length, clusters, FACTOR: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, CP: tl.constexpr, MINIBATCH: tl.constexpr, DECAY: tl.constexpr, LOG2_DECAY: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One pass in minibatches."""
    sequence = tl.program_id(0)
    vectors = vectors_of_sequence(first, second, sequence, of_first, length, D)
    number, place, dim = tl.arange(0, CP), tl.arange(0, MINIBATCH), tl.arange(0, DP)
    current = load_centroids(centroids, sequence, 0, clusters, D, DP, CP)
    totals = current
    weights = tl.full([CP], 1.0, ACC)
    for begin in range(0, length, MINIBATCH):
        is_row = begin + place < length
        row = tl.load(order + begin + place, mask=is_row, other=0)
        x = load_vectors(vectors, row, is_row, sequence < of_first, FACTOR, D, DP, ACC)
        rounded, norms = half_norms(current, 0, clusters, CP, x.dtype, ACC)
        nearest = argmax(affinity(x, rounded, norms, ACC, PRECISION), CP, x.dtype)
        nearest = tl.where(is_row, nearest, -1)
        share = _decayed(nearest, place, LOG2_DECAY, ACC)
        totals, weights = _receive(totals, weights, number, x, nearest, share, DECAY, ACC, PRECISION)
        current = totals / weights[:, None]
    at = (sequence.to(tl.int64) * clusters + number)[:, None] * D + dim[None, :]
    rounded = current.to(first.dtype.element_ty).to(ACC)
    tl.store(centroids + at, rounded, mask=(number < clusters)[:, None] & (dim < D)[None, :])


@kernel(do_not_specialize=["of_first", "length", "clusters"])
def _stream_in_chunks(
    first, second, order, centroids, all_weights, of_first, length, clusters, FACTOR: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, CHUNK: tl.constexpr, MINIBATCH: tl.constexpr, DECAY: tl.constexpr, LOG2_DECAY: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same with totals and weights in memory: until the end `centroids` holds the totals. `all_weights` are 1."""
    sequence = tl.program_id(0)
    vectors = vectors_of_sequence(first, second, sequence, of_first, length, D)
    place, dim = tl.arange(0, MINIBATCH), tl.arange(0, DP)
    all_weights += sequence.to(tl.int64) * clusters
    for begin in range(0, length, MINIBATCH):
        is_row = begin + place < length
        row = tl.load(order + begin + place, mask=is_row, other=0)
        x = load_vectors(vectors, row, is_row, sequence < of_first, FACTOR, D, DP, ACC)
        best, nearest = nothing_found(MINIBATCH, x.dtype, ACC)
        for chunk in range(0, clusters, CHUNK):
            number = chunk + tl.arange(0, CHUNK)
            weights = tl.load(all_weights + number, mask=number < clusters, other=1.0)
            current = load_centroids(centroids, sequence, chunk, clusters, D, DP, CHUNK) / weights[:, None]
            rounded, norms = half_norms(current, chunk, clusters, CHUNK, x.dtype, ACC)
            scores = affinity(x, rounded, norms, ACC, PRECISION)
            best, nearest = best_of_chunk(scores, chunk, best, nearest, CHUNK, x.dtype)
        nearest = tl.where(is_row, nearest, -1)
        share = _decayed(nearest, place, LOG2_DECAY, ACC)
        tl.debug_barrier()
        for chunk in range(0, clusters, CHUNK):
            number = chunk + tl.arange(0, CHUNK)
            inside = number < clusters
            weights = tl.load(all_weights + number, mask=inside, other=1.0)
            totals = load_centroids(centroids, sequence, chunk, clusters, D, DP, CHUNK)
            totals, weights = _receive(totals, weights, number, x, nearest, share, DECAY, ACC, PRECISION)
            at = (sequence.to(tl.int64) * clusters + number)[:, None] * D + dim[None, :]
            tl.store(centroids + at, totals, mask=inside[:, None] & (dim < D)[None, :])
            tl.store(all_weights + number, weights, mask=inside)
        tl.debug_barrier()
    for chunk in range(0, clusters, CHUNK):
        number = chunk + tl.arange(0, CHUNK)
        weights = tl.load(all_weights + number, mask=number < clusters, other=1.0)
        current = load_centroids(centroids, sequence, chunk, clusters, D, DP, CHUNK) / weights[:, None]
        at = (sequence.to(tl.int64) * clusters + number)[:, None] * D + dim[None, :]
        rounded = current.to(first.dtype.element_ty).to(ACC)
        tl.store(centroids + at, rounded, mask=(number < clusters)[:, None] & (dim < D)[None, :])


@kernel(do_not_specialize=["stride", "of_first", "length", "clusters"])
def _sum_members(
    first, second, centroids, found, sums, sizes, stride, of_first, length, clusters, FACTOR: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a part of the sequence, the vectors nearest to each centroid, summed and counted. If a program sums those of
    one chunk of centroids, `found` has the nearest one of each vector."""
    part, sequence = tl.program_id(0), tl.program_id(1)
    vectors = vectors_of_sequence(first, second, sequence, of_first, length, D)
    number, dim = tl.arange(0, CHUNK), tl.arange(0, DP)
    sampled = tl.cdiv(length, stride)
    if CHUNK == CP:
        current = load_centroids(centroids, sequence, 0, clusters, D, DP, CHUNK)
        rounded, norms = half_norms(current, 0, clusters, CHUNK, first.dtype.element_ty, ACC)
    else:
        number += tl.program_id(2) * CHUNK
        found += sequence.to(tl.int64) * sampled
    total = tl.zeros([CHUNK, DP], ACC)
    count = tl.zeros([CHUNK], ACC)
    rows = tl.cdiv(tl.cdiv(sampled, tl.num_programs(0)), TILE) * TILE
    for begin in range(part * rows, tl.minimum((part + 1) * rows, sampled), TILE):
        place = begin + tl.arange(0, TILE)
        row = place * stride
        x = load_vectors(vectors, row, row < length, sequence < of_first, FACTOR, D, DP, ACC)
        if CHUNK == CP:
            nearest = argmax(affinity(x, rounded, norms, ACC, PRECISION), CHUNK, x.dtype)
        else:
            nearest = tl.load(found + place, mask=row < length, other=-1)
        member = (nearest[:, None] == number[None, :]) & (row < length)[:, None]
        total = tl.dot(tl.trans(member.to(x.dtype)), x, total, input_precision=PRECISION, out_dtype=ACC)
        count += tl.sum(member.to(ACC), 0)
    at = (sequence.to(tl.int64) * tl.num_programs(0) + part) * clusters + number
    tl.store(sizes + at, count, mask=number < clusters)
    tl.store(sums + at[:, None] * D + dim[None, :], total, mask=(number < clusters)[:, None] & (dim < D)[None, :])


@kernel(do_not_specialize=["parts", "clusters"])
def _mean_of_parts(
    vectors, sums, sizes, centroids, parts, clusters, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """A centroid without members stays where it is. Centroids are numbers of the vectors' dtype: the residuals of
    queries and the tilt of keys are then from exactly the same point."""
    sequence = tl.program_id(1).to(tl.int64)
    number, dim = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DP)
    inside = (number < clusters)[:, None] & (dim < D)[None, :]
    total = tl.zeros([TILE, DP], ACC)
    count = tl.zeros([TILE], ACC)
    for part in range(parts):
        at = (sequence * parts + part) * clusters + number
        total += tl.load(sums + at[:, None] * D + dim[None, :], mask=inside, other=0.0)
        count += tl.load(sizes + at, mask=number < clusters, other=0.0)
    at = centroids + (sequence * clusters + number)[:, None] * D + dim[None, :]
    mean = (total / tl.maximum(count, 1.0)[:, None]).to(vectors.dtype.element_ty).to(ACC)
    tl.store(at, mean, mask=inside & (count > 0)[:, None])


@kernel(do_not_specialize=["of_first", "length", "clusters"])
def _find_nearest(
    first, second, centroids, assignment, stride, of_first, length, clusters, FACTOR: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The nearest centroid of every `stride`-th vector. (A `stride` of 1 is a constant for the compiler.)"""
    sequence = tl.program_id(1)
    vectors = vectors_of_sequence(first, second, sequence, of_first, length, D)
    if CHUNK == CP:
        current = load_centroids(centroids, sequence, 0, clusters, D, DP, CHUNK)
        rounded, norms = half_norms(current, 0, clusters, CHUNK, first.dtype.element_ty, ACC)
    start = tl.program_id(0) * TILE * TILES
    sampled = tl.cdiv(length, stride)
    for begin in range(start, tl.minimum(start + TILE * TILES, sampled), TILE):
        place = begin + tl.arange(0, TILE)
        is_row = place < sampled
        x = load_vectors(vectors, place * stride, is_row, sequence < of_first, FACTOR, D, DP, ACC)
        if CHUNK == CP:
            nearest = argmax(affinity(x, rounded, norms, ACC, PRECISION), CHUNK, x.dtype)
        else:
            nearest = nearest_in_chunks(
                x, centroids, assignment, sequence, clusters, False, D, DP, CHUNK, ACC, PRECISION
            )
        tl.store(assignment + sequence.to(tl.int64) * sampled + place, nearest, mask=is_row)


@kernel(do_not_specialize=["block_size", "cap", "of_first", "length", "clusters"])
def _move_overflow(
    first, second, centroids, assignment, order, starts, waiting, rooms, block_size, cap, of_first, length, clusters,
    FACTOR: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    SCAN: tl.constexpr, RANKS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one block: find who was rejected in the first round, then go on in rounds until nobody waits. `rooms` is the
    room of each centroid where these come in chunks."""
    block, blocks, sequence = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    number, place, scanned = tl.arange(0, CP), tl.arange(0, TILE), tl.arange(0, SCAN)
    starts += sequence.to(tl.int64) * (blocks * clusters + 1) + block
    start = tl.load(starts + number * blocks, mask=number < clusters, other=0)
    size = tl.load(starts + number * blocks + 1, mask=number < clusters, other=0) - start
    largest = tl.max(size, 0)
    if largest <= cap:
        return
    of_sequence = sequence.to(tl.int64) * length
    assignment += of_sequence
    order += of_sequence
    waiting += of_sequence
    begin_of_block = block * block_size
    end_of_block = tl.minimum(begin_of_block + block_size, length)

    # Mark, at its position, every row whose rank in its cluster is beyond the cap.
    for begin in range(begin_of_block, end_of_block, SCAN):
        tl.store(waiting + begin + scanned, tl.zeros([SCAN], tl.int32), mask=begin + scanned < end_of_block)
    tl.debug_barrier()
    for begin in range(cap, largest, RANKS):
        rank = begin + tl.arange(0, RANKS)
        beyond = rank[None, :] < size[:, None]
        row = tl.load(order + start[:, None] + rank[None, :], mask=beyond, other=0)
        tl.store(waiting + row, tl.full([CP, RANKS], 1, tl.int32), mask=beyond)
    tl.debug_barrier()
    # Keep the positions of the marked ones, in order. No mark is overwritten before it is read.
    count = 0
    for begin in range(begin_of_block, end_of_block, SCAN):
        inside = begin + scanned < end_of_block
        marked = tl.load(waiting + begin + scanned, mask=inside, other=0)
        tl.debug_barrier()
        to = begin_of_block + count + tl.cumsum(marked, 0) - marked
        tl.store(waiting + to, begin + scanned, mask=inside & (marked > 0))
        count += tl.sum(marked, 0)
    tl.debug_barrier()

    vectors = vectors_of_sequence(first, second, sequence, of_first, length, D)
    if CHUNK == CP:
        current = load_centroids(centroids, sequence, 0, clusters, D, DP, CP)
        rounded, norms = half_norms(current, 0, clusters, CP, first.dtype.element_ty, ACC)
    else:
        rooms += (sequence.to(tl.int64) * blocks + block) * clusters
    room = tl.maximum(cap - size, 0)
    while count > 0:
        if CHUNK < CP:
            tl.store(rooms + number, room, mask=number < clusters)
            tl.debug_barrier()
        proposed = tl.zeros([CP], tl.int32)
        still = 0
        for begin in range(0, count, TILE):
            inside = begin + place < count
            row = tl.load(waiting + begin_of_block + begin + place, mask=inside, other=0)
            x = load_vectors(vectors, row, inside, sequence < of_first, FACTOR, D, DP, ACC)
            if CHUNK == CP:
                scores = affinity(x, rounded, norms, ACC, PRECISION)
                choice = argmax(tl.where((room > 0)[None, :], scores, float("-inf")), CP, x.dtype)
            else:
                choice = nearest_in_chunks(x, centroids, rooms, sequence, clusters, True, D, DP, CHUNK, ACC, PRECISION)
            member = (choice[:, None] == number[None, :]) & inside[:, None]
            rank = tl.cumsum(member.to(tl.int32), 0) - 1 + proposed[None, :]
            accepted = tl.sum((member & (rank < room[None, :])).to(tl.int32), 1) > 0
            tl.store(assignment + row, choice, mask=inside & accepted)
            rejected = (inside & ~accepted).to(tl.int32)
            tl.debug_barrier()
            to = begin_of_block + still + tl.cumsum(rejected, 0) - rejected
            tl.store(waiting + to, row, mask=rejected > 0)
            still += tl.sum(rejected, 0)
            proposed += tl.sum(member.to(tl.int32), 0)
        room = tl.maximum(room - proposed, 0)
        count = still
        tl.debug_barrier()
