"""Fill tensors."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.numbers import cdiv
from muse_attention.backends.triton.runtime.launching import kernel

_WIDTH = 4096
_ALL_BITS = 255


def fill(tensor: Tensor, value: float) -> Tensor:
    """Fill a contiguous tensor, and return it. Bytes are written four at a time where that is possible."""
    written = tensor
    if tensor.dtype == torch.uint8 and value == _ALL_BITS and tensor.numel() % 4 == 0:
        written, value = tensor.view(-1).view(torch.int32), -1
    if tensor.numel() > 0:
        grid = (cdiv(written.numel(), _WIDTH),)
        _fill[grid](tensor_ptr=written, number=written.numel(), VALUE=value, WIDTH=_WIDTH)
    return tensor


@kernel(stage="selection", do_not_specialize=["number"])
def _fill(tensor_ptr, number, VALUE: tl.constexpr, WIDTH: tl.constexpr):
    """Store `VALUE` into all of `number` entries. Grid: (number / WIDTH,)."""
    offs = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)  # [WIDTH]
    tl.store(tensor_ptr + offs, tl.full([WIDTH], VALUE, tensor_ptr.dtype.element_ty), mask=offs < number)
