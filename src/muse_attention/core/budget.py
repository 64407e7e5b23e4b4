"""The budget of a head: which expected errors it can afford to retrieve, by a histogram of their logarithm.

Counts are integers, so the decision does not depend on the order in which pairs are counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

ERROR_BINS = 128
BINS_PER_OCTAVE = 4
SMALLEST_OCTAVE = -20
"""Errors below 2^-20 share a bin."""
LARGEST_GROWTH = 8.0
"""Exponent of the growth of a weight that is feared, at most: its error is then below 2^12, in the last bin."""


def error_bins(errors: Tensor) -> Tensor:
    """The bin of each expected error, int64: a quarter of an octave, from 2^-20 to 2^12."""
    place = torch.floor(BINS_PER_OCTAVE * (torch.log2(errors) - SMALLEST_OCTAVE))
    return torch.nan_to_num(place, nan=ERROR_BINS - 1).clamp(0, ERROR_BINS - 1).long()


def lowest_affordable_bin(counts: Tensor, budget: int) -> Tensor:
    """(...,) int64: with this bin and all above it, no more than `budget` of the (..., bins) counts are taken."""
    taken = counts.flip(-1).cumsum(-1).flip(-1)  # with each bin as the lowest
    return (taken > budget).sum(-1)
