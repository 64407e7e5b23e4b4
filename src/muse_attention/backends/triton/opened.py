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
from muse_attention.backends.triton.segments import Segments


@dataclass(frozen=True)
class OpenedClusters:
    """The key clusters that any query of a query cluster opens: only their blocks' summaries are terms of anything."""

    listed: Tensor
    """(H, Q, K) int32: their numbers, ascending"""
    number: Tensor
    """(H, Q) int32: how many they are"""
    place: Tensor
    """(H, Q, K) int16: where a cluster stands among the listed ones, or -1"""

    @property
    def arguments(self) -> dict[str, Tensor]:
        """The list as kernels take it."""
        return {"listed_ptr": self.listed, "listed_number_ptr": self.number}


def list_opened(segments: Segments, opened: Tensor) -> OpenedClusters:
    """`opened` is (H, N, clusters), in the order of the inputs."""
    heads, length, clusters = opened.shape
    shape = (heads, segments.query_clusters, segments.key_clusters)
    found = OpenedClusters(
        opened.new_empty(shape), opened.new_empty(shape[:2]), opened.new_empty(shape, dtype=torch.int16)
    )
    if clusters == 0:
        fill(found.number, 0)
        fill(found.place, -1)
        return found
    _list_opened[found.number.shape[::-1]](
        order_ptr=segments.groups.order, starts_ptr=segments.groups.starts, opened_ptr=opened, **found.arguments,
        listed_place_ptr=found.place, length=length, blocks=segments.blocks, key_clusters=segments.key_clusters,
        OPENED=clusters, OP=power_of_two(clusters), ROWS=64, CP=padded(segments.key_clusters),
    )  # fmt: skip
    return found


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
    line = head * query_clusters + tl.program_id(0)
    offs_cluster, offs_opened = tl.arange(0, CP), tl.arange(0, OP)  # [CP], [OP]
    listed_place_ptr += line * key_clusters
    tl.store(listed_place_ptr + offs_cluster, tl.full([CP], -1, tl.int16), mask=offs_cluster < key_clusters)
    tl.debug_barrier()
    starts_ptr += head * (query_clusters * blocks + 1) + tl.program_id(0) * blocks
    end = tl.load(starts_ptr + blocks)
    for begin in range(tl.load(starts_ptr), end, ROWS):
        offs_place = begin + tl.arange(0, ROWS)  # [ROWS]
        # [ROWS]
        offs_row = head * length + tl.load(order_ptr + head * length + offs_place, mask=offs_place < end, other=0)
        # [ROWS, OP]
        own = tl.load(
            opened_ptr + offs_row[:, None] * OPENED + offs_opened[None, :],
            mask=(offs_place < end)[:, None] & (offs_opened < OPENED)[None, :], other=-1,
        )  # fmt: skip
        # Benign race: every write stores the same value.
        tl.store(listed_place_ptr + own, tl.zeros([ROWS, OP], tl.int16), mask=own >= 0)
    tl.debug_barrier()
    is_listed = tl.load(listed_place_ptr + offs_cluster, mask=offs_cluster < key_clusters, other=-1) >= 0  # [CP]
    to = tl.cumsum(is_listed.to(tl.int32), 0) - 1  # [CP]
    tl.debug_barrier()
    tl.store(listed_place_ptr + offs_cluster, to.to(tl.int16), mask=is_listed)
    tl.store(listed_ptr + line * key_clusters + to, offs_cluster, mask=is_listed)
    tl.store(listed_number_ptr + line, tl.sum(is_listed.to(tl.int32), 0))
