"""Sets of key clusters as words of 32 bits: what a selection by tolerance is kept as."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 32


def number_of_words(members: int) -> int:
    return -(-members // BITS)


def pack_bits(mask: Tensor) -> Tensor:
    """(..., members) bool -> (..., words) int32: bit `j % 32` of word `j // 32` is member `j`."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % BITS)).unflatten(-1, (-1, BITS))
    # Bit 31 is the sign: its value is negative, and every sum fits an int32.
    values = 2 ** torch.arange(BITS, device=mask.device)
    values[-1] *= -1
    return (padded * values).sum(-1).int()


def unpack_bits(words: Tensor, members: int) -> Tensor:
    """(..., words) int32 -> (..., members) bool."""
    shift = torch.arange(BITS, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shift) & 1).bool().flatten(-2)[..., :members]
