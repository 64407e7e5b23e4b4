"""What can be asked for: one attention on inputs of one shape."""

from __future__ import annotations

from typing import NamedTuple

from muse_attention.benchmark.matched import at_matched_sparsity


class Shape(NamedTuple):
    """What cases of one run may differ in besides the attention; the batch is the same for all."""

    length: int
    heads: int
    head_dim: int


class Request(NamedTuple):
    attention: str
    """as it was asked for: `moba`"""
    shape: Shape

    @property
    def full_name(self) -> str:
        """With the settings it has at this length: `moba:L4kB256R1`."""
        return at_matched_sparsity(self.attention, self.shape.length)
