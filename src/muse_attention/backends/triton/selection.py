"""Stage 4, first half, by the paper's rule: which clusters each query opens, and which blocks of them it retrieves."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from muse_attention.backends.triton.numbers import index_in_order, load_rows, padded
from muse_attention.backends.triton.opened import list_opened
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.segments import ROWS_OF_TILE, Segments, mass_off_centroid, score
from muse_attention.backends.triton.summaries import ScoredSummaries
from muse_attention.core.structures import Selection

SELECT_CLUSTERS = {"num_warps": 4}
_MOST_NUMBERS = 1 << 15
"""Numbers of the means of all key clusters that one product takes as a whole, both sizes padded to powers of two."""
_MOST_LOGITS = 1 << 14
"""Logits of all key clusters held on chip, if their means are too many."""
SELECT_BLOCKS = {"CLUSTERS": 16, "num_warps": 4, "num_stages": 1}


def select(segments: Segments, of_buckets: ScoredSummaries, seen: ScoredSummaries, fill_in: Selection) -> None:
    """The best clusters of each query by the summaries it sees, (H, N, clusters), and the best blocks in each, (H, N,
    clusters, blocks)."""
    opened, retrieved = fill_in.opened, fill_in.retrieved
    clusters, blocks = retrieved.shape[-2:]
    if clusters == 0:
        return
    tiles = segments.tiles
    where = (*tiles.parts(), segments.groups.order)
    launch = _launch_of_clusters(segments.key_clusters, segments.residuals.shape[-1])
    _select_clusters[(*tiles.grid, ROWS_OF_TILE // launch["ROWS"])](
        segments.residuals, segments.widths, *seen.tables_of_logits(), *where, opened, retrieved, clusters, blocks,
        *segments.sizes, IS_PACKED=segments.residuals.dtype in (torch.float16, torch.bfloat16), **segments.constants,
        **launch,
    )  # fmt: skip
    listed = list_opened(segments, opened)
    _select_blocks[tiles.grid](
        segments.residuals, segments.widths, *of_buckets.tables_of_logits(), *where, listed.listed, listed.number,
        opened, retrieved, clusters, blocks, *segments.sizes, ROWS=ROWS_OF_TILE, IS_SINGLE=blocks == 1,
        **segments.constants, **segments.few(SELECT_BLOCKS),
    )  # fmt: skip


def _launch_of_clusters(key_clusters: int, head_dim: int) -> dict[str, Any]:
    """All key clusters at once; if these are too many for the chip, then of fewer rows, and a slice of the dimensions
    after another."""
    every, width = padded(key_clusters), padded(head_dim)
    if every * width <= _MOST_NUMBERS:
        return {"CP": every, "SLICE": width, "ROWS": ROWS_OF_TILE, **SELECT_CLUSTERS}
    rows = max(16, min(ROWS_OF_TILE, _MOST_LOGITS // every))
    return {"CP": every, "SLICE": max(16, _MOST_NUMBERS // every), "ROWS": rows, "num_warps": 8, "num_stages": 1}


@triton.jit
def _score_in_slices(
    residuals, width, mass, key_mean, deviation, most, first_place, first, first_size, is_row, is_cluster,
    D: tl.constexpr, DP: tl.constexpr, SECOND_ORDER: tl.constexpr, ROWS: tl.constexpr, CP: tl.constexpr,
    SLICE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The logits of `score` against all summaries from `first` on, summed over slices of the dimensions."""
    place, cluster = tl.arange(0, ROWS), tl.arange(0, CP)
    logits = tl.zeros([ROWS, CP], ACC)
    for begin in range(0, DP, SLICE):
        dim = begin + tl.arange(0, SLICE)
        is_dim = (dim < D)[None, :]
        some = tl.load(
            residuals + first_place * D + place[:, None] * D + dim[None, :], mask=is_row[:, None] & is_dim, other=0.0
        )  # [ROWS, SLICE]
        means = tl.load(
            key_mean + first * D + cluster[:, None] * D + dim[None, :], mask=is_cluster[:, None] & is_dim, other=0.0
        )  # [CP, SLICE]
        logits = tl.dot(some, tl.trans(means), logits, input_precision=PRECISION, out_dtype=ACC)
    logits += tl.load(mass + first + cluster, mask=is_cluster, other=float("-inf"))[None, :]
    if SECOND_ORDER:
        deviations = tl.load(deviation + first + cluster, mask=is_cluster, other=0.0)
        mosts = tl.load(most + first_size + cluster, mask=is_cluster, other=0.0)
        logits += mass_off_centroid(width[:, None] * deviations[None, :], mosts[None, :])
    return logits


