"""The dtype of intermediate results."""

from __future__ import annotations

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What everything but the fused operators computes in, or at least sums in: float32 or better."""
    return torch.promote_types(dtype, torch.float32)
