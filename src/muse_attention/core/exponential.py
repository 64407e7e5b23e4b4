"""`exp` and `exp2` in place, inside of operators.

On x86 `torch.exp` is MKL's, which takes a path 10 to 40 times slower for every result that underflows. Attention
weights underflow all the time, and masked ones always do. `torch.exp2` has no such path. But the last numbers of each
thread, too few for a vector, go through a scalar function that rounds differently. A row of attention must not depend
on where it lies in a batch: here every thread has whole vectors, and the end is padded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SHARE = 1 << 15
"""The most numbers that PyTorch gives to one thread while there are others."""
_VECTORS = 64
"""A multiple of how many numbers any processor takes at a time."""


def exp_(exponents: Tensor) -> Tensor:
    return exp2_(exponents.mul_(math.log2(math.e)))


def exp2_(exponents: Tensor) -> Tensor:
    """Of a contiguous tensor."""
    if exponents.device.type != "cpu":
        return exponents.exp2_()
    numbers = exponents.view(-1)
    whole = _whole_vectors(numbers.shape[0])
    if whole:
        numbers[:whole].exp2_()
    if rest := numbers.shape[0] - whole:
        padded = torch.nn.functional.pad(numbers[whole:], (0, -rest % _VECTORS))
        numbers[whole:] = padded.exp2_()[:rest]
    return exponents


def _whole_vectors(numbers: int) -> int:
    """About so many numbers, which PyTorch divides among threads in equal parts of whole vectors."""
    threads = min(torch.get_num_threads(), -(-numbers // _SHARE))
    while threads > 0:
        whole = numbers // (_VECTORS * threads) * _VECTORS * threads
        if min(torch.get_num_threads(), -(-whole // _SHARE)) == threads:
            return whole
        threads -= 1
    return 0
