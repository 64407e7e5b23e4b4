"""Merge partial softmaxes into one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
        out += (partial.lse - shift).exp()[..., None] * partial.out
    return Partial(out, lse)
