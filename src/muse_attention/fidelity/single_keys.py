"""Which keys a recorded call attends to by themselves, not as part of a summary.

A key is retrieved if its bucket is. A summary of one key is that key: it need not be retrieved, and is not lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muse_attention.core.query_tiles import place_in_tiles
from muse_attention.core.recording import RecordedCall


class SingleKeys:
    """The single keys of one call.

    Pairs of a query and a key are given by four tensors of one shape: batch, query head, query, key. The
    key of each pair lies outside of the query's own block, and the query sees it.
    """

    def __init__(self, call: RecordedCall) -> None:
        self._call = call
        self._group = call.query.shape[1] // call.key.shape[1]
        self._sizes = bucket_sizes(call)
        if call.config.tolerance is not None:
            self._tile, self._row = place_in_tiles(call.clusters.query_assignment, call.config)
        else:
            # Keys of each cluster in the blocks before: those of all blocks come last.
            self._before = torch.nn.functional.pad(self._sizes.cumsum(2), (0, 0, 1, 0))

    def is_retrieved(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """bool for each pair: whether the key is retrieved."""
        selection, config = self._call.selection, self._call.config
        block, cluster = self._bucket(batch, head, key)
        if config.tolerance is not None:
            tile, row = self._tile[batch, head, query], self._row[batch, head, query]
            bucket = block * config.key_clusters + cluster
            return selection.retrieved[batch, head, query // config.block_size, tile, bucket] <= row
        is_opened = selection.opened[batch, head, query] == cluster[..., None]
        return (is_opened[..., None] & (selection.retrieved[batch, head, query] == block[..., None, None])).any(
            (-2, -1)
        )

    def is_alone(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """bool for each pair: if the key is not retrieved, whether it is the only one of the summary that has it."""
        call, config = self._call, self._call.config
        block, cluster = self._bucket(batch, head, key)
        of_key = batch, head // self._group
        in_bucket = self._sizes[*of_key, block, cluster]
        if config.tolerance is not None:
            return in_bucket == 1
        # The paper's method: one summary for all blocks of a cluster, unless the query opens it.
        own = query // config.block_size
        in_cluster = self._before[*of_key, own, cluster]
        if not call.is_causal:
            in_cluster = self._before[*of_key, -1, cluster] - self._sizes[*of_key, own, cluster]
        is_opened = (call.selection.opened[batch, head, query] == cluster[..., None]).any(-1)
        return (torch.where(is_opened, in_bucket, in_cluster) == 1) & config.monopole

    def pairs(self, position: int) -> Tensor:
        """(batch, query heads) int64: buckets that the query at a position retrieves."""
        selection, config = self._call.selection, self._call.config
        if config.tolerance is None:
            return (selection.retrieved[:, :, position] >= 0).sum((2, 3))
        tile, row = self._tile[:, :, position, None, None], self._row[:, :, position, None]
        first = selection.retrieved[:, :, position // config.block_size]  # (batch, heads, tiles, buckets)
        return (first.take_along_dim(tile, 2)[:, :, 0] <= row).sum(2)

    def _bucket(self, batch: Tensor, head: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Block and cluster of each key."""
        assignment = self._call.clusters.key_assignment
        return key // self._call.config.block_size, assignment[batch, head // self._group, key].long()


def bucket_sizes(call: RecordedCall) -> Tensor:
    """(batch, key heads, blocks, key clusters) int64: keys in each bucket."""
    config, assignment = call.config, call.clusters.key_assignment
    batch, heads, length = assignment.shape
    blocks = config.number_of_blocks(length)
    block = torch.arange(length, device=assignment.device) // config.block_size
    head = torch.arange(batch * heads, device=assignment.device)[:, None]
    place = (head * blocks + block) * config.key_clusters + assignment.flatten(0, 1)
    counts = torch.bincount(place.flatten(), minlength=batch * heads * blocks * config.key_clusters)
    return counts.view(batch, heads, blocks, config.key_clusters)
