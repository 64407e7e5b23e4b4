"""A table of bits: which summaries are terms of a query's softmax.

The queries of a query cluster open much the same key clusters. So the clusters that any of them opens are listed, and
the blocks of all listed clusters are scored for each query: a small dense matrix product.

The table has one bit for each cluster that the query did not open, whose accumulated summary is a term, and one for
each listed cluster and block, if it opened the cluster but did not retrieve the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.filling import fill
from muse_attention.backends.triton.numbers import cdiv, padded, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.segments import ROWS_OF_TILE, Segments, blocks_of_segment
from muse_attention.backends.triton.tiles import load_places_from_begin, load_tile
from muse_attention.core.structures import Selection


@dataclass(frozen=True)
class OpenedClusters:
    """The key clusters that any query of a query cluster opens: only the summaries of their blocks can be terms."""

    listed: Tensor
    """(H, Q, K) int32: their numbers, ascending"""
    number: Tensor
    """(H, Q) int32: their number"""
    place: Tensor
    """(H, Q, K) int16: the index of a cluster in the list, or -1"""

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Arguments of kernels: the list."""
        return {"listed_ptr": self.listed, "listed_number_ptr": self.number}


def list_opened(segments: Segments, opened: Tensor) -> OpenedClusters:
    """`opened` is (H, N, clusters), in the order of the inputs."""
    heads, length, clusters = opened.shape
    shape = (heads, segments.query_clusters, segments.key_clusters)
    listed = OpenedClusters(
        opened.new_empty(shape), opened.new_empty(shape[:2]), opened.new_empty(shape, dtype=torch.int16)
    )
    if clusters == 0:
        fill(listed.number, 0)
        fill(listed.place, -1)
        return listed
    _list_opened[listed.number.shape[::-1]](
        order_ptr=segments.groups.order, starts_ptr=segments.groups.starts, opened_ptr=opened, **listed.arguments,
        listed_place_ptr=listed.place, length=length, blocks=segments.blocks, key_clusters=segments.key_clusters,
        OPENED=clusters, OP=power_of_two(clusters), ROWS=64, CP=padded(segments.key_clusters),
    )  # fmt: skip
    return listed


