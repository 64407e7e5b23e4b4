"""One value everywhere, and copies."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.numbers import cdiv
from muse_attention.backends.triton.runtime.launching import kernel

_WIDTH = 4096


def fill(tensor: Tensor, value: float) -> Tensor:
    """The contiguous tensor, with this value everywhere."""
    if tensor.numel() > 0:
        _fill[(cdiv(tensor.numel(), _WIDTH),)](tensor, tensor.numel(), VALUE=value, WIDTH=_WIDTH)
    return tensor


def copied(tensor: Tensor) -> Tensor:
    """A copy of a contiguous tensor, in memory of its own."""
    copy = tensor.new_empty(tensor.shape)
    _copy[(cdiv(tensor.numel(), _WIDTH),)](tensor, copy, tensor.numel(), WIDTH=_WIDTH)
    return copy


@kernel(do_not_specialize=["number"])
def _fill(tensor, number, VALUE: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    tl.store(tensor + at, tl.full([WIDTH], VALUE, tensor.dtype.element_ty), mask=at < number)


@kernel(do_not_specialize=["number"])
def _copy(source, target, number, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    tl.store(target + at, tl.load(source + at, mask=at < number), mask=at < number)
