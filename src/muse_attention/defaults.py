"""The default configuration for each length: one table."""

from __future__ import annotations

from typing import NamedTuple

from muse_attention.sizes import nearest_power_of_two

SMALLEST_BLOCK = 1024
"""The smallest block size that follows the length. Sequences up to it are attended to exactly."""

LONGEST_EXACT = 8 * 1024
"""Up to here nothing is faster than exact attention on a GPU: packed documents up to it are attended to exactly."""


class Default(NamedTuple):
    longest: int | None
    """longest sequence that it serves; None for any"""
    text: str
    """text of the configuration, as `MuSeConfig.named` reads it for the length"""
    blocks: int | None = None
    """approximate number of blocks: the block size is the nearest power of two. None: the text names it"""


DEFAULTS = (
    Default(LONGEST_EXACT, "Q16K64T0.01", blocks=8),
    Default(16 * 1024, "Q8K32T0.04", blocks=8),
    Default(32 * 1024, "Q8K32T0.05", blocks=16),
    Default(128 * 1024, "Q8K32T0.06", blocks=32),
    Default(None, "Q8K64T0.1,block_size=8192"),
)
"""From short sequences to long ones; the first that serves a length is taken.

Up to 8k nothing is faster than exact attention on a GPU, and the default is the one that is closest to it. What was
measured, and why these: docs/dev/lab-log.md, from "Blockwise MuSe" on, and benchmarks/speed.
"""


def default_text(length: int) -> str:
    """The text of the configuration for a length."""
    for default in DEFAULTS:
        if default.longest is None or length <= default.longest:
            if default.blocks is None:
                return default.text
            block_size = nearest_power_of_two(length, default.blocks, smallest=SMALLEST_BLOCK)
            return f"{default.text},block_size={block_size}"
    raise AssertionError("the last row of DEFAULTS serves any length")
