"""Stage 6: partial softmaxes into one, and the one number per query their backward passes share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muse_attention.backends.torch.exponential import exp_
from muse_attention.core.structures import Partial


def merge(partials: Sequence[Partial], dtype: torch.dtype | None = None) -> Partial:
    """The softmax over all terms of all partials. A query without any term gets output 0 and lse -inf.

    Outputs are summed in `dtype`; None for that of the first.
    """
    if len(partials) == 1:
        return partials[0]
    lse = torch.stack([partial.lse for partial in partials]).logsumexp(0)
    shift = torch.where(lse == -torch.inf, 0, lse)
    out = torch.zeros_like(partials[0].out, dtype=dtype)
    for partial in partials:
        out += exp_(partial.lse - shift)[..., None] * partial.out
    return Partial(out, lse)


def shared_delta(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """`delta = sum(dO * O) - dL` of each query: with `L`, all that a term's backward needs to know of the others."""
    delta = (out * grad_out).sum(-1)
    return delta if grad_lse is None else delta - grad_lse
