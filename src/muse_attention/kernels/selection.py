"""Stage 4: score the summaries, select what to retrieve, and attend to the summaries of all the rest.

Which summaries are terms of a query's softmax is a table of words, one for each query and key cluster: -1 (closed) if
the cluster was not opened, its accumulated summary is then a term; else a bit for each block that was not retrieved,
whose own summary is then a term. The queries of a tile share a query cluster and open much the same key clusters, so
the summaries of all blocks are scored for every cluster that any of them opens, as a small dense matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.kernels.grouping import Groups, Tiles
from muse_attention.kernels.numbers import arithmetic, index_in_order, load_rows, padded, store_rows
from muse_attention.precision import compute_dtype
from muse_attention.structures import Partial, Selection, Summaries

ROWS_OF_TILE = 64
"""Queries of one segment that one program works on."""
SELECT_CLUSTERS = {"num_warps": 4}
SELECT_BLOCKS = {"LISTED": 16, "num_warps": 4, "num_stages": 1}
ATTEND = {"CLUSTERS": 64, "LISTED": 16, "num_warps": 4, "num_stages": 3}
ATTEND_BACKWARD_TO_QUERIES = {"CLUSTERS": 64, "LISTED": 32, "num_warps": 4, "num_stages": 3}
ATTEND_BACKWARD_TO_SEEN = {"CLUSTERS": 64, "ROWS": 64, "num_warps": 4, "num_stages": 2}
ATTEND_BACKWARD_TO_BLOCKS = {"CLUSTERS": 64, "ROWS": 64, "num_warps": 4, "num_stages": 2}


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

    def fit(self, launch: dict[str, int]) -> dict[str, int]:
        """No more columns at a time than there are key clusters."""
        most = padded(self.key_clusters)
        return {name: min(number, most) if name in ("CLUSTERS", "LISTED") else number for name, number in launch.items()}


@dataclass(frozen=True)
class Terms:
    """Which summaries each query attends to."""

    words: Tensor
    """(H, planes, N, K), rows in the order of the segments"""
    listed: Tensor
    """(H, tiles, K) int32: the clusters that any query of the tile opens, ascending"""
    listed_number: Tensor
    """(H, tiles) int32"""
    blocks_of_word: int

    @classmethod
    def empty(cls, segments: Segments) -> Terms:
        heads, length, _ = segments.residuals.shape
        dtype, of_word = next(
            (dtype, bits)
            for dtype, bits in ((torch.int8, 8), (torch.int16, 16), (torch.int32, 32), (torch.int64, 32))
            if segments.blocks <= bits or dtype == torch.int64
        )
        planes = triton.cdiv(segments.blocks, of_word)
        tiles = segments.tiles.group
        return cls(
            torch.empty(heads, planes, length, segments.key_clusters, dtype=dtype, device=tiles.device),
            tiles.new_empty(*tiles.shape, segments.key_clusters),
            torch.empty_like(tiles),
            of_word,
        )

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.words, self.listed, self.listed_number

    @property
    def constants(self) -> dict[str, Any]:
        return {"PLANES": self.words.shape[1], "WORD": self.blocks_of_word}


@dataclass(frozen=True)
class OpenedClusters:
    """The key clusters that any query of a query cluster opens: only their blocks' summaries are terms of anything."""

    is_listed: Tensor
    """(H, Q, K) int8"""
    listed: Tensor
    """(H, Q, K) int32: their numbers, ascending"""
    listed_number: Tensor
    """(H, Q) int32"""


