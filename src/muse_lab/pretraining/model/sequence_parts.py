"""Sequences in equal parts, one for each rank of a mesh: rank `r` of `R` has tokens `r N / R` to `(r + 1) N / R`."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def own_part(tensor: Tensor, mesh: DeviceMesh | None, dim: int = 1) -> Tensor:
    """This rank's part of a tensor that every rank has whole; all of it without a mesh.

    Args:
        dim: the dimension of the tokens
    """
    if mesh is None:
        return tensor
    ranks, length = mesh.size(), tensor.shape[dim]
    if length % ranks:
        raise ValueError(f"{ranks} ranks along the sequence do not divide its {length} tokens; choose a multiple")
    return tensor.narrow(dim, mesh.get_local_rank() * (length // ranks), length // ranks)
