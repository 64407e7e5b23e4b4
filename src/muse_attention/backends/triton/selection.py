"""Stage 4, first half: which clusters each query opens, and which blocks of them it retrieves."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from muse_attention.backends.triton.bucket_summaries import pointers_of_logits
from muse_attention.backends.triton.device_functions import add_dot, index_in_order, load_rows
from muse_attention.backends.triton.numbers import padded
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.segments import ROWS_OF_TILE, Segments, blocks_of_segment, score
from muse_attention.backends.triton.term_bits import list_opened
from muse_attention.backends.triton.tiles import load_places_from_begin, load_tile
from muse_attention.core.structures import Selection, Summaries

SELECT_CLUSTERS = {"num_warps": 4}
_MOST_NUMBERS = 1 << 15
"""Largest padded size of the means of all key clusters that one product takes as a whole."""
_MOST_LOGITS = 1 << 14
"""Logits held on chip if the means are larger than that."""
SELECT_BLOCKS = {"CLUSTERS": 16, "num_warps": 4, "num_stages": 1}


def select(segments: Segments, bucket_summaries: Summaries, seen: Summaries, fill_in: Selection) -> None:
    """Write the best clusters of each query by the summaries it sees, (H, N, clusters), and the best blocks in each,
    (H, N, clusters, blocks)."""
    opened, retrieved = fill_in.opened, fill_in.retrieved
    clusters, blocks = retrieved.shape[-2:]
    if clusters == 0:
        return
    tiles = segments.tiles
    picks = {"opened_ptr": opened, "retrieved_ptr": retrieved, "opened_clusters": clusters, "retrieved_blocks": blocks}
    launch = _cluster_launch(segments.key_clusters, segments.residuals.shape[-1])
    _select_clusters[(*tiles.grid, ROWS_OF_TILE // launch["ROWS"])](
        **segments.queries, **pointers_of_logits(seen, "seen_"), **segments.rows, **picks,
        IS_PACKED=segments.residuals.dtype in (torch.float16, torch.bfloat16), **launch,
    )  # fmt: skip
    listed = list_opened(segments, opened)
    _select_blocks[tiles.grid](
        **segments.queries, **pointers_of_logits(bucket_summaries), **segments.rows, **listed.arguments, **picks,
        ROWS=ROWS_OF_TILE, IS_SINGLE=blocks == 1, **segments.clamped_to_clusters(SELECT_BLOCKS),
    )  # fmt: skip


def _cluster_launch(key_clusters: int, head_dim: int) -> dict[str, Any]:
    """All key clusters at once. If they do not fit on chip: fewer rows, and the dimensions slice by slice."""
    clusters, width = padded(key_clusters), padded(head_dim)
    if clusters * width <= _MOST_NUMBERS:
        return {"CP": clusters, "SLICE": width, "ROWS": ROWS_OF_TILE, **SELECT_CLUSTERS}
    rows = max(16, min(ROWS_OF_TILE, _MOST_LOGITS // clusters))
    return {"CP": clusters, "SLICE": max(16, _MOST_NUMBERS // clusters), "ROWS": rows, "num_warps": 8, "num_stages": 1}


@triton.jit
def _score_in_slices(
    residuals_ptr, mass_ptr, key_mean_ptr, first_place, first, mask_row, mask_cluster, D: tl.constexpr,
    ROWS: tl.constexpr, CP: tl.constexpr, SLICE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """[ROWS, CP]: the logits of `score` against all summaries from `first` on, summed over slices of the dimensions."""
    offs_place, offs_cluster = tl.arange(0, ROWS), tl.arange(0, CP)  # [ROWS], [CP]
    logits = tl.zeros([ROWS, CP], ACC)
    for begin in range(0, padded(D), SLICE):
        offs_d = begin + tl.arange(0, SLICE)  # [SLICE]
        mask_d = (offs_d < D)[None, :]  # [1, SLICE]
        ptrs = residuals_ptr + first_place * D + offs_place[:, None] * D + offs_d[None, :]  # [ROWS, SLICE]
        residual = tl.load(ptrs, mask=mask_row[:, None] & mask_d, other=0.0)  # [ROWS, SLICE]
        ptrs = key_mean_ptr + first * D + offs_cluster[:, None] * D + offs_d[None, :]  # [CP, SLICE]
        means = tl.load(ptrs, mask=mask_cluster[:, None] & mask_d, other=0.0)  # [CP, SLICE]
        logits = add_dot(residual, tl.trans(means), logits)
    return logits + tl.load(mass_ptr + first + offs_cluster, mask=mask_cluster, other=float("-inf"))[None, :]


@kernel(
    stage="selection", do_not_specialize=["opened_clusters", "retrieved_blocks", "length", "blocks", "query_clusters"]
)
def _select_clusters(
    residuals_ptr, seen_mass_ptr, seen_key_mean_ptr, tile_group_ptr, tile_begin_ptr, tile_end_ptr, order_ptr,
    opened_ptr, retrieved_ptr, opened_clusters, retrieved_blocks, length, blocks, query_clusters, key_clusters,
    D: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, CP: tl.constexpr, SLICE: tl.constexpr,
    IS_PACKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The best clusters of each query of a segment's tile, one by one, by the summaries it sees.

    Grid: that of the segments' tiles, and parts of a tile of `ROWS` queries. `residuals_ptr`: (H, N, D), in the order
    of the segments; `seen_mass_ptr`: (H, Q, nb, K); `seen_key_mean_ptr`: (H, Q, nb, K, D); `order_ptr`: (H, N) int32;
    `opened_ptr`: (H, N, opened clusters) int32; `retrieved_ptr`: (H, N, opened clusters, retrieved blocks) int32,
    filled in only where nothing is opened.
    """
    head, tile, segment = load_tile(tile_group_ptr)
    if segment < 0:
        return
    begin = tl.load(tile_begin_ptr + tile) + tl.program_id(2) * ROWS
    offs_place = tl.arange(0, ROWS)
    rows = tl.load(tile_end_ptr + tile) - begin
    if rows <= 0:
        return
    mask_row = offs_place < rows  # [ROWS]
    first_place = head * length + begin
    offs_row = tl.load(order_ptr + first_place + offs_place, mask=mask_row, other=0)  # [ROWS]
    offs_cluster = tl.arange(0, CP)
    mask_cluster = offs_cluster < key_clusters  # [CP]
    block_base = ((head * query_clusters + segment // blocks) * blocks + segment % blocks) * key_clusters
    # (Block 0 of causal attention sees nothing: its masses are all -inf.)
    if SLICE == padded(D):
        residual = load_rows(residuals_ptr, first_place, offs_place, mask_row, D)  # [ROWS, D]
        # [CP, D], [ROWS, CP]
        _, logits = score(residual, seen_mass_ptr, seen_key_mean_ptr, block_base, offs_cluster, mask_cluster, D, ACC)
    else:
        logits = _score_in_slices(
            residuals_ptr, seen_mass_ptr, seen_key_mean_ptr, first_place, block_base, mask_row, mask_cluster, D, ROWS,
            CP, SLICE, ACC,
        )  # fmt: skip
    opened_ptr += head * length * opened_clusters
    retrieved_ptr += head * length * opened_clusters * retrieved_blocks
    mask = mask_row[:, None] & (logits > float("-inf"))  # [ROWS, CP]
    filled = tl.zeros([ROWS], tl.int32)
    absent: tl.constexpr = -(2**31) if IS_PACKED else float("-inf")
    scores = tl.where(mask, index_in_order(logits, CP) if IS_PACKED else logits, absent)  # [ROWS, CP]
    for number in range(opened_clusters):
        if IS_PACKED:
            best = tl.max(scores, 1)  # [ROWS]
            chosen = tl.where(best == absent, -1, CP - 1 - (best & (CP - 1)))  # [ROWS]
            scores = tl.where(scores == best[:, None], absent, scores)
        else:
            best, index = tl.max(scores, 1, return_indices=True)  # [ROWS], [ROWS]
            chosen = tl.where(best == absent, -1, index)  # [ROWS]
            scores = tl.where(offs_cluster[None, :] == chosen[:, None], absent, scores)
        filled += (chosen >= 0).to(tl.int32)
        tl.store(opened_ptr + offs_row * opened_clusters + number, chosen, mask=mask_row)
    # A slot without an opened cluster retrieves nothing.
    if tl.min(tl.where(mask_row, filled, opened_clusters), 0) < opened_clusters:
        for number in range(opened_clusters * retrieved_blocks):
            tl.store(
                retrieved_ptr + offs_row * opened_clusters * retrieved_blocks + number, tl.full([ROWS], -1, tl.int32),
                mask=mask_row & (number >= filled * retrieved_blocks),
            )  # fmt: skip


@kernel(
    stage="selection", do_not_specialize=["opened_clusters", "retrieved_blocks", "length", "blocks", "query_clusters"]
)
def _select_blocks(
    residuals_ptr, mass_ptr, key_mean_ptr, tile_group_ptr, tile_begin_ptr, tile_end_ptr, order_ptr, listed_ptr,
    listed_number_ptr, opened_ptr, retrieved_ptr, opened_clusters, retrieved_blocks, length, blocks, query_clusters,
    key_clusters, D: tl.constexpr, IS_CAUSAL: tl.constexpr, IS_SINGLE: tl.constexpr, ROWS: tl.constexpr,
    CLUSTERS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The best blocks of each opened cluster, one by one.

    Grid: that of the segments' tiles. `mass_ptr`: (H, Q, nb, K); `key_mean_ptr`: (H, Q, nb, K, D); `listed_ptr`:
    (H, Q, K) int32; `listed_number_ptr`: (H, Q) int32; the others as in `_select_clusters`, with all of
    `retrieved_ptr` filled in where something is opened.
    """
    head, tile, segment = load_tile(tile_group_ptr)
    if segment < 0:
        return
    # scalar, [ROWS], [ROWS]
    begin, offs_place, mask_row = load_places_from_begin(tile_begin_ptr, tile_end_ptr, tile, ROWS)
    first_place = head * length + begin
    offs_row = tl.load(order_ptr + first_place + offs_place, mask=mask_row, other=0)  # [ROWS]
    own_block, seen_blocks = blocks_of_segment(segment, blocks, IS_CAUSAL)
    if seen_blocks == 0:
        return
    residual = load_rows(residuals_ptr, first_place, offs_place, mask_row, D)  # [ROWS, D]
    cluster_index = head * query_clusters + segment // blocks
    cluster_base = cluster_index * blocks * key_clusters
    listed_number = tl.load(listed_number_ptr + cluster_index)
    listed_ptr += cluster_index * key_clusters
    opened_ptr += head * length * opened_clusters
    retrieved_ptr += head * length * opened_clusters * retrieved_blocks
    for first in range(0, listed_number, CLUSTERS):
        offs_listed = first + tl.arange(0, CLUSTERS)  # [CLUSTERS]
        mask_cluster = offs_listed < listed_number  # [CLUSTERS]
        offs_cluster = tl.load(listed_ptr + offs_listed, mask=mask_cluster, other=-1)  # [CLUSTERS]
        slot = tl.full([ROWS, CLUSTERS], -1, tl.int32)
        for number in range(opened_clusters):
            cluster = tl.load(opened_ptr + offs_row * opened_clusters + number, mask=mask_row, other=-2)  # [ROWS]
            slot = tl.where(cluster[:, None] == offs_cluster[None, :], number, slot)
        slot = tl.where(mask_cluster[None, :], slot, -1)
        offs_cluster = tl.maximum(offs_cluster, 0)
        last_score = tl.full([ROWS, CLUSTERS], float("inf"), ACC)
        last_block = tl.full([ROWS, CLUSTERS], -1, tl.int32)
        for number in range(retrieved_blocks):
            best = tl.full([ROWS, CLUSTERS], float("-inf"), ACC)
            chosen = tl.full([ROWS, CLUSTERS], -1, tl.int32)
            for block in range(seen_blocks):
                block_base = cluster_base + block * key_clusters
                # [CLUSTERS, D], [ROWS, CLUSTERS]
                _, logits = score(residual, mass_ptr, key_mean_ptr, block_base, offs_cluster, mask_cluster, D, ACC)
                if not IS_CAUSAL:
                    logits = tl.where(own_block == block, float("-inf"), logits)
                # Only what ranks after the last choice: a lower score, or an equal one further on.
                better = logits > best  # [ROWS, CLUSTERS]
                if not IS_SINGLE:
                    better &= (logits < last_score) | ((logits == last_score) & (last_block < block))
                best = tl.where(better, logits, best)
                chosen = tl.where(better, block, chosen)
            tl.store(
                retrieved_ptr + (offs_row[:, None] * opened_clusters + slot) * retrieved_blocks + number, chosen,
                mask=mask_row[:, None] & (slot >= 0),
            )  # fmt: skip
            last_score = tl.where(chosen < 0, float("-inf"), best)
            last_block = tl.where(chosen < 0, blocks, chosen)
