"""Padded sizes, launch settings for the width of a row, and the dtypes of sums and gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from muse_attention.backends.triton.runtime.chips import current_chip


def cdiv(number: int, size: int) -> int:
    """`number / size`, rounded up. (Triton's own function takes longer than a launch should.)"""
    return -(-number // size)


@triton.constexpr_function
def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`. Like `padded`, for the host and for kernels."""
    return 1 << max(0, size - 1).bit_length()


@triton.constexpr_function
def padded(size: int) -> int:
    """The smallest power of two that is at least `size` and 16: what matrix units and ranges want."""
    return max(16, power_of_two(size))


def fitting(
    launch: dict[int, dict[str, int]],
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    by_registers: dict[int, dict[str, int]] | None = None,
) -> dict[str, int]:
    """The launch settings for rows of this width. The keys of `launch` are widths in bytes.

    `by_registers`: what differs where matrix units read operands from registers, for warps of 32 threads.
    """
    width = max(padded(head_dim), padded(value_dim)) * dtype.itemsize
    tuned_width = next(tuned for tuned in sorted(launch) if width <= tuned or tuned == max(launch))
    if by_registers is None or (chip := current_chip()).has_shared_operands:
        return launch[tuned_width]
    changes = {**by_registers.get(tuned_width, {})}
    if "num_warps" in changes:
        changes["num_warps"] = chip.warps(changes["num_warps"])
    return {**launch[tuned_width], **changes}


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """The dtype of sums in kernels."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gradients of summaries: float16 would overflow, bfloat16 is as precise as its inputs."""
    return torch.float32 if dtype == torch.float16 else dtype
