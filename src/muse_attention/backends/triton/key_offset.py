"""The key offset: a vector that the keys of a head share, subtracted from the means of keys before they are stored.

Keys of trained models often share an offset many times as large as their differences. A mean stored in bfloat16 is
rounded by up to 2^-9 of its size, offset included, and so would be every logit of a summary. Without the offset it is
rounded by 2^-9 of the difference. The offset adds `r . offset` to all logits of a query alike: one number, kept in
float32.

The offset changes results by rounding only, so it is a constant for the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.numbers import accumulator, cdiv
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.core.precision import compute_dtype

_SAMPLE = 64
"""Keys in the sample, at equal distances in the sequence."""
_DIMS = 4
"""Dimensions per program."""


@dataclass(frozen=True)
class QueryGradients:
    """Gradients of queries: each is `centred + offset_factor * offset`."""

    centred: Tensor
    """(..., D): the gradient with the offset subtracted from the keys"""
    offset_factor: Tensor
    """(...,)"""


def find_key_offset(keys: Tensor, first: int | None = None) -> Tensor:
    """(G, D): in each dimension, halfway between the quartiles of a sample of (G, N, D) keys, or of the `first` keys.

    A few gigantic keys, which would move a mean, hardly move it. It is 0 where the quartiles have different signs:
    there is little to gain, and the mean of a single key stays exact. It is representable in the keys' dtype, so that
    subtracting it from a key close to it is exact.
    """
    heads, length, head_dim = keys.shape
    offset = keys.new_empty(heads, head_dim, dtype=compute_dtype(keys.dtype))
    # (With a larger offset the differences could overflow.)
    largest = torch.finfo(keys.dtype).max / 4
    _find_middle[(cdiv(head_dim, _DIMS), heads)](
        keys_ptr=keys, offset_ptr=offset, length=length, first=first or length, D=head_dim, DIMS=_DIMS, SAMPLE=_SAMPLE,
        LARGEST=largest, ACC=accumulator(keys.dtype),
    )  # fmt: skip
    return offset


@triton.jit
def _load_finite(ptrs, mask, ACC: tl.constexpr):
    """0 for what is not finite: such a key must poison what attends to it, not the offset of all."""
    loaded = tl.load(ptrs, mask=mask, other=0.0).to(ACC)
    return tl.where(tl.abs(loaded) < float("inf"), loaded, 0.0)


@kernel(stage="summaries", do_not_specialize=["length", "first"])
def _find_middle(
    keys_ptr, offset_ptr, length, first, D: tl.constexpr, DIMS: tl.constexpr, SAMPLE: tl.constexpr,
    LARGEST: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Halfway between the quartiles of a sample, in some dimensions, from the rank of each key.

    Grid: (D / DIMS, G). `keys_ptr`: (G, N, D); `offset_ptr`: (G, D).
    """
    head = tl.program_id(1).to(tl.int64)
    offs_sample, offs_d = tl.arange(0, SAMPLE), tl.program_id(0) * DIMS + tl.arange(0, DIMS)  # [SAMPLE], [DIMS]
    mask_d = offs_d < D  # [DIMS]
    # (Fewer keys than that are sampled several times.)
    offs_row = head * length + offs_sample.to(tl.int64) * first // SAMPLE  # [SAMPLE]
    mask = mask_d[None, :] & (offs_sample >= 0)[:, None]  # [SAMPLE, DIMS]
    sample = _load_finite(keys_ptr + offs_row[:, None] * D + offs_d[None, :], mask, ACC)  # [SAMPLE, DIMS]
    # How many of the sample come before each, in each dimension.
    own, other = sample[:, None, :], sample[None, :, :]  # [SAMPLE, 1, DIMS], [1, SAMPLE, DIMS]
    # [SAMPLE, SAMPLE, DIMS]
    comes_first = (other < own) | ((other == own) & (offs_sample[None, :] < offs_sample[:, None])[:, :, None])
    rank = tl.sum(comes_first.to(tl.int32), 1)  # [SAMPLE, DIMS]
    lower = tl.sum(tl.where(rank == SAMPLE // 4, sample, 0.0), 0)  # [DIMS]
    upper = tl.sum(tl.where(rank == SAMPLE - 1 - SAMPLE // 4, sample, 0.0), 0)  # [DIMS]
    middle = (0.5 * lower + 0.5 * upper).to(keys_ptr.dtype.element_ty).to(ACC)  # [DIMS]
    is_common = ((lower > 0) | (upper < 0)) & (tl.abs(middle) < LARGEST)  # [DIMS]
    tl.store(offset_ptr + head * D + offs_d, tl.where(is_common, middle, 0.0), mask=mask_d)
