"""Tensors of the rank before: a sliding window at the start of a part of a sequence looks back into the part before.

Only the tokens of one window go from rank to rank, so it moves far less than an exchange of sequence for heads.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from muse_attention.distributed.all_to_all import exchanged, mesh_ranks


def from_rank_before(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor of the rank before this one, in a ring: the first rank gets that of the last. Differentiable.

    All ranks must hold equal shapes. Each sends its tensor once, and its gradient back once. Collective: every rank of
    the mesh must call it, and what it returns must be part of what is differentiated on every rank.
    """
    rank, ranks = mesh.get_local_rank(), mesh_ranks(mesh)
    sent, received = ([int(other == (rank + step) % ranks) for other in range(ranks)] for step in (1, -1))
    return exchanged(tensor[None], mesh, received, sent)[0]
