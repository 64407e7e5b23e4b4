"""What can be asked for: one attention on inputs of one shape."""

from __future__ import annotations

from dataclasses import dataclass

from muse_lab.benchmark.matched import at_matched_sparsity


@dataclass(frozen=True, order=True)
class Shape:
    """What cases of one run may differ in besides the attention."""

    length: int
    heads: int
    """of the queries"""
    key_heads: int
    """of the keys and values, each shared by as many heads of the queries as any other"""
    head_dim: int
    batch: int


@dataclass(frozen=True)
class BenchmarkRequest:
    attention: str
    """as it was asked for: `moba`"""
    shape: Shape

    @property
    def full_name(self) -> str:
        """With the settings it has at this length: `moba:L4kB256R1`."""
        return at_matched_sparsity(self.attention, self.shape.length)
