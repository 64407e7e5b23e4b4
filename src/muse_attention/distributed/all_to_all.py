"""From shards of the sequence to shards of the heads, and back: two all-to-alls, differentiable.

Rank `r` of `R` holds tokens `r N / R` to `(r + 1) N / R` of every sequence, and gets heads `r H / R` to
`(r + 1) H / R`. All ranks must hold equally many tokens.

A rank sends each other rank 1/R of its tensor, so `(R - 1) / R` of its bytes, and receives as many. The send buffer and
the receive buffer are the only copies beside the result. The backward pass is the opposite exchange, of as many bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh


def sequence_to_heads(tensor: Tensor, mesh: DeviceMesh, copies: int = 1) -> Tensor:
    """All tokens of some heads. Collective: every rank of the mesh must call it.

    Args:
        tensor: (batch, heads, length / ranks, ...), this rank's tokens of all heads
        mesh: of one dimension
        copies: each head is repeated this many times in a row, as for key heads that several ranks need; gradients of
            the copies are summed

    Returns:
        (batch, copies * heads / ranks, length, ...), all tokens of this rank's heads; `tensor` itself on one rank.
    """
    ranks = mesh_ranks(mesh)
    _check_axes(tensor)
    if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
        raise ValueError(f"copies={copies!r} must be an integer of at least 1")
    check_heads("tensor", tensor.shape[1] * copies, ranks)
    if ranks == 1 and copies == 1:
        return tensor
    of_heads = tensor.transpose(0, 1)
    received = _exchanged(of_heads if copies == 1 else of_heads.repeat_interleave(copies, 0), mesh)
    return received.unflatten(0, (ranks, -1)).movedim(0, 2).transpose(0, 1).flatten(2, 3)


def heads_to_sequence(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's tokens of all heads. Collective: every rank of the mesh must call it.

    Args:
        tensor: (batch, heads / ranks, length, ...), all tokens of this rank's heads
        mesh: of one dimension

    Returns:
        (batch, heads, length / ranks, ...); `tensor` itself on one rank.
    """
    ranks = mesh_ranks(mesh)
    _check_axes(tensor)
    if tensor.shape[2] % ranks:
        raise ValueError(f"the {ranks} ranks of the mesh do not divide the length {tensor.shape[2]}; pad the sequences")
    if ranks == 1:
        return tensor
    parts = tensor.unflatten(2, (ranks, -1)).movedim(2, 0).transpose(1, 2)
    return _exchanged(parts.flatten(0, 1), mesh).transpose(0, 1)


def from_rank_before(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor of the rank before this one, in a ring: the first rank gets that of the last. Differentiable.

    What a sliding window sees of the part before goes this way, and is far less than an exchange of sequence for heads.
    All ranks must hold equal shapes. Each sends its tensor once, and its gradient back once. Collective: every rank of
    the mesh must call it, and what it returns must be part of what is differentiated on every rank.
    """
    rank, ranks = mesh.get_local_rank(), mesh_ranks(mesh)
    sent, received = ([int(other == (rank + step) % ranks) for other in range(ranks)] for step in (1, -1))
    return _exchanged(tensor[None], mesh, received, sent).squeeze(0)  # (The gradient of an index is a copy.)


def mesh_ranks(mesh: DeviceMesh) -> int:
    """The number of ranks of a mesh that has one dimension; a ValueError for any other."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh is a {type(mesh).__name__}; make one with torch.distributed.device_mesh.init_device_mesh"
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        advice = (
            f"one of them, as mesh[{names[-1]!r}]" if names else "a mesh with names, and one of them, as mesh['name']"
        )
        raise ValueError(f"mesh has {mesh.ndim} dimensions; pass {advice}")
    return mesh.size()


def check_heads(name: str, heads: int, ranks: int) -> None:
    """Raise ValueError if the ranks do not divide the heads."""
    if heads % ranks:
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ValueError(
            f"{name} has {heads} heads, not divisible by the {ranks} ranks of the mesh; choose their number from "
            f"{fitting}"
        )


def _check_axes(tensor: Tensor) -> None:
    if tensor.dim() < 3:
        raise ValueError(f"the tensor has shape {tuple(tensor.shape)}; it must be (batch, heads, length, ...)")


def _exchanged(
    parts: Tensor, mesh: DeviceMesh, received: list[int] | None = None, sent: list[int] | None = None
) -> Tensor:
    """Cut the first axis into one part for each rank: part `r` goes to rank `r`, and part `r` of the result is from it.

    Parts are equal, unless `received` and `sent` tell their lengths. Differentiable: gradients go the opposite way.
    """
    return _AllToAll.apply(parts.contiguous(), received, sent, mesh.get_group().group_name)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, received: list[int] | None, sent: list[int] | None, group: Any) -> Tensor:
        ctx.opposite = (sent, received, group)
        return collectives.wait_tensor(collectives.all_to_all_single(parts, received, sent, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(gradient.contiguous(), *ctx.opposite), None, None, None
