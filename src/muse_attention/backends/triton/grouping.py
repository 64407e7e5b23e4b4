"""Tokens sorted by cluster and block, by counting: groups become ranges.

The sort is stable and has no atomics in what decides an order, so the same inputs always give the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.device_math import in_range
from muse_attention.backends.triton.numbers import cdiv, power_of_two
from muse_attention.backends.triton.prefix_sums import sum_before, sum_to_starts
from muse_attention.backends.triton.runtime.launching import kernel

_TOKENS = 128
"""Tokens of a block ranked together."""


@dataclass(frozen=True)
class Groups:
    """The rows of each of `S` sequences, sorted by the group they belong to."""

    order: Tensor
    """(S, L) int32: row numbers, group after group, ascending inside each; rows of no group come last"""
    starts: Tensor
    """(S, M + 1) int32: where each of `M` groups begins in `order`, and where the last one ends"""

    @property
    def number(self) -> int:
        return self.starts.shape[1] - 1

    def ranges(self) -> tuple[Tensor, Tensor]:
        """Where the groups begin and end in `order`: views of `starts`."""
        return self.starts[:, :-1], self.starts[:, 1:]


def group_by_cluster_and_block(
    assignment: Tensor, clusters: int, block_size: int, fill_in: Groups | None = None
) -> Groups:
    """Sort (S, N) tokens by cluster and then by position: group `cluster * nb + block` holds those of one block."""
    sequences, length = assignment.shape
    blocks = cdiv(length, block_size)
    tiles_of_block = cdiv(min(block_size, length), _TOKENS)
    tiles = blocks * tiles_of_block
    counts = assignment.new_empty(sequences, clusters, tiles)
    totals = assignment.new_empty(sequences, clusters)
    cluster_starts = assignment.new_empty(sequences, clusters + 1)
    found = fill_in or Groups(torch.empty_like(assignment), assignment.new_empty(sequences, clusters * blocks + 1))
    grid = (tiles_of_block, blocks, sequences)
    sizes = {"length": length, "block_size": block_size, "clusters": clusters, "TILE": _TOKENS}
    _count_clusters[grid](assignment_ptr=assignment, counts_ptr=counts, BINS=power_of_two(clusters + 1), **sizes)
    sum_before(counts, totals)
    sum_to_starts(totals, cluster_starts)
    _place_by_cluster[grid](
        assignment_ptr=assignment, counts_ptr=counts, cluster_starts_ptr=cluster_starts, order_ptr=found.order,
        starts_ptr=found.starts, STEP=32, CP=power_of_two(clusters), **sizes,
    )  # fmt: skip
    return found


@kernel(stage="sorting", do_not_specialize=["length", "block_size", "clusters"])
def _count_clusters(assignment_ptr, counts_ptr, length, block_size, clusters, TILE: tl.constexpr, BINS: tl.constexpr):
    """Count the tokens of each cluster in a tile of a block.

    Grid: (tiles of a block, nb, S). `assignment_ptr`: (S, N) int32; `counts_ptr`: (S, C, tiles) int32.
    """
    tile, block, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    offs_place = tile * TILE + tl.arange(0, TILE)  # [TILE]
    offs_row = block * block_size + offs_place  # [TILE]
    mask_row = (offs_place < block_size) & (offs_row < length)  # [TILE]
    cluster = tl.load(assignment_ptr + sequence * length + offs_row, mask=mask_row, other=0)  # [TILE]
    cluster = tl.where(mask_row, in_range(cluster, clusters), clusters)
    offs_cluster = tl.arange(0, BINS)
    tiles = tl.num_programs(0) * tl.num_programs(1)
    offs = (sequence * clusters + offs_cluster) * tiles + block * tl.num_programs(0) + tile  # [BINS]
    tl.store(counts_ptr + offs, tl.histogram(cluster, BINS), mask=offs_cluster < clusters)


@kernel(stage="sorting", do_not_specialize=["length", "block_size", "clusters"])
def _place_by_cluster(
    assignment_ptr, counts_ptr, cluster_starts_ptr, order_ptr, starts_ptr, length, block_size, clusters,
    TILE: tl.constexpr, STEP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Write each token of a tile where its cluster's tokens before it end.

    Grid: (tiles of a block, nb, S). `assignment_ptr`, `order_ptr`: (S, N) int32; `counts_ptr`: (S, C, tiles) int32, of
    the tiles before; `cluster_starts_ptr`: (S, C + 1) int32; `starts_ptr`: (S, C nb + 1) int32, which the first tile of
    a block fills in.
    """
    tile, block, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks, tiles = tl.num_programs(1), tl.num_programs(0) * tl.num_programs(1)
    assignment_ptr += sequence * length
    counts_ptr += sequence * clusters * tiles + block * tl.num_programs(0) + tile
    cluster_starts_ptr += sequence * (clusters + 1)
    offs_place = tile * TILE + tl.arange(0, TILE)  # [TILE]
    offs_row = block * block_size + offs_place  # [TILE]
    mask_row = (offs_place < block_size) & (offs_row < length)  # [TILE]
    cluster = in_range(tl.load(assignment_ptr + offs_row, mask=mask_row, other=0), clusters)  # [TILE]
    rank = tl.zeros([TILE], tl.int32)
    for begin in range(0, TILE, STEP):
        offs_other_place = tile * TILE + begin + tl.arange(0, STEP)  # [STEP]
        offs_other_row = block * block_size + offs_other_place  # [STEP]
        # (Those outside of the block come after all that are inside.)
        mask_other = (offs_other_place < block_size) & (offs_other_row < length)  # [STEP]
        other = in_range(tl.load(assignment_ptr + offs_other_row, mask=mask_other, other=0), clusters)  # [STEP]
        earlier = (other[None, :] == cluster[:, None]) & (offs_other_row[None, :] < offs_row[:, None])  # [TILE, STEP]
        rank += tl.sum(earlier.to(tl.int32), 1)
    start = tl.load(cluster_starts_ptr + cluster, mask=mask_row, other=0)  # [TILE]
    start += tl.load(counts_ptr + cluster * tiles, mask=mask_row, other=0)
    tl.store(order_ptr + sequence * length + start + rank, offs_row, mask=mask_row)
    if tile == 0:
        offs_cluster = tl.arange(0, CP)
        first = tl.load(cluster_starts_ptr + offs_cluster, mask=offs_cluster < clusters, other=0)  # [CP]
        first += tl.load(counts_ptr + offs_cluster * tiles, mask=offs_cluster < clusters, other=0)
        block_starts_ptr = starts_ptr + sequence * (clusters * blocks + 1)
        tl.store(block_starts_ptr + offs_cluster * blocks + block, first, mask=offs_cluster < clusters)
        if block == 0:
            tl.store(block_starts_ptr + clusters * blocks, length)
