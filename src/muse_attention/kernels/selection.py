"""Stage 4: score the summaries, select what to retrieve, and attend to the summaries of all the rest.

Which summaries are terms of a query's softmax is a table of words, one for each query and key cluster: `CLOSED` if the
cluster was not opened (its accumulated summary is a term), else a bit for each block that was not retrieved (the
block's own summary is a term). With that table, attention to summaries is attention to a few dense keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.kernels.grouping import Groups, Tiles
from muse_attention.kernels.numbers import arithmetic, padded
from muse_attention.precision import compute_dtype
from muse_attention.structures import Partial, Selection, Summaries

ROWS_OF_TILE = 64
"""Queries of one segment that one program works on."""
_CLUSTERS = 64
"""Key clusters scored at a time, once what to open is known."""


@dataclass(frozen=True)
class Segments:
    """The queries of each (block, query cluster), of all heads."""

    residuals: Tensor
    """(H, N, D), in the order of `groups`"""
    groups: Groups
    tiles: Tiles
    blocks: int
    query_clusters: int
    key_clusters: int
    is_causal: bool

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.residuals.shape[1], self.blocks, self.query_clusters, self.key_clusters

    @property
    def constants(self) -> dict[str, Any]:
        head_dim = self.residuals.shape[-1]
        return {
            "D": head_dim,
            "DP": padded(head_dim),
            "IS_CAUSAL": self.is_causal,
            "ROWS": ROWS_OF_TILE,
            **arithmetic(self.residuals.dtype),
        }

    @property
    def clusters_at_once(self) -> int:
        return min(_CLUSTERS, padded(self.key_clusters))


@dataclass(frozen=True)
class Terms:
    """Which summaries each query attends to."""

    words: Tensor
    """(H, planes, N, K), rows in the order of the segments"""
    blocks_of_word: int

    @property
    def constants(self) -> dict[str, Any]:
        return {"PLANES": self.words.shape[1], "WORD": self.blocks_of_word}


def select(segments: Segments, of_buckets: Summaries, seen: Summaries, clusters: int, blocks: int) -> Selection:
    """The `clusters` best clusters of each query by the summaries it sees, and the `blocks` best blocks in each."""
    heads, length, _ = segments.residuals.shape
    opened = segments.groups.order.new_empty(heads, length, clusters)
    retrieved = segments.groups.order.new_empty(heads, length, clusters, blocks)
    slots = torch.empty(
        heads, length, segments.key_clusters, dtype=torch.int8 if clusters < 128 else torch.int16, device=opened.device
    )
    tiles = segments.tiles
    where = (tiles.group, tiles.begin, tiles.end, segments.groups.order)
    all_clusters = padded(segments.key_clusters)
    _select_clusters[tiles.grid](
        segments.residuals, seen.log_mass, seen.key_mean, *where, slots, opened, clusters, *segments.sizes,
        CP=all_clusters, IS_PACKED=segments.residuals.dtype in (torch.float16, torch.bfloat16), **segments.constants,
        num_warps=4 if all_clusters <= 128 else 8,
    )  # fmt: skip
    _select_blocks[tiles.grid](
        segments.residuals, of_buckets.log_mass, of_buckets.key_mean, *where, slots, retrieved, clusters, blocks,
        *segments.sizes, CLUSTERS=segments.clusters_at_once, **segments.constants,
    )  # fmt: skip
    return Selection(opened, retrieved)


def find_terms(segments: Segments, selection: Selection) -> Terms:
    heads, length, clusters, blocks = selection.retrieved.shape
    dtype, of_word = next(
        (dtype, bits)
        for dtype, bits in ((torch.int8, 8), (torch.int16, 16), (torch.int32, 32), (torch.int64, 32))
        if segments.blocks <= bits or dtype == torch.int64
    )
    planes = triton.cdiv(segments.blocks, of_word)
    words = torch.empty(heads, planes, length, segments.key_clusters, dtype=dtype, device=selection.opened.device)
    columns = segments.clusters_at_once
    grid = (triton.cdiv(length, ROWS_OF_TILE), triton.cdiv(segments.key_clusters, columns), heads * planes)
    _mark_terms[grid](
        segments.groups.order, selection.opened, selection.retrieved, words, length, segments.key_clusters, clusters,
        blocks, ROWS=ROWS_OF_TILE, CLUSTERS=columns, PLANES=planes, WORD=of_word,
    )  # fmt: skip
    return Terms(words, of_word)


def attend(segments: Segments, of_buckets: Summaries, seen: Summaries, terms: Terms) -> Partial:
    """Attention to the summary terms: (H, N, Dv) and (H, N), in the order of the inputs."""
    heads, length, _ = segments.residuals.shape
    value_dim = seen.value_mean.shape[-1]
    wide = compute_dtype(segments.residuals.dtype)
    partial = Partial(
        segments.residuals.new_empty(heads, length, value_dim, dtype=wide),
        segments.residuals.new_empty(heads, length, dtype=wide),
    )
    tiles = segments.tiles
    _attend[tiles.grid](
        segments.residuals, *of_buckets.parts(), *seen.parts(), tiles.group, tiles.begin, tiles.end,
        segments.groups.order, terms.words, partial.out, partial.lse, *segments.sizes, DV=value_dim,
        DVP=padded(value_dim), CLUSTERS=segments.clusters_at_once, **terms.constants, **segments.constants,
    )  # fmt: skip
    return partial


def attend_backward(
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    segments: Segments,
    of_buckets: Summaries,
    seen: Summaries,
    terms: Terms,
    *,
    fill_in: tuple[Summaries, Summaries],
) -> Tensor:
    """Gradients of the queries, (H, N, D) in the order of the inputs, and of both kinds of summaries in `fill_in`.

    `grad_out` (H, N, Dv), `lse` and `delta` (H, N) are in the order of the segments, and those of the merged softmax.
    """
    heads, length, head_dim = segments.residuals.shape
    value_dim = seen.value_mean.shape[-1]
    grad_queries = segments.residuals.new_empty(heads, length, head_dim, dtype=compute_dtype(segments.residuals.dtype))
    tiles = segments.tiles
    constants = {
        "DV": value_dim, "DVP": padded(value_dim), "CLUSTERS": segments.clusters_at_once, **terms.constants,
        **segments.constants,
    }  # fmt: skip
    _attend_backward_to_queries[tiles.grid](
        grad_out, lse, delta, segments.residuals, *of_buckets.parts(), *seen.parts(), tiles.group, tiles.begin,
        tiles.end, segments.groups.order, terms.words, grad_queries, *segments.sizes, **constants,
    )  # fmt: skip
    grid = (
        triton.cdiv(segments.key_clusters, segments.clusters_at_once),
        segments.query_clusters * segments.blocks,
        heads,
    )
    for is_seen, summaries, gradient in ((False, of_buckets, fill_in[0]), (True, seen, fill_in[1])):
        _attend_backward_to_summaries[grid](
            grad_out, lse, delta, segments.residuals, *summaries.parts(), segments.groups.starts, terms.words,
            *gradient.parts(), *segments.sizes, IS_SEEN=is_seen, **constants,
        )  # fmt: skip
    return grad_queries


@triton.jit
def _load_summaries(table, entry, is_cluster, X: tl.constexpr, XP: tl.constexpr):
    column = tl.arange(0, XP)
    return tl.load(
        table + entry[:, None] * X + column[None, :], mask=is_cluster[:, None] & (column < X)[None, :], other=0.0
    )


@triton.jit
def _load_rows(table, place, is_row, X: tl.constexpr, XP: tl.constexpr):
    column = tl.arange(0, XP)
    return tl.load(table + place[:, None] * X + column[None, :], mask=is_row[:, None] & (column < X)[None, :], other=0.0)


@triton.jit(
    do_not_specialize=["opened_clusters", "length", "blocks", "query_clusters"]
)
def _select_clusters(
    residuals, seen_mass, seen_key_mean, tile_group, tile_begin, tile_end, order, slots, opened, opened_clusters,
    length, blocks, query_clusters, key_clusters, D: tl.constexpr, DP: tl.constexpr, IS_CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, CP: tl.constexpr, IS_PACKED: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    tile = head * tl.num_programs(0) + tl.program_id(0)
    segment = tl.load(tile_group + tile)
    if segment < 0:
        return
    begin = tl.load(tile_begin + tile)
    place = begin + tl.arange(0, ROWS)
    is_row = place < tl.load(tile_end + tile)
    place = head * length + place
    row = head * length + tl.load(order + place, mask=is_row, other=0)
    cluster = tl.arange(0, CP)
    is_cluster = cluster < key_clusters
    entry = ((head * query_clusters + segment % query_clusters) * blocks + segment // query_clusters) * key_clusters
    entry += cluster
    residual = _load_rows(residuals, place, is_row, D, DP)
    means = _load_summaries(seen_key_mean, entry, is_cluster, D, DP)
    # Block 0 of causal attention sees nothing: its masses are all -inf.
    mass = tl.load(seen_mass + entry, mask=is_cluster, other=float("-inf"))
    logits = tl.dot(residual, tl.trans(means), input_precision=PRECISION, out_dtype=ACC) + mass[None, :]
    slot = tl.full([ROWS, CP], -1, tl.int32)
    if IS_PACKED:
        # An integer that orders like the logit, with the index in its low bits: its maximum is also the argmax.
        bits = logits.to(tl.int32, bitcast=True)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        bits = (bits & -CP) | (CP - 1 - cluster)[None, :]
        absent: tl.constexpr = -(2**31)
        bits = tl.where(logits > float("-inf"), bits, absent)
        for number in range(opened_clusters):
            best = tl.max(bits, 1)
            found = tl.where(best == absent, -1, CP - 1 - (best & (CP - 1)))
            is_best = cluster[None, :] == found[:, None]
            bits = tl.where(is_best, absent, bits)
            slot = tl.where(is_best, number, slot)
            tl.store(opened + row * opened_clusters + number, found, mask=is_row)
    else:
        logits = tl.where(logits == logits, logits, float("-inf"))
        for number in range(opened_clusters):
            best, index = tl.max(logits, 1, return_indices=True)
            found = tl.where(best == float("-inf"), -1, index)
            is_best = cluster[None, :] == found[:, None]
            logits = tl.where(is_best, float("-inf"), logits)
            slot = tl.where(is_best, number, slot)
            tl.store(opened + row * opened_clusters + number, found, mask=is_row)
    tl.store(slots + place[:, None] * key_clusters + cluster[None, :], slot, mask=is_row[:, None] & is_cluster[None, :])


@triton.jit(
    do_not_specialize=["opened_clusters", "retrieved_blocks", "length", "blocks", "query_clusters"]
)
def _select_blocks(
    residuals, mass, key_mean, tile_group, tile_begin, tile_end, order, slots, retrieved, opened_clusters,
    retrieved_blocks, length, blocks, query_clusters, key_clusters, D: tl.constexpr, DP: tl.constexpr,
    IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, CLUSTERS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    tile = head * tl.num_programs(0) + tl.program_id(0)
    segment = tl.load(tile_group + tile)
    if segment < 0:
        return
    begin = tl.load(tile_begin + tile)
    place = begin + tl.arange(0, ROWS)
    is_row = place < tl.load(tile_end + tile)
    place = head * length + place
    row = head * length + tl.load(order + place, mask=is_row, other=0)
    own_block = segment // query_clusters
    seen_blocks = own_block if IS_CAUSAL else blocks
    residual = _load_rows(residuals, place, is_row, D, DP)
    # What finds nothing to open retrieves nothing.
    per_row = opened_clusters * retrieved_blocks
    is_causal_start = seen_blocks == 0
    if is_causal_start:
        for number in range(per_row):
            tl.store(retrieved + row * per_row + number, -1, mask=is_row)
        return
    for first in range(0, key_clusters, CLUSTERS):
        cluster = first + tl.arange(0, CLUSTERS)
        is_cluster = cluster < key_clusters
        slot = tl.load(
            slots + place[:, None] * key_clusters + cluster[None, :], mask=is_row[:, None] & is_cluster[None, :],
            other=-1,
        ).to(tl.int32)  # fmt: skip
        entry = (head * query_clusters + segment % query_clusters) * blocks * key_clusters + cluster
        last_score = tl.full([ROWS, CLUSTERS], float("inf"), ACC)
        last_block = tl.full([ROWS, CLUSTERS], -1, tl.int32)
        for number in range(retrieved_blocks):
            best = tl.full([ROWS, CLUSTERS], float("-inf"), ACC)
            found = tl.full([ROWS, CLUSTERS], -1, tl.int32)
            for block in range(seen_blocks):
                at = entry + block * key_clusters
                means = _load_summaries(key_mean, at, is_cluster, D, DP)
                masses = tl.load(mass + at, mask=is_cluster, other=float("-inf"))
                if not IS_CAUSAL:
                    masses = tl.where(own_block == block, float("-inf"), masses)
                logits = tl.dot(residual, tl.trans(means), input_precision=PRECISION, out_dtype=ACC) + masses[None, :]
                # Those that come after the last one found: with a lower score, or later with the same.
                better = (logits > best) & (
                    (logits < last_score) | ((logits == last_score) & (last_block < block))
                )
                best = tl.where(better, logits, best)
                found = tl.where(better, block, found)
            tl.store(
                retrieved + (row[:, None] * opened_clusters + slot) * retrieved_blocks + number, found,
                mask=is_row[:, None] & (slot >= 0),
            )  # fmt: skip
            last_score = tl.where(found < 0, float("-inf"), best)
            last_block = tl.where(found < 0, blocks, found)
    # Places of `opened` that stayed empty.
    filled = tl.zeros([ROWS], tl.int32)
    for first in range(0, key_clusters, CLUSTERS):
        cluster = first + tl.arange(0, CLUSTERS)
        inside = is_row[:, None] & (cluster < key_clusters)[None, :]
        slot = tl.load(slots + place[:, None] * key_clusters + cluster[None, :], mask=inside, other=-1).to(tl.int32)
        filled += tl.sum((slot >= 0).to(tl.int32), 1)
    if tl.min(tl.where(is_row, filled, opened_clusters), 0) < opened_clusters:
        for number in range(per_row):
            empty = is_row & (number >= filled * retrieved_blocks)
            tl.store(retrieved + row * per_row + number, tl.full([ROWS], -1, tl.int32), mask=empty)


@triton.jit(do_not_specialize=["length", "opened_clusters", "retrieved_blocks"])
def _mark_terms(
    order, opened, retrieved, words, length, key_clusters, opened_clusters, retrieved_blocks, ROWS: tl.constexpr,
    CLUSTERS: tl.constexpr, PLANES: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    head, plane = tl.program_id(2).to(tl.int64) // PLANES, tl.program_id(2) % PLANES
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cluster = tl.program_id(1) * CLUSTERS + tl.arange(0, CLUSTERS)
    is_row = place < length
    row = head * length + tl.load(order + head * length + place, mask=is_row, other=0)
    word = tl.full([ROWS, CLUSTERS], -1, words.dtype.element_ty)
    for number in range(opened_clusters):
        is_open = tl.load(opened + row * opened_clusters + number, mask=is_row, other=-1)
        kept = tl.full([ROWS], -1, tl.int64)
        for other in range(retrieved_blocks):
            block = tl.load(
                retrieved + (row * opened_clusters + number) * retrieved_blocks + other, mask=is_row, other=-1
            )
            bit = block - plane * WORD
            one = tl.full([ROWS], 1, tl.int64) << tl.where((bit >= 0) & (bit < WORD), bit, 0)
            kept = kept & ~tl.where((bit >= 0) & (bit < WORD), one, 0)
        if PLANES > 1:
            kept = kept & 0xFFFFFFFF
        word = tl.where(is_open[:, None] == cluster[None, :], kept.to(word.dtype)[:, None], word)
    at = (tl.program_id(2).to(tl.int64) * length + place)[:, None] * key_clusters + cluster[None, :]
    tl.store(words + at, word, mask=is_row[:, None] & (cluster < key_clusters)[None, :])


@triton.jit
def _load_words(
    words, head, plane, place, is_row, cluster, length, key_clusters, PLANES: tl.constexpr
):
    """`place` counts from the beginning of the head."""
    at = ((head * PLANES + plane) * length + place)[:, None] * key_clusters + cluster[None, :]
    return tl.load(words + at, mask=is_row[:, None] & (cluster < key_clusters)[None, :], other=-1)


@triton.jit
def _is_block_term(word, block, WORD: tl.constexpr):
    """Whether the summary of a block is a term: its cluster is open, and the block was not retrieved."""
    return (word != -1) & (((word >> (block % WORD)) & 1) != 0)


@triton.jit
def _include(logits, values, largest, total, weighted, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """Terms into the running softmax."""
    larger = tl.maximum(largest, tl.max(logits, 1))
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    weights = tl.exp(logits - shift[:, None])
    kept = tl.exp(largest - shift)
    total = total * kept + tl.sum(weights, 1)
    weighted = tl.dot(
        weights.to(values.dtype), values, weighted * kept[:, None], input_precision=PRECISION, out_dtype=ACC
    )
    return larger, total, weighted


@triton.jit(do_not_specialize=["length", "blocks", "query_clusters"])
def _attend(
    residuals, mass, key_mean, value_mean, seen_mass, seen_key_mean, seen_value_mean, tile_group, tile_begin, tile_end,
    order, words, out, lse, length, blocks, query_clusters, key_clusters, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, CLUSTERS: tl.constexpr,
    PLANES: tl.constexpr, WORD: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    tile = head * tl.num_programs(0) + tl.program_id(0)
    segment = tl.load(tile_group + tile)
    if segment < 0:
        return
    place = tl.load(tile_begin + tile) + tl.arange(0, ROWS)
    is_row = place < tl.load(tile_end + tile)
    own_block = segment // query_clusters
    seen_blocks = own_block if IS_CAUSAL else blocks
    residual = _load_rows(residuals, head * length + place, is_row, D, DP)
    of_cluster = (head * query_clusters + segment % query_clusters) * blocks * key_clusters
    largest = tl.full([ROWS], float("-inf"), ACC)
    total = tl.zeros([ROWS], ACC)
    weighted = tl.zeros([ROWS, DVP], ACC)
    if seen_blocks > 0:
        for first in range(0, key_clusters, CLUSTERS):
            cluster = first + tl.arange(0, CLUSTERS)
            is_cluster = cluster < key_clusters
            word = _load_words(words, head, 0, place, is_row, cluster, length, key_clusters, PLANES)
            at = of_cluster + own_block * key_clusters + cluster
            means = _load_summaries(seen_key_mean, at, is_cluster, D, DP)
            masses = tl.load(seen_mass + at, mask=is_cluster, other=float("-inf"))
            logits = tl.dot(residual, tl.trans(means), input_precision=PRECISION, out_dtype=ACC) + masses[None, :]
            logits = tl.where(word == -1, logits, float("-inf"))
            values = _load_summaries(seen_value_mean, at, is_cluster, DV, DVP)
            largest, total, weighted = _include(logits, values, largest, total, weighted, ACC, PRECISION)
            if tl.max((word != -1).to(tl.int32)) > 0:
                for block in range(seen_blocks):
                    if PLANES > 1:
                        word = _load_words(
                            words, head, block // WORD, place, is_row, cluster, length, key_clusters, PLANES
                        )
                    at = of_cluster + block * key_clusters + cluster
                    means = _load_summaries(key_mean, at, is_cluster, D, DP)
                    masses = tl.load(mass + at, mask=is_cluster, other=float("-inf"))
                    if not IS_CAUSAL:
                        masses = tl.where(own_block == block, float("-inf"), masses)
                    logits = tl.dot(residual, tl.trans(means), input_precision=PRECISION, out_dtype=ACC)
                    logits += masses[None, :]
                    logits = tl.where(_is_block_term(word, block, WORD), logits, float("-inf"))
                    values = _load_summaries(value_mean, at, is_cluster, DV, DVP)
                    largest, total, weighted = _include(logits, values, largest, total, weighted, ACC, PRECISION)
    row = head * length + tl.load(order + head * length + place, mask=is_row, other=0)
    value_dim = tl.arange(0, DVP)
    nothing = total == 0
    weighted /= tl.where(nothing, 1.0, total)[:, None]
    log_total = tl.where(nothing, float("-inf"), largest + tl.log(total))
    tl.store(
        out + row[:, None] * DV + value_dim[None, :], weighted, mask=is_row[:, None] & (value_dim < DV)[None, :]
    )
    tl.store(lse + row, log_total, mask=is_row)


@triton.jit
def _differentiate(logits, grad_out, values, lse, delta, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """Weights of the terms in the merged softmax, and the gradients of their logits."""
    weights = tl.exp(tl.minimum(logits - lse[:, None], 0.0))
    response = tl.dot(grad_out, tl.trans(values), input_precision=PRECISION, out_dtype=ACC)
    return weights, weights * (response - delta[:, None])


@triton.jit(do_not_specialize=["length", "blocks", "query_clusters"])
def _attend_backward_to_queries(
    grad_out, lse, delta, residuals, mass, key_mean, value_mean, seen_mass, seen_key_mean, seen_value_mean, tile_group,
    tile_begin, tile_end, order, words, grad_queries, length, blocks, query_clusters, key_clusters, D: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr,
    CLUSTERS: tl.constexpr, PLANES: tl.constexpr, WORD: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    tile = head * tl.num_programs(0) + tl.program_id(0)
    segment = tl.load(tile_group + tile)
    if segment < 0:
        return
    place = tl.load(tile_begin + tile) + tl.arange(0, ROWS)
    is_row = place < tl.load(tile_end + tile)
    own_block = segment // query_clusters
    seen_blocks = own_block if IS_CAUSAL else blocks
    of_cluster = (head * query_clusters + segment % query_clusters) * blocks * key_clusters
    gradient = tl.zeros([ROWS, DP], ACC)
    if seen_blocks > 0:
        residual = _load_rows(residuals, head * length + place, is_row, D, DP)
        some_grad = _load_rows(grad_out, head * length + place, is_row, DV, DVP)
        row_lse = tl.load(lse + head * length + place, mask=is_row, other=float("inf"))
        row_delta = tl.load(delta + head * length + place, mask=is_row, other=0.0)
        for first in range(0, key_clusters, CLUSTERS):
            cluster = first + tl.arange(0, CLUSTERS)
            is_cluster = cluster < key_clusters
            word = _load_words(words, head, 0, place, is_row, cluster, length, key_clusters, PLANES)
            at = of_cluster + own_block * key_clusters + cluster
            means = _load_summaries(seen_key_mean, at, is_cluster, D, DP)
            masses = tl.load(seen_mass + at, mask=is_cluster, other=float("-inf"))
            logits = tl.dot(residual, tl.trans(means), input_precision=PRECISION, out_dtype=ACC) + masses[None, :]
            logits = tl.where(word == -1, logits, float("-inf"))
            values = _load_summaries(seen_value_mean, at, is_cluster, DV, DVP)
            _, d_logits = _differentiate(logits, some_grad, values, row_lse, row_delta, ACC, PRECISION)
            gradient = tl.dot(d_logits.to(means.dtype), means, gradient, input_precision=PRECISION, out_dtype=ACC)
            if tl.max((word != -1).to(tl.int32)) > 0:
                for block in range(seen_blocks):
                    if PLANES > 1:
                        word = _load_words(
                            words, head, block // WORD, place, is_row, cluster, length, key_clusters, PLANES
                        )
                    at = of_cluster + block * key_clusters + cluster
                    means = _load_summaries(key_mean, at, is_cluster, D, DP)
                    masses = tl.load(mass + at, mask=is_cluster, other=float("-inf"))
                    if not IS_CAUSAL:
                        masses = tl.where(own_block == block, float("-inf"), masses)
                    logits = tl.dot(residual, tl.trans(means), input_precision=PRECISION, out_dtype=ACC)
                    logits += masses[None, :]
                    logits = tl.where(_is_block_term(word, block, WORD), logits, float("-inf"))
                    values = _load_summaries(value_mean, at, is_cluster, DV, DVP)
                    _, d_logits = _differentiate(logits, some_grad, values, row_lse, row_delta, ACC, PRECISION)
                    gradient = tl.dot(
                        d_logits.to(means.dtype), means, gradient, input_precision=PRECISION, out_dtype=ACC
                    )
    row = head * length + tl.load(order + head * length + place, mask=is_row, other=0)
    dim = tl.arange(0, DP)
    tl.store(grad_queries + row[:, None] * D + dim[None, :], gradient, mask=is_row[:, None] & (dim < D)[None, :])


@triton.jit(do_not_specialize=["length", "blocks", "query_clusters"])
def _attend_backward_to_summaries(
    grad_out, lse, delta, residuals, mass, key_mean, value_mean, starts, words, grad_mass, grad_key_mean,
    grad_value_mean, length, blocks, query_clusters, key_clusters, IS_SEEN: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr,
    CLUSTERS: tl.constexpr, PLANES: tl.constexpr, WORD: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of some summaries of one block, what they receive from all queries of their query cluster that see them.

    Accumulated summaries are seen by the queries of their own block, a block's summaries by those of other blocks.
    """
    head = tl.program_id(2).to(tl.int64)
    block, query_cluster = tl.program_id(1) // query_clusters, tl.program_id(1) % query_clusters
    cluster = tl.program_id(0) * CLUSTERS + tl.arange(0, CLUSTERS)
    is_cluster = cluster < key_clusters
    at = ((head * query_clusters + query_cluster) * blocks + block) * key_clusters + cluster
    means = _load_summaries(key_mean, at, is_cluster, D, DP)
    values = _load_summaries(value_mean, at, is_cluster, DV, DVP)
    masses = tl.load(mass + at, mask=is_cluster, other=float("-inf"))
    d_mass = tl.zeros([CLUSTERS], ACC)
    d_means = tl.zeros([CLUSTERS, DP], ACC)
    d_values = tl.zeros([CLUSTERS, DVP], ACC)
    if IS_SEEN:
        first_block, last_block = block, block + 1
    elif IS_CAUSAL:
        first_block, last_block = block + 1, blocks
    else:
        first_block, last_block = 0, blocks
    starts += head * (blocks * query_clusters + 1) + query_cluster
    for from_block in range(first_block, last_block):
        begin_of_segment = tl.load(starts + from_block * query_clusters)
        end_of_segment = tl.load(starts + from_block * query_clusters + 1)
        if (not IS_SEEN) and (not IS_CAUSAL):
            end_of_segment = tl.where(block == from_block, begin_of_segment, end_of_segment)
        for begin in range(begin_of_segment, end_of_segment, ROWS):
            place = begin + tl.arange(0, ROWS)
            is_row = place < end_of_segment
            plane = 0 if IS_SEEN else block // WORD
            word = _load_words(words, head, plane, place, is_row, cluster, length, key_clusters, PLANES)
            is_term = word == -1 if IS_SEEN else _is_block_term(word, block, WORD)
            residual = _load_rows(residuals, head * length + place, is_row, D, DP)
            some_grad = _load_rows(grad_out, head * length + place, is_row, DV, DVP)
            row_lse = tl.load(lse + head * length + place, mask=is_row, other=float("inf"))
            row_delta = tl.load(delta + head * length + place, mask=is_row, other=0.0)
            logits = tl.dot(residual, tl.trans(means), input_precision=PRECISION, out_dtype=ACC) + masses[None, :]
            logits = tl.where(is_term, logits, float("-inf"))
            weights, d_logits = _differentiate(logits, some_grad, values, row_lse, row_delta, ACC, PRECISION)
            d_mass += tl.sum(d_logits, 0)
            d_means = tl.dot(
                tl.trans(d_logits.to(residual.dtype)), residual, d_means, input_precision=PRECISION, out_dtype=ACC
            )
            d_values = tl.dot(
                tl.trans(weights.to(some_grad.dtype)), some_grad, d_values, input_precision=PRECISION, out_dtype=ACC
            )
    dim, value_dim = tl.arange(0, DP), tl.arange(0, DVP)
    tl.store(grad_mass + at, d_mass, mask=is_cluster)
    tl.store(
        grad_key_mean + at[:, None] * D + dim[None, :], d_means, mask=is_cluster[:, None] & (dim < D)[None, :]
    )
    tl.store(
        grad_value_mean + at[:, None] * DV + value_dim[None, :], d_values,
        mask=is_cluster[:, None] & (value_dim < DV)[None, :],
    )  # fmt: skip
