"""Stage 4, second half: attention to the summaries of all that a selection does not retrieve."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.bucket_summaries import pointers
from muse_attention.backends.triton.device_functions import add_dot, dot, exp_of_less, include, load_rows, store_rows
from muse_attention.backends.triton.key_offset import QueryGradients
from muse_attention.backends.triton.numbers import cdiv, gradient_dtype, padded
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.segments import ROWS_OF_TILE, Segments, blocks_of_segment, score
from muse_attention.backends.triton.term_bits import (
    Terms,
    any_set,
    bit_of_column,
    bit_of_row,
    is_term,
    words_of_blocks,
    words_of_clusters,
)
from muse_attention.backends.triton.tiles import load_places_from_begin, load_tile
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Partial, Summaries

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


def attend(segments: Segments, bucket_summaries: Summaries, seen: Summaries, terms: Terms) -> Partial:
    """Attention to the summary terms: (H, N, Dv) and (H, N), in the order of the inputs."""
    heads, length, _ = segments.residuals.shape
    value_dim = seen.value_mean.shape[-1]
    wide = compute_dtype(segments.residuals.dtype)
    partial = Partial(
        segments.residuals.new_empty(heads, length, value_dim),
        segments.residuals.new_empty(heads, length, dtype=wide),
    )
    _attend_to_summaries[segments.tiles.grid](
        **segments.queries, shifts_ptr=segments.shift, **pointers(bucket_summaries), **pointers(seen, "seen_"),
        **segments.rows, **terms.arguments, out_ptr=partial.out, lse_ptr=partial.lse, DV=value_dim, ROWS=ROWS_OF_TILE,
        **segments.fit(ATTEND, value_dim),
    )  # fmt: skip
    return partial


def attend_backward(
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    segments: Segments,
    bucket_summaries: Summaries,
    seen: Summaries,
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
    softmax_arguments = {"grad_out_ptr": grad_out, "lse_ptr": lse, "delta_ptr": delta}
    shared = {**softmax_arguments, **segments.queries, "DV": value_dim}
    _summaries_backward_to_queries[segments.tiles.grid](
        **shared, **pointers(bucket_summaries), **pointers(seen, "seen_"), **segments.rows, **terms.arguments,
        grad_queries_ptr=to_queries.centred, grad_shift_ptr=to_queries.offset_factor, ROWS=ROWS_OF_TILE,
        **segments.fit(ATTEND_BACKWARD_TO_QUERIES, value_dim),
    )  # fmt: skip
    for is_seen, summaries, gradient, launches, bits in (
        (False, bucket_summaries, fill_in[0], ATTEND_BACKWARD_TO_BLOCKS, terms.blocks),
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
            **shared, **pointers(summaries), starts_ptr=segments.groups.starts, terms_ptr=bits,
            **terms.opened.arguments, **pointers(gradient, "grad_"), **segments.sizes, words=terms.words,
            IS_SEEN=is_seen, **launch,
        )  # fmt: skip
    return to_queries


@kernel(stage="attention to summaries", do_not_specialize=["length", "blocks", "query_clusters"])
def _attend_to_summaries(
    residuals_ptr, shifts_ptr, mass_ptr, key_mean_ptr, value_mean_ptr, seen_mass_ptr, seen_key_mean_ptr,
    seen_value_mean_ptr, tile_group_ptr, tile_begin_ptr, tile_end_ptr, order_ptr, cluster_terms_ptr, block_terms_ptr,
    listed_ptr, listed_number_ptr, out_ptr, lse_ptr, length, blocks, query_clusters, key_clusters, words,
    D: tl.constexpr, DV: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, CLUSTERS: tl.constexpr,
    COLUMNS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Attention of the queries of a segment's tile to their terms: accumulated summaries of clusters they did not open,
    and blocks' summaries of those they opened.

    Grid: that of the segments' tiles. `residuals_ptr`: (H, N, D) and `shifts_ptr`: (H, N), in the order of the
    segments; `mass_ptr`: (H, Q, nb, K); `key_mean_ptr`: (H, Q, nb, K, D); `value_mean_ptr`: (H, Q, nb, K, DV);
    `seen_*_ptr`: the same, accumulated; `order_ptr`: (H, N) int32; `cluster_terms_ptr`: (H, words, N) int32;
    `block_terms_ptr`: (H, nb, words, N) int32; `listed_ptr`: (H, Q, K) int32; `listed_number_ptr`: (H, Q) int32;
    `out_ptr`: (H, N, DV) and `lse_ptr`: (H, N), in the order of the inputs.
    """
    head, tile, segment = load_tile(tile_group_ptr)
    if segment < 0:
        return
    # scalar, [ROWS], [ROWS]
    begin, offs_place, mask_row = load_places_from_begin(tile_begin_ptr, tile_end_ptr, tile, ROWS)
    first_place = head * length + begin
    own_block, seen_blocks = blocks_of_segment(segment, blocks, IS_CAUSAL)
    cluster_index = head * query_clusters + segment // blocks
    cluster_base = cluster_index * blocks * key_clusters
    largest = tl.full([ROWS], float("-inf"), ACC)
    total = tl.zeros([ROWS], ACC)
    weighted = tl.zeros([ROWS, padded(DV)], ACC)  # [ROWS, DV]
    if seen_blocks > 0:
        residual = load_rows(residuals_ptr, first_place, offs_place, mask_row, D)  # [ROWS, D]
        # 1. The accumulated summary of every cluster.
        for first in range(0, key_clusters, CLUSTERS):
            offs_cluster = first + tl.arange(0, CLUSTERS)  # [CLUSTERS]
            mask_cluster = offs_cluster < key_clusters  # [CLUSTERS]
            bits_ptr = cluster_terms_ptr + head * words * length + begin
            # [ROWS], [ROWS]
            low, high = words_of_clusters(bits_ptr, offs_place, mask_row, first, length, words, CLUSTERS)
            block_base = cluster_base + own_block * key_clusters
            # [CLUSTERS, D], [ROWS, CLUSTERS]
            _, logits = score(
                residual, seen_mass_ptr, seen_key_mean_ptr, block_base, offs_cluster, mask_cluster, D, ACC
            )
            logits = tl.where(bit_of_row(low, high, first, CLUSTERS), logits, float("-inf"))
            values = load_rows(seen_value_mean_ptr, block_base, offs_cluster, mask_cluster, DV)  # [CLUSTERS, DV]
            largest, total, weighted = include(logits, values, largest, total, weighted)

        # 2. The blocks of the listed clusters.
        listed_number = tl.load(listed_number_ptr + cluster_index)
        listed_ptr += cluster_index * key_clusters
        offs_column = tl.arange(0, COLUMNS)
        summaries = listed_number * seen_blocks
        for first in range(0, summaries, COLUMNS):
            # [COLUMNS], [COLUMNS]
            block, offs_listed = (first + offs_column) // listed_number, (first + offs_column) % listed_number
            mask_summary = first + offs_column < summaries  # [COLUMNS]
            if not IS_CAUSAL:
                mask_summary &= block != own_block
            # [ROWS, COLUMNS]
            has_term = is_term(
                block_terms_ptr + head * blocks * words * length + begin, block, offs_listed, mask_summary, offs_place,
                mask_row, length, words,
            )  # fmt: skip
            if any_set(has_term):
                # [COLUMNS]
                offs_summary = block * key_clusters + tl.load(listed_ptr + offs_listed, mask=mask_summary, other=0)
                # [COLUMNS, D], [ROWS, COLUMNS]
                _, logits = score(residual, mass_ptr, key_mean_ptr, cluster_base, offs_summary, mask_summary, D, ACC)
                logits = tl.where(has_term, logits, float("-inf"))
                values = load_rows(value_mean_ptr, cluster_base, offs_summary, mask_summary, DV)  # [COLUMNS, DV]
                largest, total, weighted = include(logits, values, largest, total, weighted)

    # 3. Into the order of the inputs.
    offs_row = tl.load(order_ptr + first_place + offs_place, mask=mask_row, other=0)  # [ROWS]
    is_empty = total == 0  # [ROWS]
    weighted /= tl.where(is_empty, 1.0, total)[:, None]
    shift = tl.load(shifts_ptr + first_place + offs_place, mask=mask_row, other=0.0)  # [ROWS]
    log_total = tl.where(is_empty, float("-inf"), largest + tl.log(total) + shift)  # [ROWS]
    store_rows(out_ptr, head * length, offs_row, mask_row, weighted, DV)
    tl.store(lse_ptr + head * length + offs_row, log_total, mask=mask_row)


