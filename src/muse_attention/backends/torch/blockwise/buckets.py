"""The keys and values of one key head, sorted by bucket, so that a bucket is a range of rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from muse_attention.backends.torch.grouping import Groups, group_rows, with_padding
from muse_attention.config import MuSeConfig


@dataclass(frozen=True)
class Buckets(Groups):
    """The buckets of the blocks that are seen, counted block after block: groups of positions in the sequence."""

    keys: Tensor
    """(seen keys + 1, D), in their order: the last row is 0, for padding"""
    values: Tensor
    """(seen keys + 1, Dv): likewise"""
    key_clusters: int

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, assignment: Tensor, seen_blocks: int, config: MuSeConfig) -> Buckets:
        """The buckets of (N, D) keys and (N, Dv) values by their (N,) clusters."""
        seen = min(keys.shape[0], seen_blocks * config.block_size)
        position = torch.arange(seen, device=keys.device)
        bucket = position // config.block_size * config.key_clusters + assignment[:seen].long()
        groups = group_rows(bucket, seen_blocks * config.key_clusters)
        keys, values = (with_padding(table[groups.order]) for table in (keys, values))
        return cls(groups.order, groups.starts, groups.sizes, keys, values, config.key_clusters)

    @property
    def blocks(self) -> int:
        return self.sizes.shape[0] // self.key_clusters

    def of_block(self, block: int) -> slice:
        return slice(block * self.key_clusters, (block + 1) * self.key_clusters)

    def rows_of_block(self, block: int) -> slice:
        """The rows of `keys` and `values` in a block."""
        end = (block + 1) * self.key_clusters
        return slice(self._begins[block * self.key_clusters], self._begins[end])

    def bucket_of_rows(self, block: int) -> Tensor:
        """(rows of a block,) int64: the bucket of each, counted from the first of the block."""
        return self._bucket_in_block[self.rows_of_block(block)]

    def split(self, block: int, rows: Tensor) -> tuple[Tensor, ...]:
        """The part of each bucket of (rows of a block, ...), as views."""
        begins = self._begins[block * self.key_clusters : (block + 1) * self.key_clusters + 1]
        return rows.split([end - begin for begin, end in itertools.pairwise(begins)])

    @cached_property
    def bucket_of_row(self) -> Tensor:
        """(seen keys + 1,) int64: the bucket of each row of `keys`; 0 for padding."""
        numbers = torch.arange(self.sizes.shape[0], device=self.sizes.device)
        return with_padding(torch.repeat_interleave(numbers, self.sizes))

    @cached_property
    def _bucket_in_block(self) -> Tensor:
        numbers = torch.arange(self.sizes.shape[0], device=self.sizes.device) % self.key_clusters
        return torch.repeat_interleave(numbers, self.sizes)

    @cached_property
    def _begins(self) -> list[int]:
        return [0, *self.sizes.cumsum(0).tolist()]
