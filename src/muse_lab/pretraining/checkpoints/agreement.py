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
    """The manifest that all ranks read. Collective: every rank must call it.

    Raises CheckpointError if all ranks refuse it, and TrainingError if they read different ones, as on a network file
    system that does not list all files yet.
    """
    outcome: Manifest | CheckpointError
    try:
        outcome = read()
    except CheckpointError as error:
        outcome = error
    check_same(world, path, outcome.sha256 if isinstance(outcome, Manifest) else str(outcome))
    if isinstance(outcome, CheckpointError):
        raise outcome
    return outcome


def check_same(world: World | None, path: Path, value: Any) -> None:
    """Raise TrainingError unless all ranks have the same value. Collective: every rank must call it."""
    first, *rest = _gather(world, value)
    if any(other != first for other in rest):
        raise TrainingError(f"ranks see different files in {path}; resume again in a minute")


def all_check(world: World | None, action: Callable[[], object]) -> None:
    """Each rank checks its share; all raise the first CheckpointError of any rank."""
    own_failure = None
    try:
        action()
    except CheckpointError as error:
        own_failure = str(error)
    for failure in _gather(world, own_failure):
        if failure is not None:
            raise CheckpointError(failure)


def share_of(world: World | None, files: Sequence[StoredFile]) -> list[StoredFile]:
    """Files that this rank verifies: each file has one rank, and ranks have about equally many bytes.

    With one file per rank, each rank verifies its own, which it reads next.
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
    """The values of all ranks. Collective: every rank must call it."""
    if world is None or world.mesh is None:
        return [value]
    values: list[Any] = [None] * world.ranks
    dist.all_gather_object(values, value)
    return values