@triton.jit
def _gradient_of_logits(logits, grad_out, values, lse, delta, ACC: tl.constexpr):
    """[ROWS, CLUSTERS]: from `grad_out` [ROWS, DV], `values` [CLUSTERS, DV], and the softmax's `lse` and `delta`,
    [ROWS]."""
    weights = exp_of_less(logits, lse[:, None])  # [ROWS, CLUSTERS]
    response = dot(grad_out, tl.trans(values), ACC)  # [ROWS, CLUSTERS]
    return weights * (response - delta[:, None])


@kernel(stage="attention to summaries", do_not_specialize=["length", "blocks", "query_clusters"])
def _summaries_backward_to_queries(
    grad_out_ptr, lse_ptr, delta_ptr, residuals_ptr, mass_ptr, key_mean_ptr, value_mean_ptr, seen_mass_ptr,
    seen_key_mean_ptr, seen_value_mean_ptr, tile_group_ptr, tile_begin_ptr, tile_end_ptr, order_ptr, cluster_terms_ptr,
    block_terms_ptr, listed_ptr, listed_number_ptr, grad_queries_ptr, grad_shift_ptr, length, blocks, query_clusters,
    key_clusters, words, D: tl.constexpr, DV: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr,
    CLUSTERS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of a segment's tile, from all their terms.

    Grid: that of the segments' tiles. `grad_out_ptr`: (H, N, DV), `lse_ptr` and `delta_ptr`: (H, N), in the order of
    the segments; `grad_queries_ptr`: (H, N, D) and `grad_shift_ptr`: (H, N), in the order of the inputs; the others as
    in `_attend_to_summaries`.
    """
    head, tile, segment = load_tile(tile_group_ptr)
    if segment < 0:
        return
    # scalar, [ROWS], [ROWS]
    begin, offs_place, mask_row = load_places_from_begin(tile_begin_ptr, tile_end_ptr, tile, ROWS)
    first_place = head * length + begin
    own_block, seen_blocks = blocks_of_segment(segment, blocks, IS_CAUSAL)
    cluster_index = head * query_clusters + segment // blocks
    cluster_base = cluster_index * blocks * key_clusters
    gradient = tl.zeros([ROWS, padded(D)], ACC)  # [ROWS, D]
    d_shift = tl.zeros([ROWS], ACC)
    if seen_blocks > 0:
        residual = load_rows(residuals_ptr, first_place, offs_place, mask_row, D)  # [ROWS, D]
        grad_out = load_rows(grad_out_ptr, first_place, offs_place, mask_row, DV)  # [ROWS, DV]
        lse = tl.load(lse_ptr + first_place + offs_place, mask=mask_row, other=float("inf"))  # [ROWS]
        delta = tl.load(delta_ptr + first_place + offs_place, mask=mask_row, other=0.0)  # [ROWS]
        # 1. The accumulated summary of every cluster.
        for first in range(0, key_clusters, CLUSTERS):
            offs_cluster = first + tl.arange(0, CLUSTERS)  # [CLUSTERS]
            mask_cluster = offs_cluster < key_clusters  # [CLUSTERS]
            bits_ptr = cluster_terms_ptr + head * words * length + begin
            # [ROWS], [ROWS]
            low, high = words_of_clusters(bits_ptr, offs_place, mask_row, first, length, words, CLUSTERS)
            block_base = cluster_base + own_block * key_clusters
            # [CLUSTERS, D], [ROWS, CLUSTERS]
            means, logits = score(
                residual, seen_mass_ptr, seen_key_mean_ptr, block_base, offs_cluster, mask_cluster, D, ACC
            )
            logits = tl.where(bit_of_row(low, high, first, CLUSTERS), logits, float("-inf"))
            values = load_rows(seen_value_mean_ptr, block_base, offs_cluster, mask_cluster, DV)  # [CLUSTERS, DV]
            d_logits = _gradient_of_logits(logits, grad_out, values, lse, delta, ACC)  # [ROWS, CLUSTERS]
            d_shift += tl.sum(d_logits, 1)
            gradient = add_dot(d_logits.to(means.dtype), means, gradient)

        # 2. The blocks of the listed clusters.
        listed_number = tl.load(listed_number_ptr + cluster_index)
        listed_ptr += cluster_index * key_clusters
        offs_column = tl.arange(0, COLUMNS)
        summaries = listed_number * seen_blocks
        for first in range(0, summaries, COLUMNS):
            # [COLUMNS], [COLUMNS]
            block, offs_listed = (first + offs_column) // listed_number, (first + offs_column) % listed_number
            mask_summary = first + offs_column < summaries  # [COLUMNS]
            if not IS_CAUSAL:
                mask_summary &= block != own_block
            # [ROWS, COLUMNS]
            has_term = is_term(
                block_terms_ptr + head * blocks * words * length + begin, block, offs_listed, mask_summary, offs_place,
                mask_row, length, words,
            )  # fmt: skip
            if any_set(has_term):
                # [COLUMNS]
                offs_summary = block * key_clusters + tl.load(listed_ptr + offs_listed, mask=mask_summary, other=0)
                # [COLUMNS, D], [ROWS, COLUMNS]
                means, logits = score(
                    residual, mass_ptr, key_mean_ptr, cluster_base, offs_summary, mask_summary, D, ACC
                )
                logits = tl.where(has_term, logits, float("-inf"))
                values = load_rows(value_mean_ptr, cluster_base, offs_summary, mask_summary, DV)  # [COLUMNS, DV]
                d_logits = _gradient_of_logits(logits, grad_out, values, lse, delta, ACC)  # [ROWS, COLUMNS]
                d_shift += tl.sum(d_logits, 1)
                gradient = add_dot(d_logits.to(means.dtype), means, gradient)

    # 3. Into the order of the inputs.
    offs_row = tl.load(order_ptr + first_place + offs_place, mask=mask_row, other=0)  # [ROWS]
    store_rows(grad_queries_ptr, head * length, offs_row, mask_row, gradient, D)
    tl.store(grad_shift_ptr + head * length + offs_row, d_shift, mask=mask_row)


@kernel(stage="attention to summaries", do_not_specialize=["length", "blocks", "query_clusters"])
def _backward_to_summaries(
    grad_out_ptr, lse_ptr, delta_ptr, residuals_ptr, mass_ptr, key_mean_ptr, value_mean_ptr, starts_ptr, terms_ptr,
    listed_ptr, listed_number_ptr, grad_mass_ptr, grad_key_mean_ptr, grad_value_mean_ptr, length, blocks,
    query_clusters, key_clusters, words, IS_SEEN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, CLUSTERS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of some summaries, from all queries of their query cluster that see them.

    The queries of a block see its accumulated summaries. A block's own summaries are seen by the queries of later
    blocks, or of all other blocks, that open their cluster: few clusters, so a program takes two neighbouring blocks.
    The queries of a cluster are stored block by block.

    Grid: (Q nb, K / CLUSTERS, H), or (Q nb / 2, 2 K / CLUSTERS, H) if not `IS_SEEN`. `starts_ptr`: (H, Q nb + 1)
    int32; `terms_ptr`: (H, words, N) int32, or (H, nb, words, N) of blocks; gradients of summaries as these; the others
    as in `_summaries_backward_to_queries`.
    """
    head = tl.program_id(2).to(tl.int64)
    offs_column = tl.arange(0, CLUSTERS)
    low_columns: tl.constexpr = 32 if IS_SEEN else CLUSTERS // 2

    # 1. Which summaries.
    if IS_SEEN:
        query_cluster, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
        # (The first block of causal attention sees nothing.)
        if IS_CAUSAL and block == 0:
            return
        first = tl.program_id(1) * CLUSTERS
        cluster_index = head * query_clusters + query_cluster
        offs_cluster = first + offs_column  # [CLUSTERS]
        mask_cluster = offs_cluster < key_clusters  # [CLUSTERS]
    else:
        pairs_of_blocks = (blocks + 1) // 2
        query_cluster, block = tl.program_id(0) // pairs_of_blocks, tl.program_id(0) % pairs_of_blocks * 2
        first = tl.program_id(1) * low_columns
        cluster_index = head * query_clusters + query_cluster
        number = tl.load(listed_number_ptr + cluster_index)
        if first >= number:
            return
        offs_listed = first + offs_column % low_columns  # [CLUSTERS]
        mask_cluster = (offs_listed < number) & (block + offs_column // low_columns < blocks)
        offs_cluster = tl.load(listed_ptr + cluster_index * key_clusters + offs_listed, mask=mask_cluster, other=0)
        offs_cluster += offs_column // low_columns * key_clusters
    block_base = (cluster_index * blocks + block) * key_clusters
    means = load_rows(key_mean_ptr, block_base, offs_cluster, mask_cluster, D)  # [CLUSTERS, D]
    values = load_rows(value_mean_ptr, block_base, offs_cluster, mask_cluster, DV)  # [CLUSTERS, DV]
    masses = tl.load(mass_ptr + block_base + offs_cluster, mask=mask_cluster, other=float("-inf"))  # [CLUSTERS]
    d_mass = tl.zeros([CLUSTERS], ACC)
    d_means = tl.zeros([CLUSTERS, padded(D)], ACC)  # [CLUSTERS, D]
    d_values = tl.zeros([CLUSTERS, padded(DV)], ACC)  # [CLUSTERS, DV]

    # 2. Which rows see them.
    starts_ptr += head * (blocks * query_clusters + 1) + query_cluster * blocks
    own_begin, own_end = tl.load(starts_ptr + block), tl.load(starts_ptr + block + 1)
    next_end = own_end
    if IS_SEEN:
        first_row, last_row = own_begin, own_end
        terms_ptr += head * words * length
    else:
        next_end = tl.load(starts_ptr + tl.minimum(block + 2, blocks))
        first_row, last_row = own_end if IS_CAUSAL else tl.load(starts_ptr), tl.load(starts_ptr + blocks)
        terms_ptr += (head * blocks + block) * words * length

    # 3. Sums over these rows. Few queries open a cluster, so rows that do not are skipped many at a time.
    part: tl.constexpr = 8 * ROWS
    for first_of_part in range(first_row, last_row, tl.maximum(last_row - first_row, 1) if IS_SEEN else part):
        end_of_part = last_row
        if not IS_SEEN:
            # [part], [part]
            part_low, part_high = words_of_blocks(
                terms_ptr, first_of_part + tl.arange(0, part), last_row, own_begin, own_end, next_end, block, blocks,
                first, length, words,
            )  # fmt: skip
            end_of_part = tl.minimum(first_of_part + part, last_row)
            end_of_part = tl.where(any_set(part_low | part_high), end_of_part, first_of_part)
        for begin in range(first_of_part, end_of_part, ROWS):
            offs_place = begin + tl.arange(0, ROWS)  # [ROWS]
            mask_row = offs_place < last_row  # [ROWS]
            if IS_SEEN:
                # [ROWS], [ROWS]
                low, high = words_of_clusters(terms_ptr, offs_place, mask_row, first, length, words, CLUSTERS)
            else:
                low, high = words_of_blocks(
                    terms_ptr, offs_place, last_row, own_begin, own_end, next_end, block, blocks, first, length, words
                )
            if IS_SEEN or any_set(low | high):
                residual = load_rows(residuals_ptr, head * length, offs_place, mask_row, D)  # [ROWS, D]
                grad_out = load_rows(grad_out_ptr, head * length, offs_place, mask_row, DV)  # [ROWS, DV]
                lse = tl.load(lse_ptr + head * length + offs_place, mask=mask_row, other=float("inf"))  # [ROWS]
                delta = tl.load(delta_ptr + head * length + offs_place, mask=mask_row, other=0.0)  # [ROWS]
                # Summaries are the rows here, so that weights and gradients enter the products below as they are.
                # [CLUSTERS, ROWS]
                logits = dot(means, tl.trans(residual), ACC) + masses[:, None]
                logits = tl.where(bit_of_column(low, high, first, CLUSTERS, low_columns), logits, float("-inf"))
                weights = exp_of_less(logits, lse[None, :])  # [CLUSTERS, ROWS]
                d_values = add_dot(weights.to(grad_out.dtype), grad_out, d_values)
                # [CLUSTERS, ROWS]
                response = dot(values, tl.trans(grad_out), ACC)
                d_logits = weights * (response - delta[None, :])  # [CLUSTERS, ROWS]
                # At fixed sums: the gradient of the values contains `sum(weights * response)` along the values.
                d_mass -= tl.sum(weights * delta[None, :], 1)
                d_means = add_dot(d_logits.to(residual.dtype), residual, d_means)
    d_mass -= tl.sum(d_means * means.to(ACC), 1)
    tl.store(grad_mass_ptr + block_base + offs_cluster, d_mass, mask=mask_cluster)
    store_rows(grad_key_mean_ptr, block_base, offs_cluster, mask_cluster, d_means, D)
    store_rows(grad_value_mean_ptr, block_base, offs_cluster, mask_cluster, d_values, DV)
