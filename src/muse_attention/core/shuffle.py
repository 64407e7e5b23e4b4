"""The only randomness of the method: a permutation computed from an integer seed.

It is arithmetic, not a random generator, so it is the same on every device and in every recomputation (activation
checkpointing restores the state of the default generators only).
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def seeded_shuffle(length: int, seed: int, device: torch.device) -> Tensor:
    """A permutation of `range(length)`, (length,) int64: positions in the order of a 32-bit hash."""
    positions = torch.arange(length, device=device)
    mixed = (positions + ((seed + 1) * 0x9E3779B9 & _WORD)) & _WORD
    for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = ((mixed ^ (mixed >> shift)) * multiplier) & _WORD
    mixed = mixed ^ (mixed >> 16)
    # The position in the low bits makes every sort key distinct, so any sorting algorithm gives the same order.
    return torch.argsort(((mixed >> 1) << 32) | positions)
