"""Tensors in eight bits per number, with a scale for every row and for every channel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LARGEST = 127


class EightBits(NamedTuple):
    """A (samples, heads, length, dim) tensor, as the product of three."""

    numbers: Tensor
    """int8, of the same shape"""
    rows: Tensor
    """float16, (samples, heads, length, 1)"""
    channels: Tensor
    """float32, (heads, 1, dim): a few channels of a key can be far larger than the others, and would leave no bits to
    them"""


def round_to_eight_bits(tensor: Tensor) -> EightBits:
    """Round to at most half a row's scale times the channel's; raises ValueError if a number is not finite."""
    tensor = tensor.float()
    if not tensor.isfinite().all():
        raise ValueError("some of the numbers are not finite, which eight bits cannot represent")
    channels = tensor.abs().amax((0, 2), keepdim=True)[0]
    relative = tensor / channels.masked_fill(channels == 0, 1)
    rows = (relative.abs().amax(3, keepdim=True) / _LARGEST).half()
    numbers = (relative / rows.float().masked_fill(rows == 0, 1)).round().clamp(-_LARGEST, _LARGEST)
    return EightBits(numbers.to(torch.int8), rows, channels)


def restore(rounded: EightBits) -> Tensor:
    """The tensor in float32, by two products per number, the same on every machine."""
    return rounded.numbers.float() * rounded.rows.float() * rounded.channels
