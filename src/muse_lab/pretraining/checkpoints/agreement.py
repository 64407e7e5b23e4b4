"""Ranks that share the work of verifying a checkpoint come to the same result, or none of them goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from muse_lab.pretraining.checkpoints.manifest import CheckpointError, Manifest, StoredFile
from muse_lab.pretraining.interruptions.failures import TrainingError
from muse_lab.pretraining.parallel import World


def agree(world: World | None, path: Path, read: Callable[[], Manifest]) -> Manifest:
    """The manifest that all ranks find. Collective: every rank must call it.

    Raises CheckpointError if all of them refuse it, and TrainingError if they find different things, as where a
    network's folder is listed before all of it is there.
    """
    found: Manifest | CheckpointError
    try:
        found = read()
    except CheckpointError as error:
        found = error
    check_same(world, path, found.sha256 if isinstance(found, Manifest) else str(found))
    if isinstance(found, CheckpointError):
        raise found
    return found


def check_same(world: World | None, path: Path, found: Any) -> None:
    """Raise TrainingError unless all ranks have found the same. Collective: every rank must call it."""
    first, *others = _gather(world, found)
    if any(other != first for other in others):
        raise TrainingError(f"not all ranks see the same in {path} yet; resume again in a minute")


def all_check(world: World | None, action: Callable[[], object]) -> None:
    """Each rank checks its share, and all of them raise the CheckpointError of the first one that has one."""
    mishap = None
    try:
        action()
    except CheckpointError as error:
        mishap = str(error)
    for found in _gather(world, mishap):
        if found is not None:
            raise CheckpointError(found)


def share_of(world: World | None, files: Sequence[StoredFile]) -> list[StoredFile]:
    """Files that this rank verifies: each has one rank, and ranks have about the same number of bytes.

    With one file for each rank, each has its own, which it reads next.
    """
    if world is None or world.ranks == 1:
        return list(files)
    total, before, share = sum(file.size for file in files), 0, []
    for file in files:
        middle = before + file.size / 2
        if min(world.ranks - 1, int(world.ranks * middle / max(1, total))) == world.rank:
            share.append(file)
        before += file.size
    return share


def _gather(world: World | None, value: Any) -> list[Any]:
    """Of every rank. Collective: every rank must call it."""
    if world is None or world.mesh is None:
        return [value]
    values: list[Any] = [None] * world.ranks
    dist.all_gather_object(values, value)
    return values