def select(
    segments: Segments, of_buckets: Summaries, seen: Summaries, clusters: int, blocks: int
) -> tuple[Selection, Terms]:
    """The `clusters` best clusters of each query by the summaries it sees, and the `blocks` best blocks in each."""
    heads, length, _ = segments.residuals.shape
    opened = segments.groups.order.new_empty(heads, length, clusters)
    retrieved = segments.groups.order.new_empty(heads, length, clusters, blocks)
    terms = Terms.empty(segments)
    is_written = terms.words.shape[1] == 1 and clusters < 128
    # While it is being selected, a word is the place of an opened cluster among those of its query.
    slots = terms.words if is_written else torch.empty_like(terms.words[:, 0], dtype=torch.int16)
    tiles = segments.tiles
    where = (*tiles.parts(), segments.groups.order)
    _select_clusters[tiles.grid](
        segments.residuals, seen.log_mass, seen.key_mean, *where, slots, terms.listed, terms.listed_number, opened,
        retrieved, clusters, blocks, *segments.sizes, ROWS=ROWS_OF_TILE, CP=padded(segments.key_clusters),
        IS_PACKED=segments.residuals.dtype in (torch.float16, torch.bfloat16), **segments.constants, **SELECT_CLUSTERS,
    )  # fmt: skip
    if clusters > 0:
        _select_blocks[tiles.grid](
            segments.residuals, of_buckets.log_mass, of_buckets.key_mean, *where, slots, terms.listed,
            terms.listed_number, retrieved, clusters, blocks, *segments.sizes, ROWS=ROWS_OF_TILE,
            HAS_WORDS=is_written, **segments.constants, **segments.fit(SELECT_BLOCKS),
        )  # fmt: skip
    selection = Selection(opened, retrieved)
    return selection, terms if is_written else find_terms(segments, selection)


def find_terms(segments: Segments, selection: Selection) -> Terms:
    """The terms that a selection leaves."""
    heads, length, clusters, blocks = selection.retrieved.shape
    terms = Terms.empty(segments)
    terms.words.fill_(-1)
    if clusters > 0:
        width = 512
        planes = terms.words.shape[1]
        _mark_terms[(triton.cdiv(length * clusters, width), heads * planes)](
            segments.groups.order, selection.opened, selection.retrieved, terms.words, length, segments.key_clusters,
            OPENED=clusters, RETRIEVED=blocks, WIDTH=width, **terms.constants,
        )  # fmt: skip
    _list_opened[segments.tiles.grid](
        *segments.tiles.parts(), *terms.tables, length, segments.key_clusters, ROWS=ROWS_OF_TILE,
        CLUSTERS=min(64, padded(segments.key_clusters)), PLANES=terms.words.shape[1],
    )  # fmt: skip
    return terms


def find_opened_clusters(segments: Segments, terms: Terms) -> OpenedClusters:
    heads = segments.residuals.shape[0]
    shape = (heads, segments.query_clusters, segments.key_clusters)
    found = OpenedClusters(
        terms.listed.new_empty(shape, dtype=torch.int8),
        terms.listed.new_empty(shape),
        terms.listed.new_empty(shape[:2]),
    )
    _list_of_cluster[(segments.query_clusters, heads)](
        segments.tiles.before, terms.listed, terms.listed_number, found.is_listed, found.listed, found.listed_number,
        segments.tiles.group.shape[1], segments.blocks, segments.key_clusters, CP=padded(segments.key_clusters),
    )  # fmt: skip
    return found


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
    _attend_to_summaries[tiles.grid](
        segments.residuals, *of_buckets.parts(), *seen.parts(), *tiles.parts(), segments.groups.order, *terms.tables,
        partial.out, partial.lse, *segments.sizes, DV=value_dim, DVP=padded(value_dim), ROWS=ROWS_OF_TILE,
        **terms.constants, **segments.constants, **segments.fit(ATTEND),
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
) -> tuple[Tensor, OpenedClusters]:
    """Gradients of the queries, (H, N, D) in the order of the inputs, and of both kinds of summaries in `fill_in`.

    Of the blocks' summaries only those of opened clusters have gradients; the rest is not written.

    `grad_out` (H, N, Dv), `lse` and `delta` (H, N) are in the order of the segments, and those of the merged softmax.
    With differentiable aggregation the gradient of a log-mass is taken at fixed sums instead of fixed means.
    """
    heads, length, head_dim = segments.residuals.shape
    value_dim = seen.value_mean.shape[-1]
    grad_queries = segments.residuals.new_empty(heads, length, head_dim, dtype=compute_dtype(segments.residuals.dtype))
    tiles = segments.tiles
    constants = {"DV": value_dim, "DVP": padded(value_dim), **terms.constants, **segments.constants}
    _summaries_backward_to_queries[tiles.grid](
        grad_out, lse, delta, segments.residuals, *of_buckets.parts(), *seen.parts(), *tiles.parts(),
        segments.groups.order, *terms.tables, grad_queries, *segments.sizes, ROWS=ROWS_OF_TILE, **constants,
        **segments.fit(ATTEND_BACKWARD_TO_QUERIES),
    )  # fmt: skip
    opened = find_opened_clusters(segments, terms)
    for is_seen, summaries, gradient, launch in (
        (False, of_buckets, fill_in[0], ATTEND_BACKWARD_TO_BLOCKS),
        (True, seen, fill_in[1], ATTEND_BACKWARD_TO_SEEN),
    ):
        launch = segments.fit(launch)
        grid = (triton.cdiv(segments.key_clusters, launch["CLUSTERS"]), segments.query_clusters * segments.blocks, heads)
        _backward_to_summaries[grid](
            grad_out, lse, delta, segments.residuals, *summaries.parts(), segments.groups.starts, terms.words,
            opened.listed, opened.listed_number, *gradient.parts(), *segments.sizes, IS_SEEN=is_seen,
            IS_FROZEN=not differentiable_aggregation, **constants, **launch,
        )  # fmt: skip
    return grad_queries, opened


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
def _is_block_term(word, block, WORD: tl.constexpr):
    """Whether the summary of a block is a term: its cluster is open, and the block was not retrieved."""
    return (word != -1) & (((word >> (block % WORD)) & 1) != 0)


