"""Checkpoints that are whole or absent: written aside, hashed, renamed, and verified before anything is read from them.

    checkpoints/step-00000500/
        manifest.json                    hash of every file, and of itself; which part of which tensor is where
        rank-00000-00000.safetensors     the first rank's parts of the tensors; each rank writes its own

A checkpoint is named `step-00000500.tmp` while it is written, `step-00000500.old.tmp` while it is removed; the next
run removes such folders. Nothing is pickled. Any number of ranks can read what any other number wrote.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from muse_lab.pretraining.checkpoints.agreement import agree, all_check, check_same, share_of
from muse_lab.pretraining.checkpoints.manifest import (
    LARGEST_MANIFEST,
    MANIFEST,
    CheckpointError,
    Manifest,
    StoredPart,
    TensorKind,
    as_line,
    check_is_inside,
    make_manifest,
    read_manifest,
    write_manifest,
)
from muse_lab.pretraining.checkpoints.shards import (
    Piece,
    check_contents,
    contents_by_file,
    read_tensor,
    reading,
    write_pieces,
)
from muse_lab.pretraining.data.shards import hash_file
from muse_lab.pretraining.parallel import World
from muse_lab.records.files import (
    errors_naming,
    new_folder,
    remove_folder,
    remove_tree,
    replace_file,
    replace_folder,
    sync,
)
from muse_lab.records.untrusted import read_json

_NAME = re.compile(r"step-([0-9]{8,})")
_UNFINISHED_NAME = re.compile(rf"{_NAME.pattern}(\.old)?\.tmp")
UNTIL_NEXT = "until_next"
"""Marks a checkpoint, in its `about`, that is removed when there is a newer one."""


@dataclass(frozen=True)
class Checkpoint(Manifest):
    """A verified checkpoint."""

    folder: Path


def folder_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def steps_in(folder: Path) -> list[int]:
    """Steps of all finished checkpoints, whole or not, in order."""
    if not folder.is_dir():
        return []
    matches = [(path.name, _NAME.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir()]
    steps = [(name, int(match[1])) for name, match in matches if match]
    return sorted(step for name, step in steps if folder_of(folder, step).name == name)


# Writing


def begin(folder: Path, step: int) -> None:
    """Make the folder that a checkpoint is written into."""
    new_folder(_aside(folder, step))


def write_shard(folder: Path, step: int, rank: int, pieces: Iterable[Piece]) -> list[StoredPart]:
    """Write one rank's pieces as files of safetensors, and return their contents for `finish`."""
    return write_pieces(_aside(folder, step), rank, pieces)


def finish(folder: Path, step: int, about: dict[str, Any], parts: Iterable[StoredPart]) -> Path:
    """Add the manifest to a checkpoint that all ranks have written, and rename it to its final name.

    Args:
        parts: what all ranks have written
    """
    return _finish(folder, step, make_manifest(step, about, parts))


def copy_checkpoint(checkpoint: Checkpoint, folder: Path, about: dict[str, Any]) -> Path:
    """Copy a verified checkpoint into another folder, with another `about`."""
    begin(folder, checkpoint.step)
    unfinished = _aside(folder, checkpoint.step)
    for file in checkpoint.files:
        path = unfinished / file.name
        with errors_naming(path):
            shutil.copyfile(checkpoint.folder / file.name, path)
            sync(path)
    manifest = write_manifest(checkpoint.step, about, checkpoint.files, checkpoint.tensors)
    return _finish(folder, checkpoint.step, manifest)


