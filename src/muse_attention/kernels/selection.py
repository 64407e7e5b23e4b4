"""Stage 4: score the summaries, select what to retrieve, and attend to the summaries of all the rest.

The queries of a query cluster open much the same key clusters. So the clusters that any of them opens are listed, and
the blocks of all listed clusters are scored for each query: a small dense matrix product. Which summaries are then
terms of a query's softmax is a table of bits: one for each cluster that it did not open, whose accumulated summary is a
term, and one for each listed cluster and block, if it opened the cluster but did not retrieve the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.kernels.grouping import Groups, Tiles
from muse_attention.kernels.numbers import (
    arithmetic,
    fitting,
    gradient_dtype,
    index_in_order,
    load_rows,
    padded,
    store_rows,
)
from muse_attention.precision import compute_dtype
from muse_attention.structures import Partial, Selection, Summaries

ROWS_OF_TILE = 64
"""Queries of one segment that one program works on."""
SELECT_CLUSTERS = {"num_warps": 4}
SELECT_BLOCKS = {"CLUSTERS": 16, "num_warps": 4, "num_stages": 1}
ATTEND = {
    128: {"CLUSTERS": 64, "LISTED": 32, "num_warps": 4, "num_stages": 3},
    256: {"CLUSTERS": 64, "LISTED": 32, "num_warps": 4, "num_stages": 2},
    512: {"CLUSTERS": 32, "LISTED": 16, "num_warps": 4, "num_stages": 1},
}
ATTEND_BACKWARD_TO_QUERIES = {
    128: {"CLUSTERS": 64, "LISTED": 32, "num_warps": 4, "num_stages": 3},
    256: {"CLUSTERS": 64, "LISTED": 32, "num_warps": 4, "num_stages": 2},
    512: {"CLUSTERS": 32, "LISTED": 16, "num_warps": 4, "num_stages": 1},
}
ATTEND_BACKWARD_TO_SEEN = {
    128: {"CLUSTERS": 64, "ROWS": 64, "num_warps": 4, "num_stages": 1},
    256: {"CLUSTERS": 64, "ROWS": 32, "num_warps": 4, "num_stages": 1},
    512: {"CLUSTERS": 32, "ROWS": 16, "num_warps": 4, "num_stages": 1},
}
ATTEND_BACKWARD_TO_BLOCKS = {
    128: {"CLUSTERS": 64, "ROWS": 64, "num_warps": 4, "num_stages": 1},
    256: {"CLUSTERS": 32, "ROWS": 64, "num_warps": 4, "num_stages": 1},
    512: {"CLUSTERS": 32, "ROWS": 16, "num_warps": 4, "num_stages": 1},
}
_WORD = 32
"""Bits of a word of the terms."""


@dataclass(frozen=True)
class Segments:
    """The queries of each (query cluster, block), of all heads."""

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
            **arithmetic(self.residuals.dtype),
        }

    def few(self, launch: dict[str, int]) -> dict[str, int]:
        """No more columns at a time than there are key clusters."""
        most = padded(self.key_clusters)
        return {
            name: min(number, most) if name in ("CLUSTERS", "LISTED") else number for name, number in launch.items()
        }

    def fit(self, launch: dict[int, dict[str, int]], value_dim: int) -> dict[str, int]:
        return self.few(fitting(launch, self.residuals.shape[-1], value_dim, self.residuals.dtype))


@dataclass(frozen=True)
class OpenedClusters:
    """The key clusters that any query of a query cluster opens: only their blocks' summaries are terms of anything."""

    listed: Tensor
    """(H, Q, K) int32: their numbers, ascending"""
    number: Tensor
    """(H, Q) int32: how many they are"""
    place: Tensor
    """(H, Q, K) int16: where a cluster stands among the listed ones, or -1"""


@dataclass(frozen=True)
class Terms:
    """Which summaries each query attends to, in bits. Rows are in the order of the segments."""

    clusters: Tensor
    """(H, words, N) int32: a bit for each key cluster"""
    blocks: Tensor
    """(H, nb, words, N) int32: a bit for each listed cluster"""
    opened: OpenedClusters