@kernel(do_not_specialize=["opened_clusters", "retrieved_blocks", "length", "blocks", "query_clusters"])
def _select_clusters(
    residuals, widths, seen_mass, seen_key_mean, seen_deviation, seen_most, tile_group, tile_begin, tile_end, order,
    opened, retrieved, opened_clusters, retrieved_blocks, length, blocks, query_clusters, key_clusters,
    D: tl.constexpr, DP: tl.constexpr, IS_CAUSAL: tl.constexpr, SECOND_ORDER: tl.constexpr, ROWS: tl.constexpr,
    CP: tl.constexpr, SLICE: tl.constexpr, IS_PACKED: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    tile = head * tl.num_programs(0) + tl.program_id(0)
    segment = tl.load(tile_group + tile)
    if segment < 0:
        return
    begin = tl.load(tile_begin + tile) + tl.program_id(2) * ROWS
    place = tl.arange(0, ROWS)
    rows = tl.load(tile_end + tile) - begin
    if rows <= 0:
        return
    is_row = place < rows
    first_place = head * length + begin
    row = tl.load(order + first_place + place, mask=is_row, other=0)
    cluster = tl.arange(0, CP)
    is_cluster = cluster < key_clusters
    of_block = ((head * query_clusters + segment // blocks) * blocks + segment % blocks) * key_clusters
    # (Block 0 of causal attention sees nothing: its masses are all -inf.)
    width = tl.load(widths + first_place + place, mask=is_row, other=0.0) if SECOND_ORDER else 0.0
    of_sizes = (head * blocks + segment % blocks) * key_clusters
    if SLICE == DP:
        residual = load_rows(residuals, first_place, place, is_row, D, DP)
        _, logits = score(
            residual, width, seen_mass, seen_key_mean, seen_deviation, seen_most, of_block, of_sizes, cluster,
            is_cluster, D, DP, SECOND_ORDER, ACC, PRECISION,
        )  # fmt: skip
    else:
        logits = _score_in_slices(
            residuals, width, seen_mass, seen_key_mean, seen_deviation, seen_most, first_place, of_block, of_sizes,
            is_row, is_cluster, D, DP, SECOND_ORDER, ROWS, CP, SLICE, ACC, PRECISION,
        )  # fmt: skip
    opened += head * length * opened_clusters
    retrieved += head * length * opened_clusters * retrieved_blocks
    exists = is_row[:, None] & (logits > float("-inf"))
    filled = tl.zeros([ROWS], tl.int32)
    if IS_PACKED:
        absent: tl.constexpr = -(2**31)
        keys = tl.where(exists, index_in_order(logits, CP), absent)
        for number in range(opened_clusters):
            best = tl.max(keys, 1)
            found = tl.where(best == absent, -1, CP - 1 - (best & (CP - 1)))
            keys = tl.where(keys == best[:, None], absent, keys)
            filled += (found >= 0).to(tl.int32)
            tl.store(opened + row * opened_clusters + number, found, mask=is_row)
    else:
        logits = tl.where(exists, logits, float("-inf"))
        for number in range(opened_clusters):
            best, index = tl.max(logits, 1, return_indices=True)
            found = tl.where(best == float("-inf"), -1, index)
            logits = tl.where(cluster[None, :] == found[:, None], float("-inf"), logits)
            filled += (found >= 0).to(tl.int32)
            tl.store(opened + row * opened_clusters + number, found, mask=is_row)
    # What finds nothing to open retrieves nothing.
    if tl.min(tl.where(is_row, filled, opened_clusters), 0) < opened_clusters:
        for number in range(opened_clusters * retrieved_blocks):
            tl.store(
                retrieved + row * opened_clusters * retrieved_blocks + number, tl.full([ROWS], -1, tl.int32),
                mask=is_row & (number >= filled * retrieved_blocks),
            )  # fmt: skip


@kernel(do_not_specialize=["opened_clusters", "retrieved_blocks", "length", "blocks", "query_clusters"])
def _select_blocks(
    residuals, widths, mass, key_mean, deviation, most, tile_group, tile_begin, tile_end, order, listed, listed_number,
    opened, retrieved, opened_clusters, retrieved_blocks, length, blocks, query_clusters, key_clusters,
    D: tl.constexpr, DP: tl.constexpr, IS_CAUSAL: tl.constexpr, SECOND_ORDER: tl.constexpr, IS_SINGLE: tl.constexpr,
    ROWS: tl.constexpr, CLUSTERS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For each opened cluster the best blocks, one after another."""
    head = tl.program_id(1).to(tl.int64)
    tile = head * tl.num_programs(0) + tl.program_id(0)
    segment = tl.load(tile_group + tile)
    if segment < 0:
        return
    begin = tl.load(tile_begin + tile)
    place = tl.arange(0, ROWS)
    is_row = place < tl.load(tile_end + tile) - begin
    first_place = head * length + begin
    row = tl.load(order + first_place + place, mask=is_row, other=0)
    own_block = segment % blocks
    seen_blocks = own_block if IS_CAUSAL else blocks
    if seen_blocks == 0:
        return
    residual = load_rows(residuals, first_place, place, is_row, D, DP)
    width = tl.load(widths + first_place + place, mask=is_row, other=0.0) if SECOND_ORDER else 0.0
    line = head * query_clusters + segment // blocks
    of_cluster = line * blocks * key_clusters
    listed_here = tl.load(listed_number + line)
    listed += line * key_clusters
    opened += head * length * opened_clusters
    retrieved += head * length * opened_clusters * retrieved_blocks
    for first in range(0, listed_here, CLUSTERS):
        index = first + tl.arange(0, CLUSTERS)
        is_cluster = index < listed_here
        cluster = tl.load(listed + index, mask=is_cluster, other=-1)
        slot = tl.full([ROWS, CLUSTERS], -1, tl.int32)
        for number in range(opened_clusters):
            own = tl.load(opened + row * opened_clusters + number, mask=is_row, other=-2)
            slot = tl.where(own[:, None] == cluster[None, :], number, slot)
        slot = tl.where(is_cluster[None, :], slot, -1)
        cluster = tl.maximum(cluster, 0)
        last_score = tl.full([ROWS, CLUSTERS], float("inf"), ACC)
        last_block = tl.full([ROWS, CLUSTERS], -1, tl.int32)
        for number in range(retrieved_blocks):
            best = tl.full([ROWS, CLUSTERS], float("-inf"), ACC)
            found = tl.full([ROWS, CLUSTERS], -1, tl.int32)
            for block in range(seen_blocks):
                of_block = of_cluster + block * key_clusters
                _, logits = score(
                    residual, width, mass, key_mean, deviation, most, of_block, (head * blocks + block) * key_clusters,
                    cluster, is_cluster, D, DP, SECOND_ORDER, ACC, PRECISION,
                )  # fmt: skip
                if not IS_CAUSAL:
                    logits = tl.where(own_block == block, float("-inf"), logits)
                # Those that come after the last one found: with a lower score, or later with the same.
                better = logits > best
                if not IS_SINGLE:
                    better &= (logits < last_score) | ((logits == last_score) & (last_block < block))
                best = tl.where(better, logits, best)
                found = tl.where(better, block, found)
            tl.store(
                retrieved + (row[:, None] * opened_clusters + slot) * retrieved_blocks + number, found,
                mask=is_row[:, None] & (slot >= 0),
            )  # fmt: skip
            last_score = tl.where(found < 0, float("-inf"), best)
            last_block = tl.where(found < 0, blocks, found)