def _finish(folder: Path, step: int, manifest: str) -> Path:
    unfinished, finished = _aside(folder, step), folder_of(folder, step)
    replace_file(unfinished / MANIFEST, manifest)
    replace_folder(unfinished, finished)
    return finished


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove checkpoints before `step`, which is durable: all temporary ones, and regular ones but for the newest.

    `keep` regular ones are left; a `step` that is itself temporary is kept in addition.
    """
    steps = [other for other in steps_in(folder) if other <= step]
    regular = [other for other in steps if not _is_until_next(folder_of(folder, other))]
    for other in steps:
        if other != step and other not in regular[-keep:]:
            remove_folder(folder_of(folder, other))


def clear_after(folder: Path, step: int) -> None:
    """Remove the checkpoints after `step`, from which a run continues: they were refused."""
    for later in steps_in(folder):
        if later > step:
            remove_folder(folder_of(folder, later))


def clear_unfinished(folder: Path) -> None:
    for path in folder.glob("step-*.tmp"):
        if _UNFINISHED_NAME.fullmatch(path.name):
            remove_tree(path)


# Reading


def verify(folder: Path, step: int, world: World | None = None) -> Checkpoint:
    """Raise CheckpointError if a file was changed, or if no run can continue from the checkpoint.

    Args:
        world: ranks that share the work: each hashes some of the files, and none goes on before all are verified.
            Collective: every rank must call it.
    """
    path = folder_of(folder, step)
    manifest = agree(world, path, lambda: _read_complete(path, step))
    contents = contents_by_file(manifest.tensors)

    def check_share() -> None:
        for file in share_of(world, manifest.files):
            try:
                is_same = hash_file(path / file.name) == file.sha256
            except OSError as error:
                raise CheckpointError(f"checkpoint {path} is torn: {file.name}: {error.strerror}") from None
            if not is_same:
                raise CheckpointError(f"checkpoint {path} is damaged: {file.name} is not what was written")
            check_contents(path, file.name, contents.get(file.name, {}))

    all_check(world, check_share)
    return Checkpoint(**vars(manifest), folder=path)


def _read_complete(path: Path, step: int) -> Manifest:
    """The manifest of a checkpoint; raises CheckpointError unless its files exist with the recorded sizes."""
    manifest = read_manifest(path, step)
    for file in manifest.files:
        try:
            check_is_inside(path, file.name)
            size = (path / file.name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"checkpoint {path} is torn: {file.name}: {error.strerror}") from None
        if size != file.size:
            raise CheckpointError(f"checkpoint {path} is torn: {file.name} has {size} bytes, not {file.size}")
    expected = {MANIFEST, *(file.name for file in manifest.files)}
    with reading(path, "its folder"):
        unexpected = sorted({entry.name for entry in path.iterdir()} - expected)
    for name in unexpected:
        raise CheckpointError(f"checkpoint {path} is damaged: {as_line(name)} was not written with it; move it away")
    return manifest


def latest_good(
    folder: Path,
    on_refused: Callable[[str], None],
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
    *,
    before: int | None = None,
    world: World | None = None,
) -> Checkpoint | None:
    """The newest whole checkpoint, or None if there are no checkpoints.

    Args:
        on_refused: told why a checkpoint is not used
        check: raises CheckpointError for a whole checkpoint that cannot be used
        before: only checkpoints before this step
        world: ranks that share the work. Collective: every rank must call it.
    """
    steps = [step for step in steps_in(folder) if before is None or step < before]
    check_same(world, folder, steps)
    for step in reversed(steps):
        try:
            checkpoint = verify(folder, step, world)
            check(checkpoint)
        except CheckpointError as error:
            on_refused(str(error))
        else:
            return checkpoint
    if steps:
        raise CheckpointError(f"none of the checkpoints in {folder} is whole; start again with another output")
    return None


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless a checkpoint has tensors of these names, shapes and dtypes, and no others."""
    for name in [*checkpoint.tensors, *expected]:
        if name not in checkpoint.tensors:
            raise CheckpointError(f"checkpoint {checkpoint.folder} is of another model: it has no {name}")
        tensor = expected.get(name)
        if tensor is None or checkpoint.tensors[name].kind != TensorKind(tuple(tensor.shape), tensor.dtype):
            raise CheckpointError(f"checkpoint {checkpoint.folder} is of another model: it has another {as_line(name)}")


def read_tensors(checkpoint: Checkpoint, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor whose name has this prefix, shards joined; raises CheckpointError if they cannot be read."""
    for name, tensor in checkpoint.tensors.items():
        if name.startswith(prefix):
            yield name, read_tensor(checkpoint.folder, name, tensor)


def _is_until_next(path: Path) -> bool:
    """Whether a checkpoint is temporary; False if it cannot be read."""
    try:
        return read_json(path / MANIFEST, LARGEST_MANIFEST)["about"].get(UNTIL_NEXT) is True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _aside(folder: Path, step: int) -> Path:
    return folder / f"{folder_of(folder, step).name}.tmp"
