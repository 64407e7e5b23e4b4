"""Several tables of integers in one tensor: what a forward pass leaves to the backward pass is one output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

_MULTIPLE = 32


def size_of_tables(shapes: Sequence[tuple[int, ...]]) -> int:
    """Integers that have room for tables of all these shapes."""
    return sum(map(_room, shapes))


def tables_in(memory: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of a tensor of that size, one for each shape."""
    begins = accumulate(map(_room, shapes), initial=0)
    return [memory[begin : begin + math.prod(shape)].view(shape) for begin, shape in zip(begins, shapes, strict=False)]


def _room(shape: tuple[int, ...]) -> int:
    """With that much for each, all begin where kernels expect memory to begin."""
    return -(-math.prod(shape) // _MULTIPLE) * _MULTIPLE