def select(
    segments: Segments, of_buckets: Summaries, seen: Summaries, clusters: int, blocks: int
) -> tuple[Selection, OpenedClusters]:
    """The `clusters` best clusters of each query by the summaries it sees, and the `blocks` best blocks in each."""
    heads, length, _ = segments.residuals.shape
    opened = segments.groups.order.new_empty(heads, length, clusters)
    retrieved = segments.groups.order.new_empty(heads, length, clusters, blocks)
    if clusters == 0:
        return Selection(opened, retrieved), list_opened(segments, opened)
    tiles = segments.tiles
    where = (*tiles.parts(), segments.groups.order)
    _select_clusters[tiles.grid](
        segments.residuals, seen.log_mass, seen.key_mean, *where, opened, retrieved, clusters, blocks,
        *segments.sizes, ROWS=ROWS_OF_TILE, CP=padded(segments.key_clusters),
        IS_PACKED=segments.residuals.dtype in (torch.float16, torch.bfloat16), **segments.constants, **SELECT_CLUSTERS,
    )  # fmt: skip
    listed = list_opened(segments, opened)
    _select_blocks[tiles.grid](
        segments.residuals, of_buckets.log_mass, of_buckets.key_mean, *where, listed.listed, listed.number, opened,
        retrieved, clusters, blocks, *segments.sizes, ROWS=ROWS_OF_TILE, IS_SINGLE=blocks == 1, **segments.constants,
        **segments.few(SELECT_BLOCKS),
    )  # fmt: skip
    return Selection(opened, retrieved), listed


def list_opened(segments: Segments, opened: Tensor) -> OpenedClusters:
    """`opened` is (H, N, clusters), in the order of the inputs."""
    heads, length, clusters = opened.shape
    shape = (heads, segments.query_clusters, segments.key_clusters)
    found = OpenedClusters(
        opened.new_empty(shape), opened.new_empty(shape[:2]), opened.new_empty(shape, dtype=torch.int16)
    )
    if clusters == 0:
        found.number.zero_()
        found.place.fill_(-1)
        return found
    _list_opened[(segments.query_clusters, heads)](
        segments.groups.order, segments.groups.starts, opened, found.listed, found.number, found.place, length,
        segments.blocks, segments.key_clusters, OPENED=clusters, OP=triton.next_power_of_2(clusters), ROWS=64,
        CP=padded(segments.key_clusters),
    )  # fmt: skip
    return found


def find_terms(segments: Segments, selection: Selection, listed: OpenedClusters) -> Terms:
    """The terms that a selection leaves; `listed` is `list_opened` of it."""
    heads, length, clusters, blocks = selection.retrieved.shape
    words = triton.cdiv(segments.key_clusters, _WORD)
    terms = Terms(
        selection.opened.new_empty(heads, words, length),
        selection.opened.new_empty(heads, segments.blocks, words, length),
        listed,
    )
    _mark_terms[segments.tiles.grid](
        *segments.tiles.parts(), segments.groups.order, selection.opened, selection.retrieved, listed.place,
        terms.clusters, terms.blocks, *segments.sizes, OPENED=clusters, OP=max(1, triton.next_power_of_2(clusters)),
        RETRIEVED=blocks, WORDS=words, IS_CAUSAL=segments.is_causal, ROWS=ROWS_OF_TILE,
    )  # fmt: skip
    return terms


