"""Balanced assignment: a limit on the vectors of a block that one centroid may have."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.grouping import group_by_cluster_and_block
from muse_attention.backends.triton.nearest import (
    affinity,
    argmax,
    centroids_at_once,
    half_norms,
    load_centroids,
    load_vectors,
    nearest_in_chunks,
    rows_with_scores,
)
from muse_attention.backends.triton.numbers import accumulator, padded, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.config import MuSeConfig
from muse_attention.core.structures import Side


def keep_under_cap(side: Side, centroids: Tensor, assignment: Tensor, config: MuSeConfig) -> None:
    """Limit each of (heads, C, D) centroids to the side's `cap` of vectors of a block, in place: `assignment` is
    (heads, N), to the nearest.

    In rounds: every unassigned vector proposes to the nearest centroid that has room, and each centroid accepts
    proposals, lowest position first, until it is full.
    """
    heads, length, head_dim = side.vectors.shape
    proposals = group_by_cluster_and_block(assignment, side.clusters, config.block_size)
    blocks, at_once = config.number_of_blocks(length), centroids_at_once(side.clusters, head_dim)
    rooms = assignment.new_empty(heads, blocks, side.clusters) if at_once < side.clusters else assignment
    _move_overflow[(blocks, heads)](
        vectors_ptr=side.vectors, centroids_ptr=centroids, assignment_ptr=assignment, order_ptr=proposals.order,
        starts_ptr=proposals.starts, waiting_ptr=torch.empty_like(assignment), rooms_ptr=rooms,
        block_size=config.block_size, cap=side.cap, length=length, clusters=side.clusters, FACTOR=side.factor,
        D=head_dim, CP=padded(side.clusters), CHUNK=at_once, TILE=rows_with_scores(side.clusters),
        SCAN=min(1024, power_of_two(config.block_size)), RANKS=16, ACC=accumulator(side.vectors.dtype), num_warps=8,
    )  # fmt: skip


@kernel(stage="clustering", do_not_specialize=["block_size", "cap", "length", "clusters"])
def _move_overflow(
    vectors_ptr, centroids_ptr, assignment_ptr, order_ptr, starts_ptr, waiting_ptr, rooms_ptr, block_size, cap, length,
    clusters, FACTOR: tl.constexpr, D: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    SCAN: tl.constexpr, RANKS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One block: find the rows beyond the cap in the first round, then go on in rounds until no row waits.

    Grid: (nb, heads). `vectors_ptr`: (heads, N, D); `centroids_ptr`: (heads, C, D); `assignment_ptr`: (heads, N) int32,
    in place; `order_ptr`: (heads, N) int32 and `starts_ptr`: (heads, C nb + 1) int32, the first proposals by cluster
    and block; `waiting_ptr`: (heads, N) int32, room for the waiting rows of each block; `rooms_ptr`: (heads, nb, C)
    int32, the room of each centroid where these come in chunks.
    """
    block, blocks, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    # [CP], [TILE], [SCAN]
    offs_cluster, offs_place, offs_scan = tl.arange(0, CP), tl.arange(0, TILE), tl.arange(0, SCAN)
    starts_ptr += head * (blocks * clusters + 1) + block
    start = tl.load(starts_ptr + offs_cluster * blocks, mask=offs_cluster < clusters, other=0)  # [CP]
    size = tl.load(starts_ptr + offs_cluster * blocks + 1, mask=offs_cluster < clusters, other=0) - start  # [CP]
    largest = tl.max(size, 0)
    if largest <= cap:
        return
    vectors_ptr += head * length * D
    centroids_ptr += head * clusters * D
    assignment_ptr += head * length
    order_ptr += head * length
    waiting_ptr += head * length
    begin_of_block = block * block_size
    end_of_block = tl.minimum(begin_of_block + block_size, length)

    # 1. Mark, at its position, every row whose rank in its cluster is beyond the cap.
    for begin in range(begin_of_block, end_of_block, SCAN):
        tl.store(waiting_ptr + begin + offs_scan, tl.zeros([SCAN], tl.int32), mask=begin + offs_scan < end_of_block)
    tl.debug_barrier()
    for begin in range(cap, largest, RANKS):
        rank = begin + tl.arange(0, RANKS)  # [RANKS]
        mask_beyond = rank[None, :] < size[:, None]  # [CP, RANKS]
        offs_row = tl.load(order_ptr + start[:, None] + rank[None, :], mask=mask_beyond, other=0)  # [CP, RANKS]
        tl.store(waiting_ptr + offs_row, tl.full([CP, RANKS], 1, tl.int32), mask=mask_beyond)
    tl.debug_barrier()
    # 2. Keep the positions of the marked ones, in order. No mark is overwritten before it is read.
    count = 0
    for begin in range(begin_of_block, end_of_block, SCAN):
        mask_row = begin + offs_scan < end_of_block  # [SCAN]
        marked = tl.load(waiting_ptr + begin + offs_scan, mask=mask_row, other=0)  # [SCAN]
        tl.debug_barrier()
        target = begin_of_block + count + tl.cumsum(marked, 0) - marked  # [SCAN]
        tl.store(waiting_ptr + target, begin + offs_scan, mask=mask_row & (marked > 0))
        count += tl.sum(marked, 0)
    tl.debug_barrier()

    # 3. Rounds of proposals.
    if CHUNK == CP:
        current = load_centroids(centroids_ptr, 0, clusters, D, CP)  # [CP, D]
        rounded, norms = half_norms(current, 0, clusters, CP, vectors_ptr.dtype.element_ty, ACC)  # [CP, D], [CP]
    else:
        rooms_ptr += (head * blocks + block) * clusters
    room = tl.maximum(cap - size, 0)  # [CP]
    while count > 0:
        if CHUNK < CP:
            tl.store(rooms_ptr + offs_cluster, room, mask=offs_cluster < clusters)
            tl.debug_barrier()
        proposed = tl.zeros([CP], tl.int32)
        still_waiting = 0
        for begin in range(0, count, TILE):
            mask_row = begin + offs_place < count  # [TILE]
            offs_row = tl.load(waiting_ptr + begin_of_block + begin + offs_place, mask=mask_row, other=0)  # [TILE]
            # (All vectors have the factor.)
            x = load_vectors(vectors_ptr, offs_row, mask_row, head >= 0, FACTOR, D, ACC)  # [TILE, D]
            if CHUNK == CP:
                scores = affinity(x, rounded, norms, ACC)  # [TILE, CP]
                choice = argmax(tl.where((room > 0)[None, :], scores, float("-inf")), CP, x.dtype)  # [TILE]
            else:
                choice = nearest_in_chunks(x, centroids_ptr, rooms_ptr, clusters, True, D, CHUNK, ACC)
            member = (choice[:, None] == offs_cluster[None, :]) & mask_row[:, None]  # [TILE, CP]
            rank = tl.cumsum(member.to(tl.int32), 0) - 1 + proposed[None, :]  # [TILE, CP]
            accepted = tl.sum((member & (rank < room[None, :])).to(tl.int32), 1) > 0  # [TILE]
            tl.store(assignment_ptr + offs_row, choice, mask=mask_row & accepted)
            rejected = (mask_row & ~accepted).to(tl.int32)  # [TILE]
            tl.debug_barrier()
            target = begin_of_block + still_waiting + tl.cumsum(rejected, 0) - rejected  # [TILE]
            tl.store(waiting_ptr + target, offs_row, mask=rejected > 0)
            still_waiting += tl.sum(rejected, 0)
            proposed += tl.sum(member.to(tl.int32), 0)
        room = tl.maximum(room - proposed, 0)
        count = still_waiting
        tl.debug_barrier()
