"""Stage 4, second half: attention to the summaries of all that a selection leaves.

Which summaries are terms of a query's softmax is a table of bits: one for each cluster that it did not open, whose
accumulated summary is a term, and one for each listed cluster and block, if it opened the cluster but did not retrieve
the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.filling import fill
from muse_attention.backends.triton.key_offset import QueryGradients
from muse_attention.backends.triton.numbers import (
    cdiv,
    count_bits,
    exp_of_less,
    gradient_dtype,
    load_rows,
    lowest_bit,
    padded,
    power_of_two,
    store_rows,
)
from muse_attention.backends.triton.opened import OpenedClusters
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.segments import ROWS_OF_TILE, Segments, include, mass_off_centroid, score
from muse_attention.backends.triton.summaries import ScoredSummaries
from muse_attention.core.bits import number_of_words
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Partial, Selection, Summaries

ATTEND = {
    128: {"CLUSTERS": 64, "COLUMNS": 32, "num_warps": 4, "num_stages": 3},
    256: {"CLUSTERS": 64, "COLUMNS": 32, "num_warps": 4, "num_stages": 3},
    512: {"CLUSTERS": 32, "COLUMNS": 16, "num_warps": 4, "num_stages": 1},
}
ATTEND_BACKWARD_TO_QUERIES = {
    128: {"CLUSTERS": 32, "COLUMNS": 32, "num_warps": 4, "num_stages": 2, "maxnreg": 96},
    256: {"CLUSTERS": 64, "COLUMNS": 32, "num_warps": 4, "num_stages": 2},
    512: {"CLUSTERS": 32, "COLUMNS": 16, "num_warps": 4, "num_stages": 1},
}
ATTEND_BACKWARD_TO_SEEN = {
    128: {"CLUSTERS": 64, "ROWS": 32, "num_warps": 4, "num_stages": 3},
    256: {"CLUSTERS": 64, "ROWS": 32, "num_warps": 4, "num_stages": 1},
    512: {"CLUSTERS": 32, "ROWS": 16, "num_warps": 4, "num_stages": 1},
}
ATTEND_BACKWARD_TO_BLOCKS = {
    128: {"CLUSTERS": 32, "ROWS": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 168},
    256: {"CLUSTERS": 32, "ROWS": 128, "num_warps": 8, "num_stages": 2},
    512: {"CLUSTERS": 32, "ROWS": 16, "num_warps": 4, "num_stages": 1},
}


@dataclass(frozen=True)
class Terms:
    """Which summaries each query attends to, in bits. Rows are in the order of the segments."""

    clusters: Tensor
    """(H, words, N) int32: a bit for each key cluster"""
    blocks: Tensor
    """(H, nb, words, N) int32: a bit for each listed cluster"""
    opened: OpenedClusters


def find_terms_of_bits(segments: Segments, selection: Selection, listed: OpenedClusters) -> Terms:
    """The terms that a selection by tolerance leaves; `listed` is `list_opened_bits` of it."""
    heads, length, words = selection.opened.shape
    terms = Terms(
        selection.opened.new_empty(heads, words, length),
        fill(selection.opened.new_empty(heads, segments.blocks, words, length), 0),
        listed,
    )
    _mark_terms_of_bits[segments.tiles.grid](
        *segments.tiles.parts(), segments.groups.order, selection.opened, selection.retrieved, listed.place,
        terms.clusters, terms.blocks, *segments.sizes, WORDS=words, BLOCKS=power_of_two(segments.blocks),
        IS_CAUSAL=segments.is_causal, ROWS=ROWS_OF_TILE,
    )  # fmt: skip
    return terms


def find_terms(segments: Segments, selection: Selection, listed: OpenedClusters) -> Terms:
    """The terms that a selection by the paper's rule leaves; `listed` is `list_opened` of it."""
    heads, length, clusters, blocks = selection.retrieved.shape
    words = number_of_words(segments.key_clusters)
    terms = Terms(
        selection.opened.new_empty(heads, words, length),
        selection.opened.new_empty(heads, segments.blocks, words, length),
        listed,
    )
    _mark_terms[segments.tiles.grid](
        *segments.tiles.parts(), segments.groups.order, selection.opened, selection.retrieved, listed.place,
        terms.clusters, terms.blocks, *segments.sizes, OPENED=clusters, OP=max(1, power_of_two(clusters)),
        RETRIEVED=blocks, WORDS=words, IS_CAUSAL=segments.is_causal, ROWS=ROWS_OF_TILE,
    )  # fmt: skip
    return terms


