"""What can be asked for: one attention on inputs of one shape."""

from __future__ import annotations

from typing import NamedTuple

from muse_lab.benchmark.matched import at_matched_sparsity


class Shape(NamedTuple):
    """What cases of one run may differ in besides the attention."""

    length: int
    heads: int
    """of the queries"""
    key_heads: int
    """of the keys and values, each shared by as many heads of the queries as any other"""
    head_dim: int
    batch: int


class BenchmarkRequest(NamedTuple):
    attention: str
    """as it was asked for: `moba`"""
    shape: Shape

    @property
    def full_name(self) -> str:
        """With the settings it has at this length: `moba:L4kB256R1`."""
        return at_matched_sparsity(self.attention, self.shape.length)
