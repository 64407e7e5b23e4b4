"""What a launch is compiled for: padded sizes, tiles tuned for the width of a row, the arithmetic of a dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from muse_attention.backends.triton.runtime.chips import current_chip


def cdiv(number: int, size: int) -> int:
    """How many of a size hold a number. (Triton's functions of that kind take longer than a launch should.)"""
    return -(-number // size)


@triton.constexpr_function
def power_of_two(size: int) -> int:
    """The smallest that holds `size`, on the host and in kernels, like `padded`."""
    return 1 << max(0, size - 1).bit_length()


@triton.constexpr_function
def padded(size: int) -> int:
    """The power of two, at least 16, that holds `size`: what matrix units and ranges want."""
    return max(16, power_of_two(size))


def fitting(
    launch: dict[int, dict[str, int]],
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    by_registers: dict[int, dict[str, int]] | None = None,
) -> dict[str, int]:
    """How to launch a kernel: what was tuned for rows of at most so many bytes.

    `by_registers`: what is different where matrix units read operands from registers, with warps of 32 threads.
    """
    width = max(padded(head_dim), padded(value_dim)) * dtype.itemsize
    most = next(most for most in sorted(launch) if width <= most or most == max(launch))
    if by_registers is None or (chip := current_chip()).has_shared_operands:
        return launch[most]
    changes = {**by_registers.get(most, {})}
    if "num_warps" in changes:
        changes["num_warps"] = chip.warps(changes["num_warps"])
    return {**launch[most], **changes}


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """What kernels keep sums in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """What gradients of summaries are stored in: float16 would overflow, bfloat16 is as precise as its inputs."""
    return torch.float32 if dtype == torch.float16 else dtype
