"""Whether all ranks hold tensors of equal shapes and dtypes, compared once for a process group.

An exchange of parts that differ fails inside the communication library, hangs, or mixes heads. Comparing them is an
exchange of its own, for which the host waits. So it is done in the first call on a process group: all ranks come
to that call together, and each knows that it is the first. It cannot be done for each new shape: a rank that alone has
one would wait for the others.
"""

from __future__ import annotations

import statistics
import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_agreed: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Process groups whose ranks have held equal tensors."""


def check_agreement(mesh: DeviceMesh, **tensors: Tensor) -> None:
    """Raise ValueError on every rank if one has other shapes or dtypes, until a first call has agreed.

    Collective: every rank of the mesh must call it. A compiled graph does not compare.
    """
    if torch.compiler.is_compiling():
        return
    group = mesh.get_group()
    if group in _agreed:
        return
    held: list[str] = [""] * mesh.size()
    dist.all_gather_object(held, ", ".join(f"{name} {_described(own)}" for name, own in tensors.items()), group)
    ranks: list[int] = mesh.mesh.tolist()
    usual = held.index(statistics.mode(held))
    for rank, theirs in zip(ranks, held, strict=True):
        if theirs != held[usual]:
            raise ValueError(
                f"rank {rank} holds {theirs}; rank {ranks[usual]} holds {held[usual]}: all ranks of the mesh must hold "
                "equal shapes and one dtype"
            )
    _agreed.add(group)


def _described(tensor: Tensor) -> str:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
