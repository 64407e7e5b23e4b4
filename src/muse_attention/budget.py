"""The budget of a head: which expected errors it can afford to retrieve, by a histogram of their logarithm.

Counts are integers, so the decision does not depend on the order in which pairs are counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

ERROR_BINS = 128
BINS_PER_OCTAVE = 4
SMALLEST_OCTAVE = -24
"""Below 2^-24 an error is lost in the rounding of float32: all of it is one bin."""


def error_bins(errors: Tensor) -> Tensor:
    """The bin of each expected error, int64: a quarter of an octave, from 2^-24 to 2^8."""
    place = torch.floor(BINS_PER_OCTAVE * (torch.log2(errors) - SMALLEST_OCTAVE))
    return torch.nan_to_num(place, nan=ERROR_BINS - 1).clamp(0, ERROR_BINS - 1).long()


def lowest_affordable_bin(counts: Tensor, budget: int) -> Tensor:
    """(...,) int64: with this bin and all above it, no more than `budget` of the (..., bins) counts are taken."""
    taken = counts.flip(-1).cumsum(-1).flip(-1)  # with each bin as the lowest
    return (taken > budget).sum(-1)
