"""Losses and gradients of rows of logits, in place, by one Triton kernel.

Two passes over a row: the first finds its lse, the second writes `softmax - onehot` where the logits were. PyTorch's
operators make ten passes, most of them in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096


def replace_by_gradients(logits: Tensor, targets: Tensor, *, ignore_index: int, differentiate: bool) -> Tensor:
    """The loss of each row, (rows) in float32, 0 where a target is `ignore_index`.

    Args:
        logits: (rows, vocabulary), contiguous; with `differentiate` their gradients take their place
        targets: (rows) integers below the vocabulary, or `ignore_index`
    """
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _replace[(rows,)](
        logits, targets, losses, vocabulary, ignore_index, DIFFERENTIATE=differentiate,
        TILE=min(_TILE, triton.next_power_of_2(vocabulary)), num_warps=8,
    )  # fmt: skip
    return losses


@triton.jit
def _replace(logits, targets, losses, vocabulary, ignored, DIFFERENTIATE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * vocabulary
    target = tl.load(targets + row)
    counts = target != ignored
    column = tl.arange(0, TILE)
    greatest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for begin in range(0, vocabulary, TILE):
        logit = tl.load(here + begin + column, mask=begin + column < vocabulary, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(greatest, logit)
        origin = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(greatest - origin) + tl.exp(logit - origin)
        greatest = higher
    peak = tl.max(greatest, 0)
    lse = peak + tl.log(tl.sum(total * tl.exp(greatest - peak), 0))
    hit = tl.load(here + tl.where(counts, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counts, lse - hit, 0.0))
    if DIFFERENTIATE:
        tl.debug_barrier()  # the target's logit is read before it is replaced
        for begin in range(0, vocabulary, TILE):
            inside = begin + column < vocabulary
            logit = tl.load(here + begin + column, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(logit - lse) - tl.where(begin + column == target, 1.0, 0.0)
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(here + begin + column, gradient.to(logits.dtype.element_ty), mask=inside)
