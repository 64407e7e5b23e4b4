"""Stage 4, by tolerance: a query retrieves every bucket whose summary is expected to be wrong by more than that.

A summary's expected error is what its weight in the softmax would gain if its logit were some deviations higher, the
deviation sigma being that of the query's logits over its keys. To open a cluster and to retrieve a block of it are
comparisons of what attention to the summaries computes anyway, so one kernel does both. Pairs above the tolerance are
counted by their error; a head that has more of them than its budget gives those of smallest error back, in a second
pass that all other heads leave at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.device_math import exp_of_less
from muse_attention.backends.triton.filling import fill
from muse_attention.backends.triton.numbers import padded
from muse_attention.backends.triton.row_tiles import load_rows, store_rows
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.scored_summaries import ScoredSummaries
from muse_attention.backends.triton.segments import ROWS_OF_TILE, Segments, blocks_of_segment, include, score
from muse_attention.backends.triton.tiles import load_places_from_begin, load_tile
from muse_attention.core.budget import BINS_PER_OCTAVE, ERROR_BINS, LARGEST_GROWTH, SMALLEST_OCTAVE
from muse_attention.core.structures import Partial, Selection

SELECT_AND_ATTEND = {
    128: {"CLUSTERS": 64, "COLUMNS": 16, "num_warps": 4, "num_stages": 1, "maxnreg": 128},
    256: {"CLUSTERS": 64, "COLUMNS": 16, "num_warps": 4, "num_stages": 1, "maxnreg": 168},
    512: {"CLUSTERS": 32, "COLUMNS": 16, "num_warps": 4, "num_stages": 1},
}
_BINS = tl.constexpr(ERROR_BINS)
_PER_OCTAVE = tl.constexpr(BINS_PER_OCTAVE)
_SMALLEST = tl.constexpr(SMALLEST_OCTAVE)
_LARGEST_GROWTH = tl.constexpr(LARGEST_GROWTH)


def select_and_attend(
    segments: Segments,
    of_buckets: ScoredSummaries,
    seen: ScoredSummaries,
    own_lse: Tensor,
    selection: Selection,
    *,
    is_chosen: bool,
    tolerance: float,
    caution: float,
    mean_bucket: float,
    budget: int,
) -> Partial:
    """Fill in what each query opens and retrieves, (H, N, words) and (H, N, nb, words), or leave it if it `is_chosen`;
    and attend to the summaries that this leaves: (H, N, Dv) and (H, N). All is in the order of the inputs.

    `own_lse` (H, N) is that of the queries' own blocks; `budget` is the most pairs of a head.
    """
    heads, length, words = selection.opened.shape
    value_dim = seen.value_mean.shape[-1]
    integers = segments.groups.order
    partial = Partial(segments.residuals.new_empty(heads, length, value_dim), torch.empty_like(own_lse))
    tiles = segments.tiles
    lists = integers.new_empty(*tiles.group.shape, segments.key_clusters)
    counts, lowest = fill(integers.new_empty(heads * (ERROR_BINS + 1), dtype=torch.int64), 0).split(
        [heads * ERROR_BINS, heads]
    )
    for is_first in (1,) if is_chosen else (1, 0):
        _select_and_attend[tiles.grid](
            **segments.queries, shifts_ptr=segments.shift, **of_buckets.arguments(), **seen.arguments("seen_"),
            **segments.rows, own_lse_ptr=own_lse, opened_ptr=selection.opened, retrieved_ptr=selection.retrieved,
            lists_ptr=lists, counts_ptr=counts, lowest_ptr=lowest, out_ptr=partial.out, lse_ptr=partial.lse,
            is_first=is_first, tolerance=tolerance, caution=caution, mean_bucket=mean_bucket, DV=value_dim,
            DVP=padded(value_dim), WORDS=words, SELECTS=not is_chosen, ROWS=ROWS_OF_TILE,
            **segments.fit(SELECT_AND_ATTEND, value_dim),
        )  # fmt: skip
        if is_first:
            _find_lowest_bin[(heads,)](counts_ptr=counts, lowest_ptr=lowest, budget=budget)
    return partial


@triton.jit
def _expected_error(logits, lse, sigma, caution):
    """What a summary's weight in the softmax gains for each deviation, if its logit is `caution` deviations `sigma`
    above its estimate; 0 where there is none."""
    gain = sigma
    if caution > 0:
        gain = (tl.exp(tl.minimum(caution * sigma, _LARGEST_GROWTH)) - 1.0) / caution
    return tl.where(logits == float("-inf"), 0.0, exp_of_less(logits, lse[:, None]) * gain)


@triton.jit
def _has_bit(word, number):
    return ((word >> (number & 31)[None, :]) & 1) != 0


@kernel(
    stage="attention to summaries",
    do_not_specialize=["is_first", "tolerance", "caution", "mean_bucket", "length", "blocks", "query_clusters"],
)
def _select_and_attend(
    residuals_ptr, shifts_ptr, widths_ptr, mass_ptr, key_mean_ptr, value_mean_ptr, deviation_ptr, most_ptr,
    seen_mass_ptr, seen_key_mean_ptr, seen_value_mean_ptr, seen_deviation_ptr, seen_most_ptr, tile_group_ptr,
    tile_begin_ptr, tile_end_ptr, order_ptr, own_lse_ptr, opened_ptr, retrieved_ptr, lists_ptr, counts_ptr, lowest_ptr,
    out_ptr, lse_ptr, is_first, tolerance, caution, mean_bucket, length, blocks, query_clusters, key_clusters,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, WORDS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, SECOND_ORDER: tl.constexpr, SELECTS: tl.constexpr, ROWS: tl.constexpr,
    CLUSTERS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Open every cluster whose accumulated summary has an error above the tolerance, and attend to the others. Of the
    opened ones retrieve every block whose summary has, and attend to the others.

    Retrieved pairs are counted by their error. In the second pass, those below the lowest bin that the head can afford
    are given back. Both passes are one kernel, so that they find the same errors.
    """
    head, tile, segment = load_tile(tile_group_ptr)
    if segment < 0:
        return
    lowest_bin = tl.load(lowest_ptr + head)
    if is_first == 0 and lowest_bin == 0:
        return
    begin, offs_place, mask_row = load_places_from_begin(tile_begin_ptr, tile_end_ptr, tile, ROWS)
    first_place = head * length + begin
    offs_row = tl.load(order_ptr + first_place + offs_place, mask=mask_row, other=0)
    own_block, seen_blocks = blocks_of_segment(segment, blocks, IS_CAUSAL)
    opened_ptr += head * length * WORDS
    retrieved_ptr += head * length * blocks * WORDS
    line = head * query_clusters + segment // blocks
    of_cluster = line * blocks * key_clusters
    of_sizes = head * blocks * key_clusters
    lists_ptr += tile * key_clusters
    # What the offset of keys adds to every logit. It is added to the lse of the result, at the end.
    shift = tl.load(shifts_ptr + first_place + offs_place, mask=mask_row, other=0.0)
    largest = tl.full([ROWS], float("-inf"), ACC)
    total = tl.zeros([ROWS], ACC)
    weighted = tl.zeros([ROWS, DVP], ACC)
    if SELECTS and is_first != 0:
        word = tl.arange(0, 32)
        nothing_yet = tl.zeros([ROWS, 32], tl.int32)
        for first in range(0, WORDS, 32):
            word_ptrs = opened_ptr + offs_row[:, None] * WORDS + (first + word)[None, :]
            tl.store(word_ptrs, nothing_yet, mask=mask_row[:, None] & (first + word < WORDS)[None, :])
        for first in range(0, blocks * WORDS, 32):
            word_ptrs = retrieved_ptr + offs_row[:, None] * blocks * WORDS + (first + word)[None, :]
            tl.store(word_ptrs, nothing_yet, mask=mask_row[:, None] & (first + word < blocks * WORDS)[None, :])
        tl.debug_barrier()
    if seen_blocks > 0:
        residual = load_rows(residuals_ptr, first_place, offs_place, mask_row, D, DP)
        width = tl.load(widths_ptr + first_place + offs_place, mask=mask_row, other=0.0)
        at, of_size = of_cluster + own_block * key_clusters, of_sizes + own_block * key_clusters
        estimate = tl.zeros([ROWS], ACC)
        if SELECTS:
            # The lse of the own block and of all that is seen of every cluster.
            so_far = tl.load(own_lse_ptr + head * length + offs_row, mask=mask_row, other=0.0).to(ACC) - shift
            sum_so_far = tl.full([ROWS], 1.0, ACC)
            for first in range(0, key_clusters, CLUSTERS):
                offs_cluster = first + tl.arange(0, CLUSTERS)
                _, logits = score(
                    residual, width, seen_mass_ptr, seen_key_mean_ptr, seen_deviation_ptr, seen_most_ptr, at, of_size,
                    offs_cluster, offs_cluster < key_clusters, D, DP, SECOND_ORDER, ACC, PRECISION,
                )  # fmt: skip
                larger = tl.maximum(so_far, tl.max(logits, 1))
                sum_so_far = sum_so_far * tl.exp(so_far - larger) + tl.sum(exp_of_less(logits, larger[:, None]), 1)
                so_far = larger
            estimate = so_far + tl.log(sum_so_far)
        listed = 0
        for first in range(0, key_clusters, CLUSTERS):
            offs_column = tl.arange(0, CLUSTERS)
            offs_cluster = first + offs_column
            mask_cluster = offs_cluster < key_clusters
            _, logits = score(
                residual, width, seen_mass_ptr, seen_key_mean_ptr, seen_deviation_ptr, seen_most_ptr, at, of_size,
                offs_cluster, mask_cluster, D, DP, SECOND_ORDER, ACC, PRECISION,
            )  # fmt: skip
            inside = mask_row[:, None] & mask_cluster[None, :]
            word_ptrs = opened_ptr + offs_row[:, None] * WORDS + (offs_cluster // 32)[None, :]
            if SELECTS:
                deviations = tl.load(seen_deviation_ptr + at + offs_cluster, mask=mask_cluster, other=0.0)
                errors = _expected_error(logits, estimate, width[:, None] * deviations[None, :], caution)
                is_open = (errors > tolerance) & inside
                bits = tl.where(is_open, (offs_place * 0 + 1)[:, None] << (offs_column & 31)[None, :], 0)
                for word in tl.static_range((CLUSTERS + 31) // 32):
                    # (Bits of different columns: their sum is their union.)
                    packed = tl.sum(tl.where((offs_column // 32 == word)[None, :], bits, 0), 1)
                    number = first // 32 + word
                    tl.store(
                        opened_ptr + offs_row * WORDS + number,
                        packed,
                        mask=mask_row & (offs_place * 0 + number < WORDS),
                    )
            else:
                is_open = _has_bit(tl.load(word_ptrs, mask=inside, other=0), offs_cluster)
            is_listed = tl.max(is_open.to(tl.int32), 0)
            tl.store(lists_ptr + listed + tl.cumsum(is_listed, 0) - is_listed, offs_cluster, mask=is_listed > 0)
            listed += tl.sum(is_listed, 0)
            logits = tl.where(is_open, float("-inf"), logits)
            values = load_rows(seen_value_mean_ptr, at, offs_cluster, mask_cluster, DV, DVP)
            largest, total, weighted = include(logits, values, largest, total, weighted, ACC, PRECISION)
        tl.debug_barrier()
        # Of every cluster that some query of the tile opened, all blocks.
        offs_column = tl.arange(0, COLUMNS)
        summaries = listed * seen_blocks
        for first in range(0, summaries, COLUMNS):
            index, block = (first + offs_column) // seen_blocks, (first + offs_column) % seen_blocks
            mask_summary = first + offs_column < summaries
            if not IS_CAUSAL:
                mask_summary &= block != own_block
            offs_cluster = tl.load(lists_ptr + index, mask=mask_summary, other=0)
            own = tl.zeros([ROWS, COLUMNS], tl.int32)
            for word in tl.static_range(WORDS):
                of_word = tl.load(opened_ptr + offs_row * WORDS + word, mask=mask_row, other=0)
                own = tl.where((mask_summary & (offs_cluster // 32 == word))[None, :], of_word[:, None], own)
            is_term = _has_bit(own, offs_cluster)
            offs_summary = block * key_clusters + offs_cluster
            _, logits = score(
                residual, width, mass_ptr, key_mean_ptr, deviation_ptr, most_ptr, of_cluster, of_sizes, offs_summary,
                mask_summary, D, DP, SECOND_ORDER, ACC, PRECISION,
            )  # fmt: skip
            word_ptrs = (
                retrieved_ptr + (offs_row[:, None] * blocks + block[None, :]) * WORDS + (offs_cluster // 32)[None, :]
            )
            if SELECTS:
                deviations = tl.load(deviation_ptr + of_cluster + offs_summary, mask=mask_summary, other=0.0)
                mosts = tl.load(most_ptr + of_sizes + offs_summary, mask=mask_summary, other=0.0)
                # A large bucket must be that much worse: retrieving it costs more. (`most^2 / 2` is log n.)
                smaller = tl.sqrt(mean_bucket * tl.exp(-0.5 * mosts * mosts))
                errors = _expected_error(logits, estimate, width[:, None] * deviations[None, :], caution)
                errors *= smaller[None, :]
                wanted = (errors > tolerance) & is_term
                if tl.max(tl.max(wanted.to(tl.int32), 1), 0) > 0:
                    bit = (offs_place * 0 + 1)[:, None] << (offs_cluster & 31)[None, :]
                    octave = tl.log2(tl.where(wanted, errors, 1.0)) - _SMALLEST
                    bins = tl.minimum(tl.maximum(octave * _PER_OCTAVE, 0.0), _BINS - 1).to(tl.int32)
                    is_affordable = bins >= lowest_bin
                    if is_first != 0:
                        tl.atomic_or(word_ptrs, bit, mask=wanted, sem="relaxed")
                        one = tl.full([ROWS, COLUMNS], 1, tl.int64)
                        tl.atomic_add(counts_ptr + head * _BINS + bins, one, mask=wanted, sem="relaxed")
                    else:
                        tl.atomic_and(word_ptrs, ~bit, mask=wanted & ~is_affordable, sem="relaxed")
                    wanted &= is_affordable
            else:
                wanted = _has_bit(tl.load(word_ptrs, mask=is_term, other=0), offs_cluster)
            logits = tl.where(is_term & ~wanted, logits, float("-inf"))
            values = load_rows(value_mean_ptr, of_cluster, offs_summary, mask_summary, DV, DVP)
            largest, total, weighted = include(logits, values, largest, total, weighted, ACC, PRECISION)
    nothing = total == 0
    weighted /= tl.where(nothing, 1.0, total)[:, None]
    store_rows(out_ptr, head * length, offs_row, mask_row, weighted, DV, DVP)
    log_total = tl.where(nothing, float("-inf"), largest + tl.log(total) + shift)
    tl.store(lse_ptr + head * length + offs_row, log_total, mask=mask_row)


@kernel(stage="selection", do_not_specialize=["budget"])
def _find_lowest_bin(counts_ptr, lowest_ptr, budget):
    """With this bin and all above it, a head has no more pairs than its budget."""
    head, number = tl.program_id(0), tl.arange(0, _BINS)
    count = tl.load(counts_ptr + head * _BINS + number)
    taken = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    tl.store(lowest_ptr + head, tl.sum((taken > budget).to(tl.int32), 0))
