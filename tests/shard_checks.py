"""Ranks that save and load small tensors over meshes, each in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import safetensors
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.checkpoints.together import StagedTensors, load_together, save_together
from muse_lab.pretraining.parallel import World

LAYOUTS: dict[int, tuple[tuple[int, ...], list[Placement]]] = {
    1: ((4,), [Shard(0)]),
    2: ((2, 2), [Replicate(), Shard(0)]),
}
"""Of the checkpoint of each step: a mesh of four ranks, and how tensors lie on it."""


def whole_tensors() -> dict[str, torch.Tensor]:
    """Of the last one, not every rank has a row."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator) for name, shape in (("a", (10, 3)), ("b", (7, 4)), ("c", (2, 5)))
    }


def run(action: str, rank: int, ranks: int, port: int, folder: Path) -> None:
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        {"save": save_all, "load": load_all}[action](rank, folder)
    finally:
        dist.destroy_process_group()


def save_all(rank: int, folder: Path) -> None:
    group = dist.new_group(backend="gloo")
    assert group is not None
    for step, (shape, placements) in LAYOUTS.items():
        mesh = init_device_mesh("cpu", shape)
        tensors = {name: distribute_tensor(whole, mesh, placements) for name, whole in whole_tensors().items()}
        staged = StagedTensors(tensors, is_first=rank == 0)
        for tensor in tensors.values():
            tensor.zero_()  # as training would change them while they are written
        save_together(
            staged,
            group,
            begin=lambda step=step: checkpoints.begin(folder, step),  # type: ignore[misc]
            write=lambda pieces, step=step: checkpoints.write_shard(folder, step, rank, pieces),  # type: ignore[misc]
            finish=lambda parts, step=step: checkpoints.finish(folder, step, {}, parts),  # type: ignore[misc]
        )


def load_all(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for step in LAYOUTS:
        opened = load(rank, folder, step, mesh)
        if step == 1 and rank == 0:
            assert opened == {f"rank-{other:05}-00000.safetensors" for other in (0, 1)}, opened


def load(rank: int, folder: Path, step: int, mesh: DeviceMesh) -> set[str]:
    """The names of the files that were opened for it."""
    world = World(torch.device("cpu"), rank, mesh.size(), mesh)
    checkpoint = checkpoints.verify(folder, step, world)
    whole = whole_tensors()
    targets = {name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)]) for name, tensor in whole.items()}
    names: set[str] = set()
    safe_open = safetensors.safe_open

    def note(path: Path, *others: Any) -> Any:
        names.add(path.name)
        return safe_open(path, *others)

    with mock.patch.object(safetensors, "safe_open", note):
        load_together(targets, checkpoint.folder, checkpoint.tensors)
    for name, target in targets.items():
        assert torch.equal(target.full_tensor(), whole[name]), (step, name)
    return names