def attend(segments: Segments, of_buckets: Summaries, seen: Summaries, terms: Terms) -> Partial:
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
        segments.residuals, *of_buckets.parts(), *seen.parts(), *tiles.parts(), segments.groups.order, terms.clusters,
        terms.blocks, terms.opened.listed, terms.opened.number, partial.out, partial.lse, *segments.sizes,
        terms.clusters.shape[1], DV=value_dim, DVP=padded(value_dim), ROWS=ROWS_OF_TILE, **segments.constants,
        **segments.fit(ATTEND, value_dim),
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
    differentiable_aggregation: bool,
    fill_in: tuple[Summaries, Summaries],
) -> Tensor:
    """Gradients of the queries, (H, N, D) in the order of the inputs, and of both kinds of summaries in `fill_in`.

    Of the blocks' summaries only those of opened clusters have gradients; the rest is not written.

    `grad_out` (H, N, Dv), `lse` and `delta` (H, N) are in the order of the segments, and those of the merged softmax.
    With differentiable aggregation the gradient of a log-mass is taken at fixed sums instead of fixed means.
    """
    heads, length, head_dim = segments.residuals.shape
    value_dim = seen.value_mean.shape[-1]
    grad_queries = segments.residuals.new_empty(heads, length, head_dim, dtype=gradient_dtype(segments.residuals.dtype))
    tiles = segments.tiles
    words = terms.clusters.shape[1]
    constants = {"DV": value_dim, "DVP": padded(value_dim), **segments.constants}
    _summaries_backward_to_queries[tiles.grid](
        grad_out, lse, delta, segments.residuals, *of_buckets.parts(), *seen.parts(), *tiles.parts(),
        segments.groups.order, terms.clusters, terms.blocks, terms.opened.listed, terms.opened.number, grad_queries,
        *segments.sizes, words, ROWS=ROWS_OF_TILE, **constants, **segments.fit(ATTEND_BACKWARD_TO_QUERIES, value_dim),
    )  # fmt: skip
    for is_seen, summaries, gradient, launches, bits in (
        (False, of_buckets, fill_in[0], ATTEND_BACKWARD_TO_BLOCKS, terms.blocks),
        (True, seen, fill_in[1], ATTEND_BACKWARD_TO_SEEN, terms.clusters),
    ):
        launch = segments.fit(launches, value_dim)
        grid = (
            triton.cdiv(segments.key_clusters, launch["CLUSTERS"]),
            segments.query_clusters * segments.blocks,
            heads,
        )
        _backward_to_summaries[grid](
            grad_out, lse, delta, segments.residuals, *summaries.parts(), segments.groups.starts, bits,
            terms.opened.listed, terms.opened.number, *gradient.parts(), *segments.sizes, words, IS_SEEN=is_seen,
            IS_FROZEN=not differentiable_aggregation, **constants, **launch,
        )  # fmt: skip
    return grad_queries


