"""A request: one attention on inputs of one shape, with settings that make a fair comparison."""

from __future__ import annotations

from dataclasses import dataclass

from muse_attention.config import MuSeConfig
from muse_attention.registry import config_at
from muse_attention.sizes import format_size

MATCHED_KINDS = ("muse", "block_diagonal", "moba")
"""The kinds of attention that have a setting at matched sparsity."""


@dataclass(frozen=True, order=True)
class Shape:
    """The sizes in which cases of one run may differ."""

    length: int
    heads: int
    """query heads"""
    key_heads: int
    """key and value heads, each shared by the same number of query heads"""
    head_dim: int
    batch: int


@dataclass(frozen=True)
class BenchmarkRequest:
    attention: str
    """as requested: `moba`"""
    shape: Shape

    @property
    def full_name(self) -> str:
        """The attention with its settings at this length: `moba:L4kB256R1`."""
        return at_matched_sparsity(self.attention, self.shape.length)


def at_matched_sparsity(kind: str, length: int) -> str:
    """The full name of an attention; one without settings gets those that match `MuSeConfig.paper(length)`.

    A query of that attends exactly to its own block of B tokens and to R of K clusters, B/16 tokens on average.
    Block-diagonal attention has the block, MoBA the block and one retrieved block of B/16. `flex_attention` has a
    sliding window of as many tokens as MoBA on average. `nsa` has the sizes of its paper at every length,
    `flash_sparse_attn` the default threshold of its package. `muse` is `MuSeConfig.for_length(length)`.
    """
    config = MuSeConfig.paper(length)
    block_size = format_size(config.block_size)
    settings = {
        "block_diagonal": block_size,
        "moba": f"L{block_size}B{format_size(config.block_size // 16)}R1",
        "flex_attention": f"W{format_size(max(1, config.block_size // 2 + config.block_size // 16))}",
        "nsa": "B64R16",
        "flash_sparse_attn": "T1",
    }
    if kind in settings:
        return f"{kind}:{settings[kind]}"
    muse = config_at(kind, length)
    return kind if muse is None else f"muse:{muse}"
