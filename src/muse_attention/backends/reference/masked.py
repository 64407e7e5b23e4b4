"""Rows by number, and softmaxes over the terms that are present."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def take_rows(table: Tensor, rows: Tensor) -> Tensor:
    """`table[x, h, rows[x, h, n]]` for every n."""
    batch = torch.arange(table.shape[0], device=table.device)[:, None, None]
    head = torch.arange(table.shape[1], device=table.device)[:, None]
    return table[batch, head, rows]


def masked_logsumexp(logits: Tensor, present: Tensor) -> Tensor:
    """logsumexp of the terms present on the last axis; -inf, with zero gradient, where none is."""
    largest = torch.where(present, logits, -math.inf).amax(-1, keepdim=True).detach()
    largest = torch.where(largest == -math.inf, 0, largest)
    total = torch.exp(torch.where(present, logits - largest, -math.inf)).sum(-1)
    any_present = present.any(-1)
    return torch.where(any_present, torch.log(torch.where(any_present, total, 1)) + largest[..., 0], -math.inf)


def masked_softmax(logits: Tensor, lse: Tensor, present: Tensor) -> Tensor:
    """`exp(logits - lse)` of the terms present, whose logsumexp over the last axis is `lse`; 0 elsewhere."""
    finite_lse = torch.where(lse == -math.inf, 0, lse)[..., None]
    return torch.exp(torch.where(present, logits - finite_lse, -math.inf))
