"""The dtype of intermediate results."""

from __future__ import annotations

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which everything but the fused operators computes, or at least sums: float32 or better."""
    return torch.promote_types(dtype, torch.float32)