def attend(segments: Segments, of_buckets: ScoredSummaries, seen: ScoredSummaries, terms: Terms) -> Partial:
    """Attention to the summary terms: (H, N, Dv) and (H, N), in the order of the inputs."""
    heads, length, _ = segments.residuals.shape
    value_dim = seen.value_mean.shape[-1]
    wide = compute_dtype(segments.residuals.dtype)
    partial = Partial(
        segments.residuals.new_empty(heads, length, value_dim),
        segments.residuals.new_empty(heads, length, dtype=wide),
    )
    tiles = segments.tiles
    _attend_to_summaries[tiles.grid](
        segments.residuals, segments.shift, segments.widths, *of_buckets.tables(), *seen.tables(), *tiles.parts(),
        segments.groups.order, terms.clusters, terms.blocks, terms.opened.listed, terms.opened.number, partial.out,
        partial.lse, *segments.sizes, terms.clusters.shape[1], DV=value_dim, DVP=padded(value_dim), ROWS=ROWS_OF_TILE,
        **segments.constants, **segments.fit(ATTEND, value_dim),
    )  # fmt: skip
    return partial


def attend_backward(
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    segments: Segments,
    of_buckets: ScoredSummaries,
    seen: ScoredSummaries,
    terms: Terms,
    *,
    fill_in: tuple[Summaries, Summaries],
) -> QueryGradients:
    """Gradients of the queries, (H, N) in the order of the inputs, and of both kinds of summaries in `fill_in`.

    Of the blocks' summaries only those of opened clusters have gradients; the rest is not written.

    `grad_out` (H, N, Dv), `lse` and `delta` (H, N) are in the order of the segments, and those of the merged softmax;
    `lse` is less the `shift` of the segments. The gradient of a log-mass is taken at fixed sums instead of fixed means.
    """
    heads, length, head_dim = segments.residuals.shape
    value_dim = seen.value_mean.shape[-1]
    to_queries = QueryGradients(
        segments.residuals.new_empty(heads, length, head_dim, dtype=gradient_dtype(segments.residuals.dtype)),
        torch.empty_like(lse),
    )
    tiles = segments.tiles
    words = terms.clusters.shape[1]
    constants = {"DV": value_dim, "DVP": padded(value_dim), **segments.constants}
    _summaries_backward_to_queries[tiles.grid](
        grad_out, lse, delta, segments.residuals, segments.widths, *of_buckets.tables(), *seen.tables(), *tiles.parts(),
        segments.groups.order, terms.clusters, terms.blocks, terms.opened.listed, terms.opened.number,
        to_queries.centred, to_queries.of_offset, *segments.sizes, words, ROWS=ROWS_OF_TILE, **constants,
        **segments.fit(ATTEND_BACKWARD_TO_QUERIES, value_dim),
    )  # fmt: skip
    for is_seen, summaries, gradient, launches, bits in (
        (False, of_buckets, fill_in[0], ATTEND_BACKWARD_TO_BLOCKS, terms.blocks),
        (True, seen, fill_in[1], ATTEND_BACKWARD_TO_SEEN, terms.clusters),
    ):
        launch = segments.fit(launches, value_dim)
        columns, at_once = (launch["CLUSTERS"], 1) if is_seen else (launch["CLUSTERS"] // 2, 2)
        # (The first axis of a grid alone may have more than 65,535 programs.)
        grid = (
            segments.query_clusters * cdiv(segments.blocks, at_once),
            cdiv(segments.key_clusters, columns),
            heads,
        )
        _backward_to_summaries[grid](
            grad_out, lse, delta, segments.residuals, segments.widths, *summaries.tables(), segments.groups.starts,
            bits, terms.opened.listed, terms.opened.number, *gradient.parts(), *segments.sizes, words, IS_SEEN=is_seen,
            **constants, **launch,
        )  # fmt: skip
    return to_queries


@triton.jit
def _words_of_clusters(bits, place, is_row, first, length, words, COLUMNS: tl.constexpr):
    """The words behind `COLUMNS` (up to 64) key clusters from `first` on, which begin a word or lie in one.

    `bits` points to the first word of the first row.
    """
    bits += first // 32 * length
    low = tl.load(bits + place, mask=is_row, other=0)
    high = low
    if COLUMNS > 32:
        has_high = place * 0 + first // 32 + 1 < words
        high = tl.load(bits + length + place, mask=is_row & has_high, other=0)
    return low, high


@triton.jit
def _words_of_blocks(bits, place, last_row, own_begin, own_end, next_end, block, blocks, first, length, words):
    """The words behind the listed clusters from `first` on, of two neighbouring blocks, for queries of other blocks.

    `block` lies from `own_begin` to `own_end`, the one after it ends at `next_end`; `bits` points to the first word of
    the first row in `block`.
    """
    is_row = place < last_row
    of_first = is_row & ((place < own_begin) | (place >= own_end))
    of_second = is_row & ((place < own_end) | (place >= next_end)) & (place * 0 + block + 1 < blocks)
    bits += first // 32 * length
    low = tl.load(bits + place, mask=of_first, other=0)
    high = tl.load(bits + words * length + place, mask=of_second, other=0)
    return low, high


@triton.jit
def _is_term(bits, block, index, is_summary, place, is_row, length, words):
    """(rows, columns): whether the summary of the listed cluster `index` in a `block` is a term of a query.

    `bits` points to the first word of the first row and block.
    """
    of_column = (block * words + index // 32).to(tl.int64) * length
    inside = is_row[:, None] & is_summary[None, :]
    word = tl.load(bits + place[:, None] + of_column[None, :], mask=inside, other=0)
    return ((word >> (index & 31)[None, :]) & 1) != 0


@triton.jit
def _any(numbers):
    """Whether any is not zero."""
    return tl.max(tl.ravel((numbers != 0).to(tl.int32)), 0) > 0


@triton.jit
def _bit_of_row(low, high, first, COLUMNS: tl.constexpr):
    """(rows, columns): whether a bit is set. The first 32 columns are bits of `low`, the others of `high`."""
    column = tl.arange(0, COLUMNS)
    if COLUMNS > 32:
        word = tl.where((column < 32)[None, :], low[:, None], high[:, None])
    else:
        word = low[:, None]
    return ((word >> ((first + column) & 31)[None, :]) & 1) != 0


@triton.jit
def _bit_of_column(low, high, first, COLUMNS: tl.constexpr, OF_LOW: tl.constexpr):
    """(columns, rows): the same, transposed, with the first `OF_LOW` columns for `low`."""
    column = tl.arange(0, COLUMNS)
    if COLUMNS > OF_LOW:
        word = tl.where((column < OF_LOW)[:, None], low[None, :], high[None, :])
    else:
        word = low[None, :]
    return ((word >> ((first + column % OF_LOW) & 31)[:, None]) & 1) != 0


@kernel(do_not_specialize=["length", "blocks", "query_clusters", "key_clusters"])
def _mark_terms(
    tile_group, tile_begin, tile_end, order, opened, retrieved, listed_place, of_clusters, of_blocks, length, blocks,
    query_clusters, key_clusters, OPENED: tl.constexpr, OP: tl.constexpr, RETRIEVED: tl.constexpr, WORDS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    tile = head * tl.num_programs(0) + tl.program_id(0)
    segment = tl.load(tile_group + tile)
    if segment < 0:
        return
    begin = tl.load(tile_begin + tile)
    place, number = tl.arange(0, ROWS), tl.arange(0, OP)
    is_row = place < tl.load(tile_end + tile) - begin
    first_place = head * length + begin
    own_block = segment % blocks
    seen_blocks = own_block if IS_CAUSAL else blocks
    if seen_blocks == 0:
        return
    row = tl.load(order + first_place + place, mask=is_row, other=0)
    inside = is_row[:, None] & (number < OPENED)[None, :]
    slot = row[:, None] * OPENED + number[None, :]
    cluster = tl.load(opened + head * length * OPENED + slot, mask=inside, other=-1)
    listed_place += (head * query_clusters + segment // blocks) * key_clusters
    listed = tl.load(listed_place + cluster, mask=cluster >= 0, other=-1).to(tl.int32)
    # No cluster is opened twice, so the sum of bits is their union.
    bit = tl.where(cluster < 0, 0, 1 << (cluster & 31))
    for word in tl.static_range(WORDS):
        is_open = tl.sum(tl.where((cluster >> 5) == word, bit, 0), 1)
        tl.store(of_clusters + (head * WORDS + word) * length + begin + place, ~is_open, mask=is_row)
    bit = tl.where(listed < 0, 0, 1 << (listed & 31))
    retrieved += head * length * OPENED * RETRIEVED
    first = tl.load(retrieved + slot * RETRIEVED, mask=inside, other=-1)
    for block in range(seen_blocks):
        kept = tl.where(first == block, 0, bit)
        for other in range(1, RETRIEVED):
            one_more = tl.load(retrieved + slot * RETRIEVED + other, mask=inside, other=-1)
            kept = tl.where(one_more == block, 0, kept)
        for word in tl.static_range(WORDS):
            terms = tl.sum(tl.where((listed >> 5) == word, kept, 0), 1)
            at = ((head * blocks + block) * WORDS + word) * length + begin
            tl.store(of_blocks + at + place, terms, mask=is_row)


@kernel(do_not_specialize=["length", "blocks", "query_clusters", "key_clusters"])
def _mark_terms_of_bits(
    tile_group, tile_begin, tile_end, order, opened, retrieved, listed_place, of_clusters, of_blocks, length, blocks,
    query_clusters, key_clusters, WORDS: tl.constexpr, BLOCKS: tl.constexpr, IS_CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Every opened cluster of a query, one after another, in all blocks at once. `of_blocks` is 0 before."""
    head = tl.program_id(1).to(tl.int64)
    tile = head * tl.num_programs(0) + tl.program_id(0)
    segment = tl.load(tile_group + tile)
    if segment < 0:
        return
    begin = tl.load(tile_begin + tile)
    place, block = tl.arange(0, ROWS), tl.arange(0, BLOCKS)
    is_row = place < tl.load(tile_end + tile) - begin
    own_block = segment % blocks
    seen_blocks = own_block if IS_CAUSAL else blocks
    if seen_blocks == 0:
        return
    row = tl.load(order + head * length + begin + place, mask=is_row, other=0)
    opened += (head * length + row) * WORDS
    retrieved += (head * length + row)[:, None] * blocks * WORDS + block[None, :] * WORDS
    listed_place += (head * query_clusters + segment // blocks) * key_clusters
    of_blocks += head * blocks * WORDS * length + begin
    for word in tl.static_range(WORDS):
        own = tl.load(opened + word, mask=is_row, other=0)
        tl.store(of_clusters + (head * WORDS + word) * length + begin + place, ~own, mask=is_row)
        if tl.max((own != 0).to(tl.int32), 0) > 0:
            inside = (own != 0)[:, None] & (block < seen_blocks)[None, :]
            not_retrieved = ~tl.load(retrieved + word, mask=inside, other=-1)
            for _ in range(tl.max(count_bits(own), 0)):
                has_bit = own != 0
                bit, own = lowest_bit(own)
                listed = tl.load(listed_place + word * 32 + bit, mask=has_bit, other=0).to(tl.int32)
                is_term = inside & has_bit[:, None] & (((not_retrieved >> (bit & 31)[:, None]) & 1) != 0)
                at = (block[None, :] * WORDS + (listed // 32)[:, None]) * length + place[:, None]
                value = ((place * 0 + 1) << (listed & 31))[:, None] + (block * 0)[None, :]
                tl.atomic_or(of_blocks + at, value, mask=is_term, sem="relaxed")


@kernel(do_not_specialize=["length", "blocks", "query_clusters"])
def _attend_to_summaries(
    residuals, shifts, widths, mass, key_mean, value_mean, deviation, most, seen_mass, seen_key_mean, seen_value_mean,
    seen_deviation, seen_most, tile_group, tile_begin, tile_end, order, cluster_terms, block_terms, listed,
    listed_number, out, lse, length, blocks, query_clusters, key_clusters, words, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, IS_CAUSAL: tl.constexpr, SECOND_ORDER: tl.constexpr, ROWS: tl.constexpr,
    CLUSTERS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    tile = head * tl.num_programs(0) + tl.program_id(0)
    segment = tl.load(tile_group + tile)
    if segment < 0:
        return
    begin = tl.load(tile_begin + tile)
    place = tl.arange(0, ROWS)
    is_row = place < tl.load(tile_end + tile) - begin
    first_place = head * length + begin
    own_block = segment % blocks
    seen_blocks = own_block if IS_CAUSAL else blocks
    line = head * query_clusters + segment // blocks
    of_cluster = line * blocks * key_clusters
    of_sizes = head * blocks * key_clusters
    largest = tl.full([ROWS], float("-inf"), ACC)
    total = tl.zeros([ROWS], ACC)
    weighted = tl.zeros([ROWS, DVP], ACC)
    if seen_blocks > 0:
        residual = load_rows(residuals, first_place, place, is_row, D, DP)
        width = tl.load(widths + first_place + place, mask=is_row, other=0.0) if SECOND_ORDER else 0.0
        for first in range(0, key_clusters, CLUSTERS):
            cluster = first + tl.arange(0, CLUSTERS)
            is_cluster = cluster < key_clusters
            bits = cluster_terms + head * words * length + begin
            low, high = _words_of_clusters(bits, place, is_row, first, length, words, CLUSTERS)
            of_block = of_cluster + own_block * key_clusters
            _, logits = score(
                residual, width, seen_mass, seen_key_mean, seen_deviation, seen_most, of_block,
                of_sizes + own_block * key_clusters, cluster, is_cluster, D, DP, SECOND_ORDER, ACC, PRECISION,
            )  # fmt: skip
            logits = tl.where(_bit_of_row(low, high, first, CLUSTERS), logits, float("-inf"))
            values = load_rows(seen_value_mean, of_block, cluster, is_cluster, DV, DVP)
            largest, total, weighted = include(logits, values, largest, total, weighted, ACC, PRECISION)
        listed_here = tl.load(listed_number + line)
        listed += line * key_clusters
        column = tl.arange(0, COLUMNS)
        summaries = listed_here * seen_blocks
        for first in range(0, summaries, COLUMNS):
            block, index = (first + column) // listed_here, (first + column) % listed_here
            is_summary = first + column < summaries
            if not IS_CAUSAL:
                is_summary &= block != own_block
            is_term = _is_term(
                block_terms + head * blocks * words * length + begin, block, index, is_summary, place, is_row, length,
                words,
            )  # fmt: skip
            if _any(is_term):
                summary = block * key_clusters + tl.load(listed + index, mask=is_summary, other=0)
                _, logits = score(
                    residual, width, mass, key_mean, deviation, most, of_cluster, of_sizes, summary, is_summary, D, DP,
                    SECOND_ORDER, ACC, PRECISION,
                )  # fmt: skip
                logits = tl.where(is_term, logits, float("-inf"))
                values = load_rows(value_mean, of_cluster, summary, is_summary, DV, DVP)
                largest, total, weighted = include(logits, values, largest, total, weighted, ACC, PRECISION)
    row = tl.load(order + first_place + place, mask=is_row, other=0)
    nothing = total == 0
    weighted /= tl.where(nothing, 1.0, total)[:, None]
    shift = tl.load(shifts + first_place + place, mask=is_row, other=0.0)
    log_total = tl.where(nothing, float("-inf"), largest + tl.log(total) + shift)
    store_rows(out, head * length, row, is_row, weighted, DV, DVP)
    tl.store(lse + head * length + row, log_total, mask=is_row)


@triton.jit
def _gradient_of_logits(logits, grad_out, values, lse, delta, ACC: tl.constexpr, PRECISION: tl.constexpr):
    weights = exp_of_less(logits, lse[:, None])
    response = tl.dot(grad_out, tl.trans(values), input_precision=PRECISION, out_dtype=ACC)
    return weights * (response - delta[:, None])


@kernel(do_not_specialize=["length", "blocks", "query_clusters"])
def _summaries_backward_to_queries(
    grad_out, lse, delta, residuals, widths, mass, key_mean, value_mean, deviation, most, seen_mass, seen_key_mean,
    seen_value_mean, seen_deviation, seen_most, tile_group, tile_begin, tile_end, order, cluster_terms, block_terms,
    listed, listed_number, grad_queries, grad_shift, length, blocks, query_clusters, key_clusters, words,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, IS_CAUSAL: tl.constexpr,
    SECOND_ORDER: tl.constexpr, ROWS: tl.constexpr, CLUSTERS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    tile = head * tl.num_programs(0) + tl.program_id(0)
    segment = tl.load(tile_group + tile)
    if segment < 0:
        return
    begin = tl.load(tile_begin + tile)
    place = tl.arange(0, ROWS)
    is_row = place < tl.load(tile_end + tile) - begin
    first_place = head * length + begin
    own_block = segment % blocks
    seen_blocks = own_block if IS_CAUSAL else blocks
    line = head * query_clusters + segment // blocks
    of_cluster = line * blocks * key_clusters
    of_sizes = head * blocks * key_clusters
    gradient = tl.zeros([ROWS, DP], ACC)
    d_shift = tl.zeros([ROWS], ACC)
    if seen_blocks > 0:
        residual = load_rows(residuals, first_place, place, is_row, D, DP)
        width = tl.load(widths + first_place + place, mask=is_row, other=0.0) if SECOND_ORDER else 0.0
        some_grad = load_rows(grad_out, first_place, place, is_row, DV, DVP)
        row_lse = tl.load(lse + first_place + place, mask=is_row, other=float("inf"))
        row_delta = tl.load(delta + first_place + place, mask=is_row, other=0.0)
        for first in range(0, key_clusters, CLUSTERS):
            cluster = first + tl.arange(0, CLUSTERS)
            is_cluster = cluster < key_clusters
            bits = cluster_terms + head * words * length + begin
            low, high = _words_of_clusters(bits, place, is_row, first, length, words, CLUSTERS)
            of_block = of_cluster + own_block * key_clusters
            means, logits = score(
                residual, width, seen_mass, seen_key_mean, seen_deviation, seen_most, of_block,
                of_sizes + own_block * key_clusters, cluster, is_cluster, D, DP, SECOND_ORDER, ACC, PRECISION,
            )  # fmt: skip
            logits = tl.where(_bit_of_row(low, high, first, CLUSTERS), logits, float("-inf"))
            values = load_rows(seen_value_mean, of_block, cluster, is_cluster, DV, DVP)
            d_logits = _gradient_of_logits(logits, some_grad, values, row_lse, row_delta, ACC, PRECISION)
            d_shift += tl.sum(d_logits, 1)
            gradient = tl.dot(d_logits.to(means.dtype), means, gradient, input_precision=PRECISION, out_dtype=ACC)
        listed_here = tl.load(listed_number + line)
        listed += line * key_clusters
        column = tl.arange(0, COLUMNS)
        summaries = listed_here * seen_blocks
        for first in range(0, summaries, COLUMNS):
            block, index = (first + column) // listed_here, (first + column) % listed_here
            is_summary = first + column < summaries
            if not IS_CAUSAL:
                is_summary &= block != own_block
            is_term = _is_term(
                block_terms + head * blocks * words * length + begin, block, index, is_summary, place, is_row, length,
                words,
            )  # fmt: skip
            if _any(is_term):
                summary = block * key_clusters + tl.load(listed + index, mask=is_summary, other=0)
                means, logits = score(
                    residual, width, mass, key_mean, deviation, most, of_cluster, of_sizes, summary, is_summary, D, DP,
                    SECOND_ORDER, ACC, PRECISION,
                )  # fmt: skip
                logits = tl.where(is_term, logits, float("-inf"))
                values = load_rows(value_mean, of_cluster, summary, is_summary, DV, DVP)
                d_logits = _gradient_of_logits(logits, some_grad, values, row_lse, row_delta, ACC, PRECISION)
                d_shift += tl.sum(d_logits, 1)
                gradient = tl.dot(d_logits.to(means.dtype), means, gradient, input_precision=PRECISION, out_dtype=ACC)
    row = tl.load(order + first_place + place, mask=is_row, other=0)
    store_rows(grad_queries, head * length, row, is_row, gradient, D, DP)
    tl.store(grad_shift + head * length + row, d_shift, mask=is_row)


@kernel(do_not_specialize=["length", "blocks", "query_clusters"])
def _backward_to_summaries(
    grad_out, lse, delta, residuals, widths, mass, key_mean, value_mean, deviation, most, starts, terms, listed,
    listed_number, grad_mass, grad_key_mean, grad_value_mean, length, blocks, query_clusters, key_clusters, words,
    IS_SEEN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    IS_CAUSAL: tl.constexpr, SECOND_ORDER: tl.constexpr, ROWS: tl.constexpr, CLUSTERS: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of some summaries, what they receive from all queries of their query cluster that see them.

    Accumulated summaries of a block are seen by the queries of that block. Summaries of a block itself are seen by the
    queries of later blocks, or of all other blocks, if any of these opens their cluster: of few clusters, so a program
    takes those of two neighbouring blocks. The queries of a cluster lie block after block.
    """
    head = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, CLUSTERS)
    of_low: tl.constexpr = 32 if IS_SEEN else CLUSTERS // 2
    if IS_SEEN:
        query_cluster, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
        # (The first block of causal attention sees nothing.)
        if IS_CAUSAL and block == 0:
            return
        first = tl.program_id(1) * CLUSTERS
        line = head * query_clusters + query_cluster
        cluster = first + column
        is_cluster = cluster < key_clusters
    else:
        twos = (blocks + 1) // 2
        query_cluster, block = tl.program_id(0) // twos, tl.program_id(0) % twos * 2
        first = tl.program_id(1) * of_low
        line = head * query_clusters + query_cluster
        number = tl.load(listed_number + line)
        if first >= number:
            return
        index = first + column % of_low
        is_cluster = (index < number) & (block + column // of_low < blocks)
        cluster = tl.load(listed + line * key_clusters + index, mask=is_cluster, other=0)
        cluster += column // of_low * key_clusters
    of_block = (line * blocks + block) * key_clusters
    means = load_rows(key_mean, of_block, cluster, is_cluster, D, DP)
    values = load_rows(value_mean, of_block, cluster, is_cluster, DV, DVP)
    masses = tl.load(mass + of_block + cluster, mask=is_cluster, other=float("-inf"))
    if SECOND_ORDER:
        of_sizes = (head * blocks + block) * key_clusters
        deviations = tl.load(deviation + of_block + cluster, mask=is_cluster, other=0.0)
        mosts = tl.load(most + of_sizes + cluster, mask=is_cluster, other=0.0)
    d_mass = tl.zeros([CLUSTERS], ACC)
    d_means = tl.zeros([CLUSTERS, DP], ACC)
    d_values = tl.zeros([CLUSTERS, DVP], ACC)
    starts += head * (blocks * query_clusters + 1) + query_cluster * blocks
    own_begin, own_end = tl.load(starts + block), tl.load(starts + block + 1)
    next_end = own_end
    if IS_SEEN:
        first_row, last_row = own_begin, own_end
        terms += head * words * length
    else:
        next_end = tl.load(starts + tl.minimum(block + 2, blocks))
        first_row, last_row = own_end if IS_CAUSAL else tl.load(starts), tl.load(starts + blocks)
        terms += (head * blocks + block) * words * length
    # Few queries open a cluster at all: rows that do not are passed over, many at a time.
    part: tl.constexpr = 8 * ROWS
    for first_of_part in range(first_row, last_row, tl.maximum(last_row - first_row, 1) if IS_SEEN else part):
        end_of_part = last_row
        if not IS_SEEN:
            of_part_low, of_part_high = _words_of_blocks(
                terms, first_of_part + tl.arange(0, part), last_row, own_begin, own_end, next_end, block, blocks,
                first, length, words,
            )  # fmt: skip
            end_of_part = tl.minimum(first_of_part + part, last_row)
            end_of_part = tl.where(_any(of_part_low | of_part_high), end_of_part, first_of_part)
        for begin in range(first_of_part, end_of_part, ROWS):
            place = begin + tl.arange(0, ROWS)
            is_row = place < last_row
            if IS_SEEN:
                low, high = _words_of_clusters(terms, place, is_row, first, length, words, CLUSTERS)
            else:
                low, high = _words_of_blocks(
                    terms, place, last_row, own_begin, own_end, next_end, block, blocks, first, length, words
                )
            if IS_SEEN or _any(low | high):
                residual = load_rows(residuals, head * length, place, is_row, D, DP)
                some_grad = load_rows(grad_out, head * length, place, is_row, DV, DVP)
                row_lse = tl.load(lse + head * length + place, mask=is_row, other=float("inf"))
                row_delta = tl.load(delta + head * length + place, mask=is_row, other=0.0)
                # Summaries are the rows here, so that weights and gradients enter the products below as they are.
                logits = tl.dot(means, tl.trans(residual), input_precision=PRECISION, out_dtype=ACC) + masses[:, None]
                if SECOND_ORDER:
                    width = tl.load(widths + head * length + place, mask=is_row, other=0.0)
                    logits += mass_off_centroid(deviations[:, None] * width[None, :], mosts[:, None])
                logits = tl.where(_bit_of_column(low, high, first, CLUSTERS, of_low), logits, float("-inf"))
                weights = exp_of_less(logits, row_lse[None, :])
                d_values = tl.dot(
                    weights.to(some_grad.dtype), some_grad, d_values, input_precision=PRECISION, out_dtype=ACC
                )
                response = tl.dot(values, tl.trans(some_grad), input_precision=PRECISION, out_dtype=ACC)
                d_logits = weights * (response - row_delta[None, :])
                # At fixed sums: the gradient of the values has `sum(weights * response)` along the values.
                d_mass -= tl.sum(weights * row_delta[None, :], 1)
                d_means = tl.dot(
                    d_logits.to(residual.dtype), residual, d_means, input_precision=PRECISION, out_dtype=ACC
                )
    d_mass -= tl.sum(d_means * means.to(ACC), 1)
    tl.store(grad_mass + of_block + cluster, d_mass, mask=is_cluster)
    store_rows(grad_key_mean, of_block, cluster, is_cluster, d_means, D, DP)
    store_rows(grad_value_mean, of_block, cluster, is_cluster, d_values, DV, DVP)