@triton.jit
def _score(
    residual, mass, key_mean, first, cluster, is_cluster, D: tl.constexpr, DP: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Means of the keys of the summaries `first + cluster`, and the logits of the queries against them."""
    means = load_rows(key_mean, first, cluster, is_cluster, D, DP)
    masses = tl.load(mass + first + cluster, mask=is_cluster, other=float("-inf"))
    return means, tl.dot(residual, tl.trans(means), input_precision=PRECISION, out_dtype=ACC) + masses[None, :]


@triton.jit
def _load_words(bits, place, is_row, first, length, words, COLUMNS: tl.constexpr):
    """The words behind `COLUMNS` (up to 64) columns from `first` on, which begin a word or lie in one.

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
def _bit_of_row(low, high, first, COLUMNS: tl.constexpr):
    """(rows, columns): whether a bit is set."""
    column = tl.arange(0, COLUMNS)
    if COLUMNS > 32:
        word = tl.where((column < 32)[None, :], low[:, None], high[:, None])
    else:
        word = low[:, None]
    return ((word >> ((first + column) & 31)[None, :]) & 1) != 0


@triton.jit
def _bit_of_column(low, high, first, COLUMNS: tl.constexpr):
    """(columns, rows): the same, transposed."""
    column = tl.arange(0, COLUMNS)
    if COLUMNS > 32:
        word = tl.where((column < 32)[:, None], low[None, :], high[None, :])
    else:
        word = low[None, :]
    return ((word >> ((first + column) & 31)[:, None]) & 1) != 0


@triton.jit(do_not_specialize=["opened_clusters", "retrieved_blocks", "length", "blocks", "query_clusters"])
def _select_clusters(
    residuals, seen_mass, seen_key_mean, tile_group, tile_begin, tile_end, order, opened, retrieved, opened_clusters,
    retrieved_blocks, length, blocks, query_clusters, key_clusters, D: tl.constexpr, DP: tl.constexpr,
    IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, CP: tl.constexpr, IS_PACKED: tl.constexpr, ACC: tl.constexpr,
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
    row = tl.load(order + first_place + place, mask=is_row, other=0)
    cluster = tl.arange(0, CP)
    is_cluster = cluster < key_clusters
    of_block = ((head * query_clusters + segment // blocks) * blocks + segment % blocks) * key_clusters
    residual = load_rows(residuals, first_place, place, is_row, D, DP)
    # (Block 0 of causal attention sees nothing: its masses are all -inf.)
    _, logits = _score(residual, seen_mass, seen_key_mean, of_block, cluster, is_cluster, D, DP, ACC, PRECISION)
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


@triton.jit(do_not_specialize=["opened_clusters", "retrieved_blocks", "length", "blocks", "query_clusters"])
def _select_blocks(
    residuals, mass, key_mean, tile_group, tile_begin, tile_end, order, listed, listed_number, opened, retrieved,
    opened_clusters, retrieved_blocks, length, blocks, query_clusters, key_clusters, D: tl.constexpr, DP: tl.constexpr,
    IS_CAUSAL: tl.constexpr, IS_SINGLE: tl.constexpr, ROWS: tl.constexpr, CLUSTERS: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
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
                _, logits = _score(residual, mass, key_mean, of_block, cluster, is_cluster, D, DP, ACC, PRECISION)
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


@triton.jit(do_not_specialize=["length", "blocks", "key_clusters"])
def _list_opened(
    order, starts, opened, listed, listed_number, listed_place, length, blocks, key_clusters, OPENED: tl.constexpr,
    OP: tl.constexpr, ROWS: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """The clusters that any query of a query cluster opens."""
    query_clusters, head = tl.num_programs(0), tl.program_id(1).to(tl.int64)
    line = head * query_clusters + tl.program_id(0)
    cluster, number = tl.arange(0, CP), tl.arange(0, OP)
    listed_place += line * key_clusters
    tl.store(listed_place + cluster, tl.full([CP], -1, tl.int16), mask=cluster < key_clusters)
    tl.debug_barrier()
    starts += head * (query_clusters * blocks + 1) + tl.program_id(0) * blocks
    end = tl.load(starts + blocks)
    for begin in range(tl.load(starts), end, ROWS):
        place = begin + tl.arange(0, ROWS)
        row = head * length + tl.load(order + head * length + place, mask=place < end, other=0)
        own = tl.load(
            opened + row[:, None] * OPENED + number[None, :], mask=(place < end)[:, None] & (number < OPENED)[None, :],
            other=-1,
        )  # fmt: skip
        # (Many write here, but all the same.)
        tl.store(listed_place + own, tl.zeros([ROWS, OP], tl.int16), mask=own >= 0)
    tl.debug_barrier()
    is_listed = tl.load(listed_place + cluster, mask=cluster < key_clusters, other=-1) >= 0
    to = tl.cumsum(is_listed.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(listed_place + cluster, to.to(tl.int16), mask=is_listed)
    tl.store(listed + line * key_clusters + to, cluster, mask=is_listed)
    tl.store(listed_number + line, tl.sum(is_listed.to(tl.int32), 0))


@triton.jit(do_not_specialize=["length", "blocks", "query_clusters", "key_clusters"])
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
def _attend_to_summaries(
    residuals, mass, key_mean, value_mean, seen_mass, seen_key_mean, seen_value_mean, tile_group, tile_begin, tile_end,
    order, cluster_terms, block_terms, listed, listed_number, out, lse, length, blocks, query_clusters, key_clusters,
    words, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, IS_CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, CLUSTERS: tl.constexpr, LISTED: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
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
    largest = tl.full([ROWS], float("-inf"), ACC)
    total = tl.zeros([ROWS], ACC)
    weighted = tl.zeros([ROWS, DVP], ACC)
    if seen_blocks > 0:
        residual = load_rows(residuals, first_place, place, is_row, D, DP)
        for first in range(0, key_clusters, CLUSTERS):
            cluster = first + tl.arange(0, CLUSTERS)
            is_cluster = cluster < key_clusters
            bits = cluster_terms + head * words * length + begin
            low, high = _load_words(bits, place, is_row, first, length, words, CLUSTERS)
            of_block = of_cluster + own_block * key_clusters
            _, logits = _score(residual, seen_mass, seen_key_mean, of_block, cluster, is_cluster, D, DP, ACC, PRECISION)
            logits = tl.where(_bit_of_row(low, high, first, CLUSTERS), logits, float("-inf"))
            values = load_rows(seen_value_mean, of_block, cluster, is_cluster, DV, DVP)
            largest, total, weighted = _include(logits, values, largest, total, weighted, ACC, PRECISION)
        listed_here = tl.load(listed_number + line)
        listed += line * key_clusters
        for first in range(0, listed_here, LISTED):
            index = first + tl.arange(0, LISTED)
            is_cluster = index < listed_here
            cluster = tl.load(listed + index, mask=is_cluster, other=0)
            for block in range(seen_blocks):
                bits = block_terms + (head * blocks + block) * words * length + begin
                low, high = _load_words(bits, place, is_row, first, length, words, LISTED)
                of_block = of_cluster + block * key_clusters
                _, logits = _score(residual, mass, key_mean, of_block, cluster, is_cluster, D, DP, ACC, PRECISION)
                if not IS_CAUSAL:
                    logits = tl.where(own_block == block, float("-inf"), logits)
                logits = tl.where(_bit_of_row(low, high, first, LISTED), logits, float("-inf"))
                values = load_rows(value_mean, of_block, cluster, is_cluster, DV, DVP)
                largest, total, weighted = _include(logits, values, largest, total, weighted, ACC, PRECISION)
    row = tl.load(order + first_place + place, mask=is_row, other=0)
    nothing = total == 0
    weighted /= tl.where(nothing, 1.0, total)[:, None]
    log_total = tl.where(nothing, float("-inf"), largest + tl.log(total))
    store_rows(out, head * length, row, is_row, weighted, DV, DVP)
    tl.store(lse + head * length + row, log_total, mask=is_row)


@triton.jit
def _gradient_of_logits(logits, grad_out, values, lse, delta, ACC: tl.constexpr, PRECISION: tl.constexpr):
    weights = tl.exp(logits - lse[:, None])
    response = tl.dot(grad_out, tl.trans(values), input_precision=PRECISION, out_dtype=ACC)
    return weights * (response - delta[:, None])


@triton.jit(do_not_specialize=["length", "blocks", "query_clusters"])
def _summaries_backward_to_queries(
    grad_out, lse, delta, residuals, mass, key_mean, value_mean, seen_mass, seen_key_mean, seen_value_mean, tile_group,
    tile_begin, tile_end, order, cluster_terms, block_terms, listed, listed_number, grad_queries, length, blocks,
    query_clusters, key_clusters, words, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, CLUSTERS: tl.constexpr, LISTED: tl.constexpr, ACC: tl.constexpr,
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
    gradient = tl.zeros([ROWS, DP], ACC)
    if seen_blocks > 0:
        residual = load_rows(residuals, first_place, place, is_row, D, DP)
        some_grad = load_rows(grad_out, first_place, place, is_row, DV, DVP)
        row_lse = tl.load(lse + first_place + place, mask=is_row, other=float("inf"))
        row_delta = tl.load(delta + first_place + place, mask=is_row, other=0.0)
        for first in range(0, key_clusters, CLUSTERS):
            cluster = first + tl.arange(0, CLUSTERS)
            is_cluster = cluster < key_clusters
            bits = cluster_terms + head * words * length + begin
            low, high = _load_words(bits, place, is_row, first, length, words, CLUSTERS)
            of_block = of_cluster + own_block * key_clusters
            means, logits = _score(
                residual, seen_mass, seen_key_mean, of_block, cluster, is_cluster, D, DP, ACC, PRECISION
            )
            logits = tl.where(_bit_of_row(low, high, first, CLUSTERS), logits, float("-inf"))
            values = load_rows(seen_value_mean, of_block, cluster, is_cluster, DV, DVP)
            d_logits = _gradient_of_logits(logits, some_grad, values, row_lse, row_delta, ACC, PRECISION)
            gradient = tl.dot(d_logits.to(means.dtype), means, gradient, input_precision=PRECISION, out_dtype=ACC)
        listed_here = tl.load(listed_number + line)
        listed += line * key_clusters
        for first in range(0, listed_here, LISTED):
            index = first + tl.arange(0, LISTED)
            is_cluster = index < listed_here
            cluster = tl.load(listed + index, mask=is_cluster, other=0)
            for block in range(seen_blocks):
                bits = block_terms + (head * blocks + block) * words * length + begin
                low, high = _load_words(bits, place, is_row, first, length, words, LISTED)
                of_block = of_cluster + block * key_clusters
                means, logits = _score(residual, mass, key_mean, of_block, cluster, is_cluster, D, DP, ACC, PRECISION)
                if not IS_CAUSAL:
                    logits = tl.where(own_block == block, float("-inf"), logits)
                logits = tl.where(_bit_of_row(low, high, first, LISTED), logits, float("-inf"))
                values = load_rows(value_mean, of_block, cluster, is_cluster, DV, DVP)
                d_logits = _gradient_of_logits(logits, some_grad, values, row_lse, row_delta, ACC, PRECISION)
                gradient = tl.dot(d_logits.to(means.dtype), means, gradient, input_precision=PRECISION, out_dtype=ACC)
    row = tl.load(order + first_place + place, mask=is_row, other=0)
    store_rows(grad_queries, head * length, row, is_row, gradient, D, DP)


@triton.jit(do_not_specialize=["length", "blocks", "query_clusters"])
def _backward_to_summaries(
    grad_out, lse, delta, residuals, mass, key_mean, value_mean, starts, terms, listed, listed_number, grad_mass,
    grad_key_mean, grad_value_mean, length, blocks, query_clusters, key_clusters, words, IS_SEEN: tl.constexpr,
    IS_FROZEN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, CLUSTERS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of some summaries of one block, what they receive from all queries of their query cluster that see them.

    Accumulated summaries are seen by the queries of their own block, a block's summaries by those of later blocks, or
    of all other blocks, if any of these opens their cluster. The queries of a cluster lie block after block.
    """
    head = tl.program_id(2).to(tl.int64)
    query_cluster, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    line = head * query_clusters + query_cluster
    cluster = tl.program_id(0) * CLUSTERS + tl.arange(0, CLUSTERS)
    if IS_SEEN:
        is_cluster = cluster < key_clusters
    else:
        number = tl.load(listed_number + line)
        if tl.program_id(0) * CLUSTERS >= number:
            return
        is_cluster = cluster < number
        cluster = tl.load(listed + line * key_clusters + cluster, mask=is_cluster, other=0)
    of_block = (line * blocks + block) * key_clusters
    means = load_rows(key_mean, of_block, cluster, is_cluster, D, DP)
    values = load_rows(value_mean, of_block, cluster, is_cluster, DV, DVP)
    masses = tl.load(mass + of_block + cluster, mask=is_cluster, other=float("-inf"))
    d_mass = tl.zeros([CLUSTERS], ACC)
    d_means = tl.zeros([CLUSTERS, DP], ACC)
    d_values = tl.zeros([CLUSTERS, DVP], ACC)
    starts += head * (blocks * query_clusters + 1) + query_cluster * blocks
    own_begin = tl.load(starts + block)
    own_end = tl.load(starts + block + 1)
    if IS_SEEN:
        first_row, last_row = own_begin, own_end
    elif IS_CAUSAL:
        first_row, last_row = own_end, tl.load(starts + blocks)
    else:
        first_row, last_row = tl.load(starts), tl.load(starts + blocks)
    if IS_SEEN:
        terms += head * words * length
    else:
        terms += (head * blocks + block) * words * length
    first = tl.program_id(0) * CLUSTERS
    for begin in range(first_row, last_row, ROWS):
        place = begin + tl.arange(0, ROWS)
        is_row = place < last_row
        if (not IS_SEEN) and (not IS_CAUSAL):
            is_row = is_row & ((place < own_begin) | (place >= own_end))
        low, high = _load_words(terms, place, is_row, first, length, words, CLUSTERS)
        residual = load_rows(residuals, head * length, place, is_row, D, DP)
        some_grad = load_rows(grad_out, head * length, place, is_row, DV, DVP)
        row_lse = tl.load(lse + head * length + place, mask=is_row, other=float("inf"))
        row_delta = tl.load(delta + head * length + place, mask=is_row, other=0.0)
        # Summaries are the rows here, so that weights and gradients of logits enter the products below as they are.
        logits = tl.dot(means, tl.trans(residual), input_precision=PRECISION, out_dtype=ACC) + masses[:, None]
        logits = tl.where(_bit_of_column(low, high, first, CLUSTERS), logits, float("-inf"))
        weights = tl.exp(logits - row_lse[None, :])
        d_values = tl.dot(weights.to(some_grad.dtype), some_grad, d_values, input_precision=PRECISION, out_dtype=ACC)
        response = tl.dot(values, tl.trans(some_grad), input_precision=PRECISION, out_dtype=ACC)
        d_logits = weights * (response - row_delta[None, :])
        # The gradient of the values has `sum(weights * response)` along the values.
        d_mass += tl.sum(d_logits, 1) if IS_FROZEN else tl.sum(-weights * row_delta[None, :], 1)
        d_means = tl.dot(d_logits.to(residual.dtype), residual, d_means, input_precision=PRECISION, out_dtype=ACC)
    if not IS_FROZEN:
        d_mass -= tl.sum(d_means * means.to(ACC), 1)
    tl.store(grad_mass + of_block + cluster, d_mass, mask=is_cluster)
    store_rows(grad_key_mean, of_block, cluster, is_cluster, d_means, D, DP)
    store_rows(grad_value_mean, of_block, cluster, is_cluster, d_values, DV, DVP)
