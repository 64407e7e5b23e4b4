"""Tensors of the rank before: a sliding window at the start of a part of a sequence looks back into the part before.

Only the tokens of one window go from rank to rank, so it moves far less than an exchange of sequence for heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from muse_attention.distributed.all_to_all import mesh_ranks


def from_rank_before(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor of the rank before this one, in a ring: the first rank gets that of the last. Differentiable.

    All ranks must hold equal shapes. Each sends its tensor once, and its gradient back once. Collective: every rank of
    the mesh must call it, and what it returns must be part of what is differentiated on every rank.
    """
    group = mesh.get_group().group_name
    received: Tensor = _Ring.apply(tensor.contiguous(), mesh.get_local_rank(), mesh_ranks(mesh), 1, group)
    return received


class _Ring(torch.autograd.Function):
    """Send to the rank that is `step` further; gradients go the opposite way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rank: int, ranks: int, step: int, group: Any) -> Tensor:
        ctx.ring = (rank, ranks, -step, group)
        to, source = ([int(other == (rank + way) % ranks) for other in range(ranks)] for way in (step, -step))
        received: Tensor = collectives.wait_tensor(collectives.all_to_all_single(tensor[None], source, to, group))
        return received[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Ring.apply(gradient.contiguous(), *ctx.ring), None, None, None, None
