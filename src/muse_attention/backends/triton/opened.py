"""The key clusters that the queries of a query cluster open.

They open much the same ones. So the clusters that any of them opens are listed, and the blocks of all listed clusters
are scored for each query: a small dense matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.filling import fill
from muse_attention.backends.triton.numbers import padded, power_of_two
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.backends.triton.segments import ROWS_OF_TILE, Segments
from muse_attention.core.bits import number_of_words


@dataclass(frozen=True)
class OpenedClusters:
    """The key clusters that any query of a query cluster opens: only their blocks' summaries are terms of anything."""

    listed: Tensor
    """(H, Q, K) int32: their numbers, ascending"""
    number: Tensor
    """(H, Q) int32: how many they are"""
    place: Tensor
    """(H, Q, K) int16: where a cluster stands among the listed ones, or -1"""


def list_opened(segments: Segments, opened: Tensor) -> OpenedClusters:
    """`opened` is (H, N, clusters), in the order of the inputs."""
    _, length, clusters = opened.shape
    found = _room(segments, opened)
    if clusters == 0:
        fill(found.number, 0)
        fill(found.place, -1)
        return found
    _list_opened[found.number.shape[::-1]](
        segments.groups.order, segments.groups.starts, opened, found.listed, found.number, found.place, length,
        segments.blocks, segments.key_clusters, OPENED=clusters, OP=power_of_two(clusters), ROWS=64,
        CP=padded(segments.key_clusters),
    )  # fmt: skip
    return found


def list_opened_bits(segments: Segments, opened: Tensor) -> OpenedClusters:
    """`opened` is (H, N, words), in the order of the inputs: a bit for each key cluster."""
    found = _room(segments, opened)
    words = number_of_words(segments.key_clusters)
    is_opened = fill(torch.empty_like(found.listed), 0)
    _mark_opened[segments.tiles.grid](
        *segments.tiles.parts(), segments.groups.order, opened, is_opened, opened.shape[1], segments.blocks,
        segments.query_clusters, segments.key_clusters, WORDS=words, ROWS=ROWS_OF_TILE,
    )  # fmt: skip
    _list_marked[found.number.shape[::-1]](
        is_opened, found.listed, found.number, found.place, segments.key_clusters, CP=padded(segments.key_clusters)
    )
    return found


def _room(segments: Segments, opened: Tensor) -> OpenedClusters:
    shape = (opened.shape[0], segments.query_clusters, segments.key_clusters)
    return OpenedClusters(
        opened.new_empty(shape), opened.new_empty(shape[:2]), opened.new_empty(shape, dtype=torch.int16)
    )


@kernel(do_not_specialize=["length", "blocks", "query_clusters", "key_clusters"])
def _mark_opened(
    tile_group, tile_begin, tile_end, order, opened, is_opened, length, blocks, query_clusters, key_clusters,
    WORDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A 1 for each cluster that any query of a query cluster opens. Benign race: every write stores the same value."""
    head = tl.program_id(1).to(tl.int64)
    tile = head * tl.num_programs(0) + tl.program_id(0)
    segment = tl.load(tile_group + tile)
    if segment < 0:
        return
    begin = tl.load(tile_begin + tile)
    place, bit = tl.arange(0, ROWS), tl.arange(0, 32)
    is_row = place < tl.load(tile_end + tile) - begin
    row = head * length + tl.load(order + head * length + begin + place, mask=is_row, other=0)
    is_opened += (head * query_clusters + segment // blocks) * key_clusters
    for word in tl.static_range(WORDS):
        own = tl.load(opened + row * WORDS + word, mask=is_row, other=0)
        any_opens = tl.max((own[:, None] >> bit[None, :]) & 1, 0)
        tl.store(is_opened + word * 32 + bit, any_opens, mask=any_opens > 0)


@kernel(do_not_specialize=["key_clusters"])
def _list_marked(is_opened, listed, listed_number, listed_place, key_clusters, CP: tl.constexpr):
    line = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    cluster = tl.arange(0, CP)
    at, is_cluster = line * key_clusters, cluster < key_clusters
    is_listed = tl.load(is_opened + at + cluster, mask=is_cluster, other=0)
    place = tl.cumsum(is_listed, 0) - 1
    tl.store(listed_place + at + cluster, tl.where(is_listed > 0, place, -1).to(tl.int16), mask=is_cluster)
    tl.store(listed + at + place, cluster, mask=is_listed > 0)
    tl.store(listed_number + line, tl.sum(is_listed, 0))


@kernel(do_not_specialize=["length", "blocks", "key_clusters"])
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
        # Benign race: every write stores the same value.
        tl.store(listed_place + own, tl.zeros([ROWS, OP], tl.int16), mask=own >= 0)
    tl.debug_barrier()
    is_listed = tl.load(listed_place + cluster, mask=cluster < key_clusters, other=-1) >= 0
    to = tl.cumsum(is_listed.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(listed_place + cluster, to.to(tl.int16), mask=is_listed)
    tl.store(listed + line * key_clusters + to, cluster, mask=is_listed)
    tl.store(listed_number + line, tl.sum(is_listed.to(tl.int32), 0))
