"""Sizes: tiles of queries, pieces and tiles of keys, and columns in the blocks of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.device_functions import log2_floor
from muse_attention.backends.triton.numbers import cdiv
from muse_attention.config import MuSeConfig
from muse_attention.core.generations import Generations
from muse_attention.core.query_tiles import tiles_of_block

PIECE = 16
"""Sorted keys of a bucket are padded to a multiple of it."""
KEYS_OF_TILE = 64
"""Keys in a tile, all of one bucket: one program sums their gradients."""


@dataclass(frozen=True)
class Geometry:
    """The sizes of a call, with the batch and head axes flattened."""

    heads: int
    """H, of queries"""
    key_heads: int
    """G"""
    length: int
    config: MuSeConfig
    is_causal: bool

    @classmethod
    def of(cls, query: Tensor, key: Tensor, config: MuSeConfig, *, is_causal: bool) -> Geometry:
        """From (batch, heads, N, D) tensors."""
        batch, heads, length, _ = query.shape
        return cls(batch * heads, batch * key.shape[1], length, config, is_causal)

    @property
    def generations(self) -> Generations:
        return Generations(self.config.number_of_blocks(self.length), self.is_causal)

    @property
    def blocks(self) -> int:
        return self.generations.blocks

    @property
    def seen_blocks(self) -> int:
        return self.generations.seen_blocks

    @property
    def columns(self) -> int:
        """The number of buckets in all seen blocks."""
        return self.seen_blocks * self.config.key_clusters

    @property
    def query_tiles(self) -> int:
        """The most tiles of queries in a block."""
        return tiles_of_block(self.config)

    @property
    def key_room(self) -> int:
        """The most places that the sorted keys of a block need."""
        return PIECE * (cdiv(self.config.block_size, PIECE) + min(self.config.key_clusters, self.config.block_size))

    @property
    def key_tiles(self) -> int:
        """The most tiles of keys in a block."""
        return cdiv(self.config.block_size, KEYS_OF_TILE) + min(self.config.key_clusters, self.config.block_size)

    @property
    def rows(self) -> int:
        """Rows of a tile of queries; matrix units want at least 16."""
        return max(16, self.config.tile)

    def sizes(self, *names: str) -> dict[str, int]:
        """Arguments of kernels, by name."""
        every = {
            "length": self.length,
            "block_size": self.config.block_size,
            "blocks": self.blocks,
            "seen_blocks": self.seen_blocks,
            "query_clusters": self.config.query_clusters,
            "key_clusters": self.config.key_clusters,
            "generations": self.generations.number,
            "summarised": self.generations.summarised_blocks,
            "query_tiles": self.query_tiles,
            "key_tiles": self.key_tiles,
            "key_room": self.key_room,
            "shared_by": self.heads // self.key_heads,
        }
        return {name: every[name] for name in names}


@triton.jit
def generation_of_block(block, IS_CAUSAL: tl.constexpr):
    """The generation of a block's queries, and the first slot of its summaries."""
    if IS_CAUSAL:
        generation = log2_floor(tl.maximum(block, 1))
        return generation, first_summary(generation)
    else:
        return block * 0, block * 0


@triton.jit
def generation_of_slot(slot, IS_CAUSAL: tl.constexpr):
    """The generation of a slot, and the block summarised in it."""
    if IS_CAUSAL:
        guess = log2_floor(slot + 2)
        generation = tl.where(slot >= first_summary(guess), guess, guess - 1)
        return generation, slot - first_summary(generation)
    else:
        return slot * 0, slot


@triton.jit
def first_summary(generation):
    """The first slot of a causal generation: each generation `s` before it summarises `2^(s+1) - 1` blocks."""
    return (2 << generation) - 2 - generation
