"""Rows of numbers in eight bits each, with a scale of every row and of every channel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LARGEST = 127


class EightBits(NamedTuple):
    """What stands for (samples, heads, length, dim) numbers: the product of the three."""

    numbers: Tensor
    """int8, of the same shape"""
    rows: Tensor
    """float16, (samples, heads, length, 1)"""
    channels: Tensor
    """float32, (heads, 1, dim): a few channels of a key can be far larger than the others, and would leave no bits to
    them"""


def round_to_eight_bits(tensor: Tensor) -> EightBits:
    """With errors of at most half a scale of the row times that of the channel; a ValueError if one is not finite."""
    tensor = tensor.float()
    if not tensor.isfinite().all():
        raise ValueError("some of the numbers are not finite, which eight bits cannot say")
    channels = tensor.abs().amax((0, 2), keepdim=True)[0]
    relative = tensor / channels.masked_fill(channels == 0, 1)
    rows = (relative.abs().amax(3, keepdim=True) / _LARGEST).half()
    numbers = (relative / rows.float().masked_fill(rows == 0, 1)).round().clamp(-_LARGEST, _LARGEST)
    return EightBits(numbers.to(torch.int8), rows, channels)


def restore(rounded: EightBits) -> Tensor:
    """In float32: two products of each number, the same on every machine."""
    return rounded.numbers.float() * rounded.rows.float() * rounded.channels
