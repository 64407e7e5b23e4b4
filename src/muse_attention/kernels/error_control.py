"""Stage 4, first half, by tolerance: a query retrieves every bucket whose summary is expected to be wrong by more.

A summary's expected error is its weight in the softmax times sigma, the spread of the query's logits over its keys. To
open a cluster and to retrieve a block of it are comparisons, and bits. Pairs above the tolerance are counted by their
error; a head that has more of them than its budget gives those of smallest error back, in a second pass that all other
heads leave at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from muse_attention.budget import BINS_PER_OCTAVE, ERROR_BINS, SMALLEST_OCTAVE
from muse_attention.kernels.numbers import exp_of_less, load_rows
from muse_attention.kernels.opened import list_opened_bits
from muse_attention.kernels.segments import ROWS_OF_TILE, Segments, score
from muse_attention.kernels.summaries import ScoredSummaries
from muse_attention.structures import Selection

OPEN = {
    128: {"CLUSTERS": 64, "num_warps": 4, "num_stages": 3},
    256: {"CLUSTERS": 64, "num_warps": 4, "num_stages": 2},
    512: {"CLUSTERS": 32, "num_warps": 4, "num_stages": 1},
}
RETRIEVE = {
    128: {"LISTED": 16, "num_warps": 4, "num_stages": 2},
    256: {"LISTED": 16, "num_warps": 4, "num_stages": 2},
    512: {"LISTED": 8, "num_warps": 4, "num_stages": 1},
}
_BINS = tl.constexpr(ERROR_BINS)
_PER_OCTAVE = tl.constexpr(BINS_PER_OCTAVE)
_SMALLEST = tl.constexpr(SMALLEST_OCTAVE)


def select(
    segments: Segments,
    of_buckets: ScoredSummaries,
    seen: ScoredSummaries,
    own_lse: Tensor,
    words: int,
    *,
    tolerance: float,
    mean_bucket: float,
    budget: int,
) -> Selection:
    """What each query opens and retrieves: (H, N, words) and (H, N, nb, words), in the order of the inputs.

    `own_lse` (H, N) is that of the queries' own blocks; `budget` is the most pairs of a head.
    """
    heads, length, _ = segments.residuals.shape
    integers = segments.groups.order
    chosen = Selection(
        integers.new_zeros(heads, length, words), integers.new_zeros(heads, length, segments.blocks, words)
    )
    lse = own_lse.new_empty(heads, length)
    tiles = segments.tiles
    where = (*tiles.parts(), segments.groups.order)
    _open_clusters[tiles.grid](
        segments.residuals, segments.widths, *seen.tables_of_logits(), *where, own_lse, lse, chosen.opened, tolerance,
        *segments.sizes, words, ROWS=ROWS_OF_TILE, **segments.constants, **segments.fit(OPEN, 1),
    )  # fmt: skip
    listed = list_opened_bits(segments, chosen.opened)
    counts = own_lse.new_zeros(heads, ERROR_BINS, dtype=integers.dtype).long()
    lowest = integers.new_zeros(heads)
    for is_first in (1, 0):
        _retrieve_blocks[tiles.grid](
            segments.residuals, segments.widths, *of_buckets.tables_of_logits(), *where, listed.listed, listed.number,
            lse, chosen.opened, chosen.retrieved, counts, lowest, is_first, tolerance, mean_bucket, *segments.sizes,
            words, ROWS=ROWS_OF_TILE, **segments.constants, **segments.fit(RETRIEVE, 1),
        )  # fmt: skip
        if is_first:
            _find_lowest_bin[(heads,)](counts, lowest, min(budget, (1 << 62)))
    return chosen


@triton.jit
def _expected_error(logits, lse, sigma):
    """A summary's weight in the softmax, times how far the logits of its keys are apart; 0 where there is none."""
    return tl.where(logits == float("-inf"), 0.0, exp_of_less(logits, lse[:, None]) * sigma)