@triton.jit(do_not_specialize=["opened_clusters", "retrieved_blocks", "length", "blocks", "query_clusters"])
def _select_clusters(
    residuals, seen_mass, seen_key_mean, tile_group, tile_begin, tile_end, order, slots, listed, listed_number, opened,
    retrieved, opened_clusters, retrieved_blocks, length, blocks, query_clusters, key_clusters, D: tl.constexpr,
    DP: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, CP: tl.constexpr, IS_PACKED: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
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
    if IS_PACKED:
        absent: tl.constexpr = -(2**31)
        keys = tl.where(exists, index_in_order(logits, CP), absent)
        for number in range(opened_clusters):
            best = tl.max(keys, 1)
            is_found = best > absent + opened_clusters
            tl.store(
                opened + row * opened_clusters + number, tl.where(is_found, CP - 1 - (best & (CP - 1)), -1), mask=is_row
            )
            # The smallest integers of all say when a cluster was chosen.
            keys = tl.where((keys == best[:, None]) & is_found[:, None], absent + 1 + number, keys)
        slot = tl.where(keys <= absent + opened_clusters, keys - absent - 1, -1)
    else:
        logits = tl.where(exists, logits, float("-inf"))
        slot = tl.full([ROWS, CP], -1, tl.int32)
        for number in range(opened_clusters):
            best, index = tl.max(logits, 1, return_indices=True)
            found = tl.where(best == float("-inf"), -1, index)
            is_best = cluster[None, :] == found[:, None]
            logits = tl.where(is_best, float("-inf"), logits)
            slot = tl.where(is_best, number, slot)
            tl.store(opened + row * opened_clusters + number, found, mask=is_row)
    # What finds nothing to open retrieves nothing.
    filled = tl.sum((slot >= 0).to(tl.int32), 1)
    if tl.min(tl.where(is_row, filled, opened_clusters), 0) < opened_clusters:
        for number in range(opened_clusters * retrieved_blocks):
            tl.store(
                retrieved + row * opened_clusters * retrieved_blocks + number, tl.full([ROWS], -1, tl.int32),
                mask=is_row & (number >= filled * retrieved_blocks),
            )  # fmt: skip
    slots += first_place * key_clusters
    tl.store(slots + place[:, None] * key_clusters + cluster[None, :], slot, mask=is_row[:, None] & is_cluster[None, :])
    is_listed = tl.max((slot >= 0).to(tl.int32), 0)
    tl.store(listed + tile * key_clusters + tl.cumsum(is_listed, 0) - 1, cluster, mask=is_listed > 0)
    tl.store(listed_number + tile, tl.sum(is_listed, 0))


@triton.jit(do_not_specialize=["opened_clusters", "retrieved_blocks", "length", "blocks", "query_clusters"])
def _select_blocks(
    residuals, mass, key_mean, tile_group, tile_begin, tile_end, order, slots, listed, listed_number, retrieved,
    opened_clusters, retrieved_blocks, length, blocks, query_clusters, key_clusters, D: tl.constexpr, DP: tl.constexpr,
    IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, LISTED: tl.constexpr, HAS_WORDS: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """For each opened cluster the best blocks, one after another; `HAS_WORDS`: slots become the words of the terms."""
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
    residual = load_rows(residuals, first_place, place, is_row, D, DP)
    of_cluster = (head * query_clusters + segment // blocks) * blocks * key_clusters
    listed_here = tl.load(listed_number + tile)
    listed += tile * key_clusters
    slots += first_place * key_clusters
    retrieved += head * length * opened_clusters * retrieved_blocks
    for first in range(0, listed_here, LISTED):
        index = first + tl.arange(0, LISTED)
        is_cluster = index < listed_here
        cluster = tl.load(listed + index, mask=is_cluster, other=0)
        slot_at = slots + place[:, None] * key_clusters + cluster[None, :]
        slot = tl.load(slot_at, mask=is_row[:, None] & is_cluster[None, :], other=-1).to(tl.int32)
        last_score = tl.full([ROWS, LISTED], float("inf"), ACC)
        last_block = tl.full([ROWS, LISTED], -1, tl.int32)
        word = tl.full([ROWS, LISTED], -1, tl.int32)
        for number in range(retrieved_blocks):
            best = tl.full([ROWS, LISTED], float("-inf"), ACC)
            found = tl.full([ROWS, LISTED], -1, tl.int32)
            for block in range(seen_blocks):
                of_block = of_cluster + block * key_clusters
                _, logits = _score(residual, mass, key_mean, of_block, cluster, is_cluster, D, DP, ACC, PRECISION)
                if not IS_CAUSAL:
                    logits = tl.where(own_block == block, float("-inf"), logits)
                # Those that come after the last one found: with a lower score, or later with the same.
                better = (logits > best) & ((logits < last_score) | ((logits == last_score) & (last_block < block)))
                best = tl.where(better, logits, best)
                found = tl.where(better, block, found)
            tl.store(
                retrieved + (row[:, None] * opened_clusters + slot) * retrieved_blocks + number, found,
                mask=is_row[:, None] & (slot >= 0),
            )  # fmt: skip
            last_score = tl.where(found < 0, float("-inf"), best)
            last_block = tl.where(found < 0, blocks, found)
            word = tl.where(found < 0, word, word & ~(1 << tl.maximum(found, 0)))
        if HAS_WORDS:
            tl.store(slot_at, word, mask=is_row[:, None] & (slot >= 0))


@triton.jit(do_not_specialize=["length"])
def _mark_terms(
    order, opened, retrieved, words, length, key_clusters, OPENED: tl.constexpr, RETRIEVED: tl.constexpr,
    WIDTH: tl.constexpr, PLANES: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """Write the words of opened clusters, one for each (query, opened cluster)."""
    head, plane = tl.program_id(1).to(tl.int64) // PLANES, tl.program_id(1) % PLANES
    index = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    place = index // OPENED
    inside = place < length
    row = tl.load(order + head * length + place, mask=inside, other=0)
    at = (head * length + row) * OPENED + index % OPENED
    cluster = tl.load(opened + at, mask=inside, other=-1)
    wide: tl.constexpr = tl.int32 if PLANES == 1 else tl.int64
    word = tl.full([WIDTH], -1, wide)
    for number in range(RETRIEVED):
        bit = tl.load(retrieved + at * RETRIEVED + number, mask=inside, other=-1) - plane * WORD
        is_here = (bit >= 0) & (bit < WORD)
        one = tl.full([WIDTH], 1, wide) << tl.where(is_here, bit, 0).to(wide)
        word = tl.where(is_here, word & ~one, word)
    if PLANES > 1:
        word = word & 0xFFFFFFFF
    to = (tl.program_id(1).to(tl.int64) * length + place) * key_clusters + cluster
    tl.store(words + to, word, mask=inside & (cluster >= 0))


@triton.jit(do_not_specialize=["length"])
def _list_opened(
    tile_group, tile_begin, tile_end, words, listed, listed_number, length, key_clusters, ROWS: tl.constexpr,
    CLUSTERS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """The clusters that any query of a tile opens."""
    head = tl.program_id(1).to(tl.int64)
    tile = head * tl.num_programs(0) + tl.program_id(0)
    if tl.load(tile_group + tile) < 0:
        return
    place = tl.load(tile_begin + tile) + tl.arange(0, ROWS)
    is_row = place < tl.load(tile_end + tile)
    number = 0
    for first in range(0, key_clusters, CLUSTERS):
        cluster = first + tl.arange(0, CLUSTERS)
        at = (head * PLANES * length + place)[:, None] * key_clusters + cluster[None, :]
        word = tl.load(words + at, mask=is_row[:, None] & (cluster < key_clusters)[None, :], other=-1)
        is_listed = tl.max((word != -1).to(tl.int32), 0)
        to = number + tl.cumsum(is_listed, 0) - 1
        tl.store(listed + tile * key_clusters + to, cluster, mask=is_listed > 0)
        number += tl.sum(is_listed, 0)
    tl.store(listed_number + tile, number)


@triton.jit(do_not_specialize=["tiles", "blocks"])
def _list_of_cluster(
    tiles_before, tile_listed, tile_number, is_listed, listed, listed_number, tiles, blocks, key_clusters,
    CP: tl.constexpr,
):  # fmt: skip
    """The clusters that any tile of a query cluster lists."""
    query_clusters, head = tl.num_programs(0), tl.program_id(1).to(tl.int64)
    line = head * query_clusters + tl.program_id(0)
    index = tl.arange(0, CP)
    inside = index < key_clusters
    is_listed += line * key_clusters
    tl.store(is_listed + index, tl.zeros([CP], tl.int8), mask=inside)
    tl.debug_barrier()
    tiles_before += head * (query_clusters * blocks + 1) + tl.program_id(0) * blocks
    for tile in range(tl.load(tiles_before), tl.load(tiles_before + blocks)):
        at = head * tiles + tile
        is_entry = index < tl.load(tile_number + at)
        cluster = tl.load(tile_listed + at * key_clusters + index, mask=is_entry, other=0)
        tl.store(is_listed + cluster, tl.full([CP], 1, tl.int8), mask=is_entry)
    tl.debug_barrier()
    flag = tl.load(is_listed + index, mask=inside, other=0).to(tl.int32)
    tl.store(listed + line * key_clusters + tl.cumsum(flag, 0) - 1, index, mask=flag > 0)
    tl.store(listed_number + line, tl.sum(flag, 0))


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
    order, words, listed, listed_number, out, lse, length, blocks, query_clusters, key_clusters, D: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr,
    CLUSTERS: tl.constexpr, LISTED: tl.constexpr, PLANES: tl.constexpr, WORD: tl.constexpr, ACC: tl.constexpr,
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
    of_cluster = (head * query_clusters + segment // blocks) * blocks * key_clusters
    largest = tl.full([ROWS], float("-inf"), ACC)
    total = tl.zeros([ROWS], ACC)
    weighted = tl.zeros([ROWS, DVP], ACC)
    if seen_blocks > 0:
        residual = load_rows(residuals, first_place, place, is_row, D, DP)
        for first in range(0, key_clusters, CLUSTERS):
            cluster = first + tl.arange(0, CLUSTERS)
            is_cluster = cluster < key_clusters
            word_at = words + (head * PLANES * length + begin) * key_clusters
            word_at += place[:, None] * key_clusters + cluster[None, :]
            word = tl.load(word_at, mask=is_row[:, None] & is_cluster[None, :], other=-1)
            of_block = of_cluster + own_block * key_clusters
            _, logits = _score(
                residual, seen_mass, seen_key_mean, of_block, cluster, is_cluster, D, DP, ACC, PRECISION
            )
            logits = tl.where(word == -1, logits, float("-inf"))
            values = load_rows(seen_value_mean, of_block, cluster, is_cluster, DV, DVP)
            largest, total, weighted = _include(logits, values, largest, total, weighted, ACC, PRECISION)
        listed_here = tl.load(listed_number + tile)
        listed += tile * key_clusters
        for first in range(0, listed_here, LISTED):
            index = first + tl.arange(0, LISTED)
            is_cluster = index < listed_here
            cluster = tl.load(listed + index, mask=is_cluster, other=0)
            for plane in range(PLANES):
                word_at = words + ((head * PLANES + plane) * length + begin) * key_clusters
                word_at += place[:, None] * key_clusters + cluster[None, :]
                word = tl.load(word_at, mask=is_row[:, None] & is_cluster[None, :], other=-1)
                for block in range(plane * WORD, tl.minimum(seen_blocks, (plane + 1) * WORD)):
                    of_block = of_cluster + block * key_clusters
                    _, logits = _score(
                        residual, mass, key_mean, of_block, cluster, is_cluster, D, DP, ACC, PRECISION
                    )
                    if not IS_CAUSAL:
                        logits = tl.where(own_block == block, float("-inf"), logits)
                    logits = tl.where(_is_block_term(word, block, WORD), logits, float("-inf"))
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
    weights = tl.exp(tl.minimum(logits - lse[:, None], 0.0))
    response = tl.dot(grad_out, tl.trans(values), input_precision=PRECISION, out_dtype=ACC)
    return weights * (response - delta[:, None])


@triton.jit(do_not_specialize=["length", "blocks", "query_clusters"])
def _summaries_backward_to_queries(
    grad_out, lse, delta, residuals, mass, key_mean, value_mean, seen_mass, seen_key_mean, seen_value_mean, tile_group,
    tile_begin, tile_end, order, words, listed, listed_number, grad_queries, length, blocks, query_clusters,
    key_clusters, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, IS_CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, CLUSTERS: tl.constexpr, LISTED: tl.constexpr, PLANES: tl.constexpr, WORD: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
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
    of_cluster = (head * query_clusters + segment // blocks) * blocks * key_clusters
    gradient = tl.zeros([ROWS, DP], ACC)
    if seen_blocks > 0:
        residual = load_rows(residuals, first_place, place, is_row, D, DP)
        some_grad = load_rows(grad_out, first_place, place, is_row, DV, DVP)
        row_lse = tl.load(lse + first_place + place, mask=is_row, other=float("inf"))
        row_delta = tl.load(delta + first_place + place, mask=is_row, other=0.0)
        for first in range(0, key_clusters, CLUSTERS):
            cluster = first + tl.arange(0, CLUSTERS)
            is_cluster = cluster < key_clusters
            word_at = words + (head * PLANES * length + begin) * key_clusters
            word_at += place[:, None] * key_clusters + cluster[None, :]
            word = tl.load(word_at, mask=is_row[:, None] & is_cluster[None, :], other=-1)
            of_block = of_cluster + own_block * key_clusters
            means, logits = _score(
                residual, seen_mass, seen_key_mean, of_block, cluster, is_cluster, D, DP, ACC, PRECISION
            )
            logits = tl.where(word == -1, logits, float("-inf"))
            values = load_rows(seen_value_mean, of_block, cluster, is_cluster, DV, DVP)
            d_logits = _gradient_of_logits(logits, some_grad, values, row_lse, row_delta, ACC, PRECISION)
            gradient = tl.dot(d_logits.to(means.dtype), means, gradient, input_precision=PRECISION, out_dtype=ACC)
        listed_here = tl.load(listed_number + tile)
        listed += tile * key_clusters
        for first in range(0, listed_here, LISTED):
            index = first + tl.arange(0, LISTED)
            is_cluster = index < listed_here
            cluster = tl.load(listed + index, mask=is_cluster, other=0)
            for plane in range(PLANES):
                word_at = words + ((head * PLANES + plane) * length + begin) * key_clusters
                word_at += place[:, None] * key_clusters + cluster[None, :]
                word = tl.load(word_at, mask=is_row[:, None] & is_cluster[None, :], other=-1)
                for block in range(plane * WORD, tl.minimum(seen_blocks, (plane + 1) * WORD)):
                    of_block = of_cluster + block * key_clusters
                    means, logits = _score(
                        residual, mass, key_mean, of_block, cluster, is_cluster, D, DP, ACC, PRECISION
                    )
                    if not IS_CAUSAL:
                        logits = tl.where(own_block == block, float("-inf"), logits)
                    logits = tl.where(_is_block_term(word, block, WORD), logits, float("-inf"))
                    values = load_rows(value_mean, of_block, cluster, is_cluster, DV, DVP)
                    d_logits = _gradient_of_logits(logits, some_grad, values, row_lse, row_delta, ACC, PRECISION)
                    gradient = tl.dot(
                        d_logits.to(means.dtype), means, gradient, input_precision=PRECISION, out_dtype=ACC
                    )
    row = tl.load(order + first_place + place, mask=is_row, other=0)
    store_rows(grad_queries, head * length, row, is_row, gradient, D, DP)


@triton.jit(do_not_specialize=["length", "blocks", "query_clusters"])
def _backward_to_summaries(
    grad_out, lse, delta, residuals, mass, key_mean, value_mean, starts, words, listed, listed_number, grad_mass,
    grad_key_mean, grad_value_mean, length, blocks, query_clusters, key_clusters, IS_SEEN: tl.constexpr, IS_FROZEN: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, IS_CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, CLUSTERS: tl.constexpr, PLANES: tl.constexpr, WORD: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
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
    plane = 0 if IS_SEEN else block // WORD
    words += (head * PLANES + plane) * length * key_clusters
    for begin in range(first_row, last_row, ROWS):
        place = begin + tl.arange(0, ROWS)
        is_row = place < last_row
        if (not IS_SEEN) and (not IS_CAUSAL):
            is_row = is_row & ((place < own_begin) | (place >= own_end))
        word = tl.load(
            words + place[:, None] * key_clusters + cluster[None, :], mask=is_row[:, None] & is_cluster[None, :],
            other=-1,
        )  # fmt: skip
        is_term = word == -1 if IS_SEEN else _is_block_term(word, block, WORD)
        residual = load_rows(residuals, head * length, place, is_row, D, DP)
        some_grad = load_rows(grad_out, head * length, place, is_row, DV, DVP)
        row_lse = tl.load(lse + head * length + place, mask=is_row, other=float("inf"))
        row_delta = tl.load(delta + head * length + place, mask=is_row, other=0.0)
        # Summaries are the rows here, so that weights and gradients of logits enter the products below as they are.
        logits = tl.dot(means, tl.trans(residual), input_precision=PRECISION, out_dtype=ACC) + masses[:, None]
        logits = tl.where(tl.trans(is_term), logits - row_lse[None, :], float("-inf"))
        weights = tl.exp(tl.minimum(logits, 0.0))
        d_values = tl.dot(weights.to(some_grad.dtype), some_grad, d_values, input_precision=PRECISION, out_dtype=ACC)
        response = tl.dot(values, tl.trans(some_grad), input_precision=PRECISION, out_dtype=ACC)
        d_logits = weights * (response - row_delta[None, :])
        d_mass += tl.sum(d_logits, 1)
        d_means = tl.dot(d_logits.to(residual.dtype), residual, d_means, input_precision=PRECISION, out_dtype=ACC)
    if not IS_FROZEN:
        d_mass -= tl.sum(d_means * means.to(ACC), 1) + tl.sum(d_values * values.to(ACC), 1)
    tl.store(grad_mass + of_block + cluster, d_mass, mask=is_cluster)
    store_rows(grad_key_mean, of_block, cluster, is_cluster, d_means, D, DP)
    store_rows(grad_value_mean, of_block, cluster, is_cluster, d_values, DV, DVP)
