"""Where float32 is too coarse for the logits.

The backward pass recomputes the weights from the lse: `p = exp(s - L)`. In float32 an `L` of 600 is rounded by up to
3e-5, and so is every weight. Plain PyTorch keeps the weights and has no such error. So a float32 call on a CPU whose
lse turns out large is computed again in float64, and its lse is kept in float64 for the backward pass. On a GPU that
check would wait for the device, so float32 is computed in float32 there. Blockwise MuSe takes the results in float64
from the first large lse of each head on, so that no later token changes a bit of an earlier output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muse_attention.core.precision import compute_dtype

LARGEST_LSE = 64.0
"""From here on, float32 would cost the weights six of their 24 bits."""


def lse_dtype(query: Tensor) -> torch.dtype:
    """The dtype of the lse: float64 where it may have been computed so."""
    may_repeat = query.dtype == torch.float32 and query.device.type == "cpu"
    return torch.float64 if may_repeat else compute_dtype(query.dtype)


def is_too_coarse(query: Tensor, lse: Tensor) -> bool:
    """Whether a call may be repeated in float64, and has to be. A lse that is not finite counts as large."""
    if lse_dtype(query) == compute_dtype(query.dtype):
        return False
    return bool(is_large(lse).any())


def is_large(lse: Tensor) -> Tensor:
    """Where a lse is too large for float32."""
    return ~(lse.abs() <= LARGEST_LSE)