@kernel(stage="selection", do_not_specialize=["length", "blocks", "key_clusters"])
def _list_opened(
    order_ptr, starts_ptr, opened_ptr, listed_ptr, listed_number_ptr, listed_place_ptr, length, blocks, key_clusters,
    OPENED: tl.constexpr, OP: tl.constexpr, ROWS: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """List the clusters that any query of a query cluster opens.

    Grid: (Q, H). `order_ptr`: (H, N) int32; `starts_ptr`: (H, Q nb + 1) int32; `opened_ptr`: (H, N, OPENED) int32;
    `listed_ptr`: (H, Q, K) int32; `listed_number_ptr`: (H, Q) int32; `listed_place_ptr`: (H, Q, K) int16.
    """
    query_clusters, head = tl.num_programs(0), tl.program_id(1).to(tl.int64)
    cluster_index = head * query_clusters + tl.program_id(0)
    offs_cluster, offs_opened = tl.arange(0, CP), tl.arange(0, OP)  # [CP], [OP]
    listed_place_ptr += cluster_index * key_clusters
    tl.store(listed_place_ptr + offs_cluster, tl.full([CP], -1, tl.int16), mask=offs_cluster < key_clusters)
    tl.debug_barrier()
    starts_ptr += head * (query_clusters * blocks + 1) + tl.program_id(0) * blocks
    end = tl.load(starts_ptr + blocks)
    for begin in range(tl.load(starts_ptr), end, ROWS):
        offs_place = begin + tl.arange(0, ROWS)  # [ROWS]
        # [ROWS]
        offs_row = head * length + tl.load(order_ptr + head * length + offs_place, mask=offs_place < end, other=0)
        # [ROWS, OP]
        cluster = tl.load(
            opened_ptr + offs_row[:, None] * OPENED + offs_opened[None, :],
            mask=(offs_place < end)[:, None] & (offs_opened < OPENED)[None, :], other=-1,
        )  # fmt: skip
        # Benign race: every write stores the same value.
        tl.store(listed_place_ptr + cluster, tl.zeros([ROWS, OP], tl.int16), mask=cluster >= 0)
    tl.debug_barrier()
    is_listed = tl.load(listed_place_ptr + offs_cluster, mask=offs_cluster < key_clusters, other=-1) >= 0  # [CP]
    rank = tl.cumsum(is_listed.to(tl.int32), 0) - 1  # [CP]
    tl.debug_barrier()
    tl.store(listed_place_ptr + offs_cluster, rank.to(tl.int16), mask=is_listed)
    tl.store(listed_ptr + cluster_index * key_clusters + rank, offs_cluster, mask=is_listed)
    tl.store(listed_number_ptr + cluster_index, tl.sum(is_listed.to(tl.int32), 0))


@dataclass(frozen=True)
class Terms:
    """Which summaries each query attends to, in bits. Rows are in the order of the segments."""

    clusters: Tensor
    """(H, words, N) int32: a bit for each key cluster"""
    blocks: Tensor
    """(H, nb, words, N) int32: a bit for each listed cluster"""
    opened: OpenedClusters

    @property
    def words(self) -> int:
        return self.clusters.shape[1]

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of kernels."""
        return {
            "cluster_terms_ptr": self.clusters,
            "block_terms_ptr": self.blocks,
            "words": self.words,
            **self.opened.arguments,
        }


def find_terms(segments: Segments, selection: Selection) -> Terms:
    """The terms: all that a selection does not retrieve."""
    listed = list_opened(segments, selection.opened)
    heads, length, clusters, blocks = selection.retrieved.shape
    words = cdiv(segments.key_clusters, 32)
    terms = Terms(
        selection.opened.new_empty(heads, words, length),
        selection.opened.new_empty(heads, segments.blocks, words, length),
        listed,
    )
    _mark_terms[segments.tiles.grid](
        **segments.rows, opened_ptr=selection.opened, retrieved_ptr=selection.retrieved, listed_place_ptr=listed.place,
        cluster_terms_ptr=terms.clusters, block_terms_ptr=terms.blocks, OPENED=clusters,
        OP=max(1, power_of_two(clusters)), RETRIEVED=blocks, WORDS=words, IS_CAUSAL=segments.is_causal,
        ROWS=ROWS_OF_TILE,
    )  # fmt: skip
    return terms


@triton.jit
def words_of_clusters(bits_ptr, offs_place, mask_row, first, length, words, COLUMNS: tl.constexpr):
    """[ROWS], twice: the words with the bits of `COLUMNS` (up to 64) key clusters from `first` on. These lie in one
    word or begin one.

    `bits_ptr` points to the first word of the first row.
    """
    bits_ptr += first // 32 * length
    low = tl.load(bits_ptr + offs_place, mask=mask_row, other=0)  # [ROWS]
    high = low  # [ROWS]
    if COLUMNS > 32:
        has_high = offs_place * 0 + first // 32 + 1 < words  # [ROWS]
        high = tl.load(bits_ptr + length + offs_place, mask=mask_row & has_high, other=0)
    return low, high


@triton.jit
def words_of_blocks(bits_ptr, offs_place, last_row, own_begin, own_end, next_end, block, blocks, first, length, words):
    """[ROWS], twice: the words with the bits of the listed clusters from `first` on, in two neighbouring blocks, for
    queries of other blocks.

    `block` lies from `own_begin` to `own_end`, the one after it ends at `next_end`; `bits_ptr` points to the first word
    of the first row in `block`.
    """
    mask_row = offs_place < last_row  # [ROWS]
    mask_first = mask_row & ((offs_place < own_begin) | (offs_place >= own_end))  # [ROWS]
    # [ROWS]
    mask_second = mask_row & ((offs_place < own_end) | (offs_place >= next_end)) & (offs_place * 0 + block + 1 < blocks)
    bits_ptr += first // 32 * length
    low = tl.load(bits_ptr + offs_place, mask=mask_first, other=0)  # [ROWS]
    high = tl.load(bits_ptr + words * length + offs_place, mask=mask_second, other=0)  # [ROWS]
    return low, high


@triton.jit
def is_term(bits_ptr, block, offs_listed, mask_summary, offs_place, mask_row, length, words):
    """[ROWS, COLUMNS]: whether the summary of the listed cluster `offs_listed` in a `block` is a term of a query.

    `bits_ptr` points to the first word of the first row and block.
    """
    offs_column = (block * words + offs_listed // 32).to(tl.int64) * length  # [COLUMNS]
    mask = mask_row[:, None] & mask_summary[None, :]  # [ROWS, COLUMNS]
    word = tl.load(bits_ptr + offs_place[:, None] + offs_column[None, :], mask=mask, other=0)  # [ROWS, COLUMNS]
    return ((word >> (offs_listed & 31)[None, :]) & 1) != 0


@triton.jit
def any_set(numbers):
    """Whether any number is not zero."""
    return tl.max(tl.ravel((numbers != 0).to(tl.int32)), 0) > 0


@triton.jit
def bit_of_row(low, high, first, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS]: whether a bit is set. The first 32 columns are bits of `low`, the others of `high`."""
    offs_column = tl.arange(0, COLUMNS)
    if COLUMNS > 32:
        word = tl.where((offs_column < 32)[None, :], low[:, None], high[:, None])  # [ROWS, COLUMNS]
    else:
        word = low[:, None]  # [ROWS, 1]
    return ((word >> ((first + offs_column) & 31)[None, :]) & 1) != 0


@triton.jit
def bit_of_column(low, high, first, COLUMNS: tl.constexpr, LOW_COLUMNS: tl.constexpr):
    """[COLUMNS, ROWS]: the same, transposed, with the first `LOW_COLUMNS` columns for `low`."""
    offs_column = tl.arange(0, COLUMNS)
    if COLUMNS > LOW_COLUMNS:
        word = tl.where((offs_column < LOW_COLUMNS)[:, None], low[None, :], high[None, :])  # [COLUMNS, ROWS]
    else:
        word = low[None, :]  # [1, ROWS]
    return ((word >> ((first + offs_column % LOW_COLUMNS) & 31)[:, None]) & 1) != 0


@kernel(stage="selection", do_not_specialize=["length", "blocks", "query_clusters", "key_clusters"])
def _mark_terms(
    tile_group_ptr, tile_begin_ptr, tile_end_ptr, order_ptr, opened_ptr, retrieved_ptr, listed_place_ptr,
    cluster_terms_ptr, block_terms_ptr, length, blocks, query_clusters, key_clusters, OPENED: tl.constexpr,
    OP: tl.constexpr, RETRIEVED: tl.constexpr, WORDS: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The bits of the queries of a segment's tile, from what each opened and retrieved.

    Grid: that of the segments' tiles. `order_ptr`: (H, N) int32; `opened_ptr`: (H, N, OPENED) int32; `retrieved_ptr`:
    (H, N, OPENED, RETRIEVED) int32; `listed_place_ptr`: (H, Q, K) int16; `cluster_terms_ptr`: (H, WORDS, N) int32;
    `block_terms_ptr`: (H, nb, WORDS, N) int32.
    """
    head, tile, segment = load_tile(tile_group_ptr)
    if segment < 0:
        return
    offs_opened = tl.arange(0, OP)
    # scalar, [ROWS], [ROWS]
    begin, offs_place, mask_row = load_places_from_begin(tile_begin_ptr, tile_end_ptr, tile, ROWS)
    first_place = head * length + begin
    _, seen_blocks = blocks_of_segment(segment, blocks, IS_CAUSAL)
    if seen_blocks == 0:
        return
    offs_row = tl.load(order_ptr + first_place + offs_place, mask=mask_row, other=0)  # [ROWS]
    mask = mask_row[:, None] & (offs_opened < OPENED)[None, :]  # [ROWS, OP]
    offs_slot = offs_row[:, None] * OPENED + offs_opened[None, :]  # [ROWS, OP]
    cluster = tl.load(opened_ptr + head * length * OPENED + offs_slot, mask=mask, other=-1)  # [ROWS, OP]
    listed_place_ptr += (head * query_clusters + segment // blocks) * key_clusters
    listed = tl.load(listed_place_ptr + cluster, mask=cluster >= 0, other=-1).to(tl.int32)  # [ROWS, OP]
    # No cluster is opened twice, so the sum of bits is their union.
    bit = tl.where(cluster < 0, 0, 1 << (cluster & 31))  # [ROWS, OP]
    for word in tl.static_range(WORDS):
        is_open = tl.sum(tl.where((cluster >> 5) == word, bit, 0), 1)  # [ROWS]
        tl.store(cluster_terms_ptr + (head * WORDS + word) * length + begin + offs_place, ~is_open, mask=mask_row)
    bit = tl.where(listed < 0, 0, 1 << (listed & 31))
    retrieved_ptr += head * length * OPENED * RETRIEVED
    first = tl.load(retrieved_ptr + offs_slot * RETRIEVED, mask=mask, other=-1)  # [ROWS, OP]
    for block in range(seen_blocks):
        kept = tl.where(first == block, 0, bit)  # [ROWS, OP]
        for other in range(1, RETRIEVED):
            retrieved_block = tl.load(retrieved_ptr + offs_slot * RETRIEVED + other, mask=mask, other=-1)  # [ROWS, OP]
            kept = tl.where(retrieved_block == block, 0, kept)
        for word in tl.static_range(WORDS):
            terms = tl.sum(tl.where((listed >> 5) == word, kept, 0), 1)  # [ROWS]
            base = ((head * blocks + block) * WORDS + word) * length + begin
            tl.store(block_terms_ptr + base + offs_place, terms, mask=mask_row)
