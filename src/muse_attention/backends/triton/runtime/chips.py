"""Properties of the GPU on which launch settings depend."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget

_HOPPER, _CONSUMER_BLACKWELL = 90, 120
"""Compute capabilities, times 10."""


@dataclass(frozen=True)
class Chip:
    """A kind of GPU."""

    has_shared_operands: bool
    """Whether matrix units read operands from shared memory: Hopper and the Blackwell of data centres. Elsewhere
    operands take registers, so that the same tile needs more of them: tiles are smaller, and the limits on registers
    that were measured on Hopper would spill hundreds of bytes a thread. (AMD's compiler has no such limits.)"""
    threads_of_warp: int

    def warps(self, number: int) -> int:
        """The number of warps with as many threads as `number` warps of 32."""
        return max(1, number * 32 // self.threads_of_warp)


MEASURED = Chip(has_shared_operands=True, threads_of_warp=32)
"""Hopper: launch settings were measured there, unless they are for another chip."""


def current_chip() -> Chip:
    """The chip of the current device; for the interpreter, `MEASURED`."""
    if triton.knobs.runtime.interpret:
        return MEASURED
    return chip_of(triton.runtime.driver.active.get_current_target())


def chip_of(target: GPUTarget) -> Chip:
    is_shared = target.backend == "cuda" and _HOPPER <= target.arch < _CONSUMER_BLACKWELL
    return Chip(is_shared, target.warp_size)
