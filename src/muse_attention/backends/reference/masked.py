"""Rows by number, and softmaxes over what is present."""

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
    """logsumexp over the last axis of what is present; -inf, with zero gradient, where nothing is."""
    largest = torch.where(present, logits, -math.inf).amax(-1, keepdim=True).detach()
    largest = torch.where(largest == -math.inf, 0, largest)
    total = torch.exp(torch.where(present, logits - largest, -math.inf)).sum(-1)
    some = present.any(-1)
    return torch.where(some, torch.log(torch.where(some, total, 1)) + largest[..., 0], -math.inf)


def masked_softmax(logits: Tensor, lse: Tensor, present: Tensor) -> Tensor:
    """`exp(logits - lse)` of what is present, `lse` being its logsumexp over the last axis; 0 elsewhere."""
    finite_lse = torch.where(lse == -math.inf, 0, lse)[..., None]
    return torch.exp(torch.where(present, logits - finite_lse, -math.inf))
