"""One process, or as many as `torchrun` started: the process group, the mesh, and FSDP2's sharding of the model.

Weights, gradients and the optimiser's state are sharded over all ranks along their first dimension, whatever the shape
of the mesh: a checkpoint does not depend on it. Each rank computes its share of the sequences, or, with several ranks
along the sequence, its part of each sequence of its group. One process needs none of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from muse_lab.pretraining.mesh_shape import MeshShape


@dataclass(frozen=True)
class World:
    """The processes that train together, and this one's place among them."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    mesh: DeviceMesh | None = None
    """all ranks in one dimension; None for one process"""
    sequence: DeviceMesh | None = None
    """the ranks that share each sequence with this one; None if it has whole sequences"""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def sequence_ranks(self) -> int:
        return 1 if self.sequence is None else self.sequence.size()

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that have sequences of their own."""
        return self.ranks // self.sequence_ranks

    @property
    def data_rank(self) -> int:
        """The number of this rank's group."""
        return self.rank // self.sequence_ranks

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over all ranks."""
        if self.mesh is None:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total / self.ranks

    def mean_and_flags(self, number: Tensor, *flags: bool) -> tuple[float, list[bool]]:
        """The mean of a number over all ranks, and for each flag whether any rank has it, in one exchange and one
        synchronisation of the device. Collective: every rank must call it."""
        if self.mesh is None:
            return number.item(), list(flags)
        own = [number.detach(), *(torch.full_like(number, float(flag)) for flag in flags)]
        mean, *shares = self.mean(torch.stack(own)).tolist()
        return mean, [share > 0 for share in shares]

    def any(self, flag: bool) -> bool:
        """Whether any rank has a flag. Collective: every rank must call it."""
        return not self.all_succeed(not flag)

    def all_succeed(self, success: bool) -> bool:
        """Whether all ranks succeeded. Collective: every rank must call it."""
        if self.mesh is None:
            return success
        flag = torch.tensor(int(success), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def let_first(self, act: Callable[[], object], what: str) -> None:
        """Let the first rank act. If it raises an OSError or a ValueError, all ranks raise one: it cannot do `what`.

        Collective: every rank must call it.
        """
        failure = None
        if self.is_first:
            try:
                act()
            except (OSError, ValueError) as error:
                failure = error
        if not self.all_succeed(failure is None):
            raise failure or ValueError(f"the first rank cannot {what}; it says why")

    def joined(self, part: Tensor) -> Tensor:
        """The parts of a sequence on all ranks that share it, concatenated along the first dimension.

        Collective: every rank must call it.
        """
        if self.sequence is None:
            return part
        parts = [torch.empty_like(part) for _ in range(self.sequence_ranks)]
        dist.all_gather(parts, part.contiguous(), group=self.sequence.get_group())
        return torch.cat(parts)


def has_launcher() -> bool:
    """Whether `torchrun` has started more processes than this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextlib.contextmanager
def open_world(device: str) -> Iterator[World]:
    """The processes of `torchrun`, from its environment variables; one process without them."""
    if not has_launcher():
        yield World(torch.device(device))
        return
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    store, rank, ranks = next(rendezvous("env://"))
    backend = "nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    try:
        yield World(place, rank, ranks, init_device_mesh(place.type, (ranks,)))
        _wait_for_all(store, ranks)
    finally:
        dist.destroy_process_group()


def _wait_for_all(store: Any, ranks: int) -> None:
    """Wait until every rank has reached its end. A rank that left earlier would reset its connections, and break the
    last exchange of a rank that is still reading it."""
    with contextlib.suppress(dist.DistError):  # the rank that has the store may have left, or failed and said why
        if store.add("muse: ranks at their end", 1) == ranks:
            store.set("muse: all at their end", "")
        store.wait(["muse: all at their end"])


def share_sequences(world: World, shape: MeshShape) -> World:
    """The same ranks, in groups that share each sequence. Collective: every rank must call it."""
    if shape.sequence == 1:
        return world
    grid = init_device_mesh(world.device.type, tuple(shape), mesh_dim_names=shape._fields)
    return dataclasses.replace(world, sequence=grid["sequence"])


def shard_model(model: nn.Module, layers: nn.ModuleList, world: World) -> None:
    """Shard a model by FSDP2, which gathers each layer when it computes. Ranks must have made it from the same seed."""
    if world.mesh is not None:
        for layer in layers:
            fully_shard(layer, mesh=world.mesh)
        fully_shard(model, mesh=world.mesh)


def accumulate_gradients(model: nn.Module, *, is_last: bool) -> None:
    """Exchange gradients once for each update, in the last of its backward passes."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather the weights outside of the layers, as calling a part of the model needs them."""
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all ranks. Collective: every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_of_lost_rank(error: BaseException) -> bool:
    """Whether an exchange failed, as it does where another process has ended."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))
