"""Several tables of integers in one tensor, so that the forward pass saves one output for the backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

_MULTIPLE = 32


def size_of_tables(shapes: Sequence[tuple[int, ...]]) -> int:
    """The number of integers that tables of these shapes need together."""
    return sum(map(_room, shapes))


def tables_in(memory: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of a tensor of that size, one for each shape."""
    begins = accumulate(map(_room, shapes), initial=0)
    return [memory[begin : begin + math.prod(shape)].view(shape) for begin, shape in zip(begins, shapes, strict=False)]


def _room(shape: tuple[int, ...]) -> int:
    """Rounded up, so that every table is aligned as kernels expect."""
    return -(-math.prod(shape) // _MULTIPLE) * _MULTIPLE