@triton.jit(do_not_specialize=["tolerance", "length", "blocks", "query_clusters", "words"])
def _open_clusters(
    residuals, widths, seen_mass, seen_key_mean, seen_deviation, seen_most, tile_group, tile_begin, tile_end, order,
    own_lse, lse, opened, tolerance, length, blocks, query_clusters, key_clusters, words, D: tl.constexpr,
    DP: tl.constexpr, IS_CAUSAL: tl.constexpr, SECOND_ORDER: tl.constexpr, ROWS: tl.constexpr, CLUSTERS: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Open every cluster whose accumulated summary has an error above the tolerance. `opened` is 0 before."""
    head = tl.program_id(1).to(tl.int64)
    tile = head * tl.num_programs(0) + tl.program_id(0)
    segment = tl.load(tile_group + tile)
    if segment < 0:
        return
    begin = tl.load(tile_begin + tile)
    place = tl.arange(0, ROWS)
    is_row = place < tl.load(tile_end + tile) - begin
    first_place = head * length + begin
    block = segment % blocks
    if IS_CAUSAL and block == 0:
        return
    row = head * length + tl.load(order + first_place + place, mask=is_row, other=0)
    residual = load_rows(residuals, first_place, place, is_row, D, DP)
    width = tl.load(widths + first_place + place, mask=is_row, other=0.0)
    of_block = ((head * query_clusters + segment // blocks) * blocks + block) * key_clusters
    of_sizes = (head * blocks + block) * key_clusters
    # The lse of the own block and of all that is seen of every cluster.
    largest = tl.load(own_lse + row, mask=is_row, other=0.0).to(ACC)
    total = tl.full([ROWS], 1.0, ACC)
    for first in range(0, key_clusters, CLUSTERS):
        cluster = first + tl.arange(0, CLUSTERS)
        _, logits = score(
            residual, width, seen_mass, seen_key_mean, seen_deviation, seen_most, of_block, of_sizes, cluster,
            cluster < key_clusters, D, DP, SECOND_ORDER, ACC, PRECISION,
        )  # fmt: skip
        larger = tl.maximum(largest, tl.max(logits, 1))
        total = total * tl.exp(largest - larger) + tl.sum(exp_of_less(logits, larger[:, None]), 1)
        largest = larger
    row_lse = largest + tl.log(total)
    tl.store(lse + first_place + place, row_lse, mask=is_row)
    for first in range(0, key_clusters, CLUSTERS):
        cluster = first + tl.arange(0, CLUSTERS)
        is_cluster = cluster < key_clusters
        _, logits = score(
            residual, width, seen_mass, seen_key_mean, seen_deviation, seen_most, of_block, of_sizes, cluster,
            is_cluster, D, DP, SECOND_ORDER, ACC, PRECISION,
        )  # fmt: skip
        deviations = tl.load(seen_deviation + of_block + cluster, mask=is_cluster, other=0.0)
        errors = _expected_error(logits, row_lse, width[:, None] * deviations[None, :])
        bit = (place * 0 + 1)[:, None] << (cluster & 31)[None, :]
        tl.atomic_or(
            opened + row[:, None] * words + (cluster // 32)[None, :], bit,
            mask=(errors > tolerance) & is_row[:, None] & is_cluster[None, :], sem="relaxed",
        )  # fmt: skip


@triton.jit(do_not_specialize=["is_first", "tolerance", "mean_bucket", "length", "blocks", "query_clusters", "words"])
def _retrieve_blocks(
    residuals, widths, mass, key_mean, deviation, most, tile_group, tile_begin, tile_end, order, listed, listed_number,
    lse, opened, retrieved, counts, lowest, is_first, tolerance, mean_bucket, length, blocks, query_clusters,
    key_clusters, words, D: tl.constexpr, DP: tl.constexpr, IS_CAUSAL: tl.constexpr, SECOND_ORDER: tl.constexpr,
    ROWS: tl.constexpr, LISTED: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of every opened cluster, retrieve the blocks whose summary has an error above the tolerance, and count them by
    their error; in the second pass, give back those below the lowest bin that the head can afford.

    `retrieved` is 0 before the first pass. Both passes are one kernel, so that they find the same errors.
    """
    head = tl.program_id(1).to(tl.int64)
    tile = head * tl.num_programs(0) + tl.program_id(0)
    segment = tl.load(tile_group + tile)
    if segment < 0:
        return
    lowest_bin = tl.load(lowest + head)
    if is_first == 0 and lowest_bin == 0:
        return
    begin = tl.load(tile_begin + tile)
    place = tl.arange(0, ROWS)
    is_row = place < tl.load(tile_end + tile) - begin
    first_place = head * length + begin
    own_block = segment % blocks
    seen_blocks = own_block if IS_CAUSAL else blocks
    if seen_blocks == 0:
        return
    row = head * length + tl.load(order + first_place + place, mask=is_row, other=0)
    residual = load_rows(residuals, first_place, place, is_row, D, DP)
    width = tl.load(widths + first_place + place, mask=is_row, other=0.0)
    row_lse = tl.load(lse + first_place + place, mask=is_row, other=0.0)
    line = head * query_clusters + segment // blocks
    of_cluster = line * blocks * key_clusters
    of_sizes = head * blocks * key_clusters
    listed_here = tl.load(listed_number + line)
    listed += line * key_clusters
    column = tl.arange(0, 2 * LISTED)
    for first in range(0, listed_here, LISTED):
        index = first + column % LISTED
        cluster = tl.load(listed + index, mask=index < listed_here, other=0)
        own = tl.load(
            opened + row[:, None] * words + (cluster // 32)[None, :],
            mask=is_row[:, None] & (index < listed_here)[None, :], other=0,
        )  # fmt: skip
        is_open = ((own >> (cluster & 31)[None, :]) & 1) != 0
        if tl.max(tl.max(is_open.to(tl.int32), 1), 0) > 0:
            bit = (place * 0 + 1)[:, None] << (cluster & 31)[None, :]
            for block in range(0, seen_blocks, 2):
                of_column = block + column // LISTED
                is_cluster = (index < listed_here) & (of_column < seen_blocks)
                if not IS_CAUSAL:
                    is_cluster &= of_column != own_block
                summary = cluster + column // LISTED * key_clusters
                at, of_size = of_cluster + block * key_clusters, of_sizes + block * key_clusters
                _, logits = score(
                    residual, width, mass, key_mean, deviation, most, at, of_size, summary, is_cluster, D, DP,
                    SECOND_ORDER, ACC, PRECISION,
                )  # fmt: skip
                deviations = tl.load(deviation + at + summary, mask=is_cluster, other=0.0)
                mosts = tl.load(most + of_size + summary, mask=is_cluster, other=0.0)
                # A large bucket must be that much worse: retrieving it costs more. (`most^2 / 2` is log n.)
                smaller = tl.sqrt(mean_bucket * tl.exp(-0.5 * mosts * mosts))
                errors = _expected_error(logits, row_lse, width[:, None] * (deviations * smaller)[None, :])
                wanted = (errors > tolerance) & is_open & is_cluster[None, :]
                octave = tl.log2(tl.where(wanted, errors, 1.0)) - _SMALLEST
                bins = tl.minimum(tl.maximum(octave * _PER_OCTAVE, 0.0), _BINS - 1).to(tl.int32)
                at_word = retrieved + (row[:, None] * blocks + of_column[None, :]) * words + (cluster // 32)[None, :]
                if is_first != 0:
                    tl.atomic_or(at_word, bit, mask=wanted, sem="relaxed")
                    one = tl.full([ROWS, 2 * LISTED], 1, tl.int64)
                    tl.atomic_add(counts + head * _BINS + bins, one, mask=wanted, sem="relaxed")
                else:
                    tl.atomic_and(at_word, ~bit, mask=wanted & (bins < lowest_bin), sem="relaxed")


@triton.jit(do_not_specialize=["budget"])
def _find_lowest_bin(counts, lowest, budget):
    """With this bin and all above it, a head has no more pairs than its budget."""
    head, number = tl.program_id(0), tl.arange(0, _BINS)
    count = tl.load(counts + head * _BINS + number)
    taken = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    tl.store(lowest + head, tl.sum((taken > budget).to(tl.int32), 0))
