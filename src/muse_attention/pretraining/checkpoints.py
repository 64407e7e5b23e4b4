"""Checkpoints that are whole or absent: written aside, hashed, renamed, and verified before anything is read from them.

    checkpoints/step-00000500/
        manifest.json                    hash of every file, and of itself
        rank-00000-00000.safetensors     tensors, sharded along their first dimension; each rank writes its own

While it is written, a checkpoint is `step-00000500.tmp`, and so is an old one while it is removed: such
folders are removed by the next run. Nothing is pickled. Shards of any number of ranks are read by any other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muse_attention.files import errors_naming, remove_folder, replace_file, replace_folder, sync
from muse_attention.pretraining.data.shards import hash_file
from muse_attention.strict_json import parse_json

MANIFEST = "manifest.json"
BYTES_PER_FILE = 2**30
_BYTES_OF_A_MANIFEST = 2**26
_FORMAT = 1
_NAME = re.compile(r"step-([0-9]{8,})")
_FILE_NAME = re.compile(r"rank-[0-9]{5,}-[0-9]{5,}\.safetensors")
_UNFINISHED = ".tmp"
UNTIL_NEXT = "until_next"
"""What `about` has of a checkpoint that is removed when there is a newer one."""
_SHOWN = 200
"""Characters of a foreign text."""


class CheckpointError(ValueError):
    """A checkpoint that is torn, damaged, or of another run."""


class TensorKind(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Checkpoint:
    """One that was verified."""

    folder: Path
    step: int
    """updates that were made"""
    about: dict[str, Any]
    """what its writer noted: the recipe, the corpus"""
    files: tuple[str, ...]
    tensors: dict[str, TensorKind] = field(default_factory=dict)
    """by name, shards joined"""


@dataclass(frozen=True)
class _File:
    """A file of a checkpoint. Its name is never a path: nothing outside of the checkpoint is read."""

    name: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _FILE_NAME.fullmatch(self.name):
            raise ValueError("no name of a file of tensors")
        if type(self.size) is not int or not isinstance(self.sha256, str):
            raise ValueError("no size and hash of a file")


def folder_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def steps_in(folder: Path) -> list[int]:
    """Of all checkpoints that are finished, whole or not, in order."""
    if not folder.is_dir():
        return []
    found = [(path.name, _NAME.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir()]
    steps = [(name, int(match[1])) for name, match in found if match]
    return sorted(step for name, step in steps if folder_of(folder, step).name == name)


# Writing


def begin(folder: Path, step: int) -> None:
    """Make the folder that a checkpoint is written into."""
    unfinished = _aside(folder, step)
    with errors_naming(unfinished):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)


def write_shard(folder: Path, step: int, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """What one rank has: tensors by name, as files of safetensors, and a list of them with their hashes."""
    from safetensors.torch import save

    unfinished = _aside(folder, step)
    files = []
    for number, part in enumerate(_parts(tensors)):
        path = unfinished / f"rank-{rank:05}-{number:05}.safetensors"
        content = save({name: tensor.detach().cpu().contiguous() for name, tensor in part.items()})
        replace_file(path, content)
        files.append(_File(path.name, len(content), hashlib.sha256(content).hexdigest()))
    replace_file(_list_path(unfinished, rank), json.dumps([asdict(file) for file in files]))


def finish(folder: Path, step: int, about: dict[str, Any], *, ranks: int = 1) -> Path:
    """Add the manifest to a checkpoint that all ranks have written, and rename it to its final name."""
    unfinished, finished = _aside(folder, step), folder_of(folder, step)
    files = []
    for rank in range(ranks):
        path = _list_path(unfinished, rank)
        with errors_naming(path):
            files += json.loads(path.read_text())
            path.unlink()
    document = {"format": _FORMAT, "step": step, "about": about, "files": files}
    replace_file(unfinished / MANIFEST, json.dumps({**document, "sha256": _own_hash(document)}, indent=2) + "\n")
    replace_folder(unfinished, finished)
    return finished


def copy_checkpoint(checkpoint: Checkpoint, folder: Path, about: dict[str, Any]) -> Path:
    """Put one that was verified into another folder, with another note of its writer."""
    _, files = _read_manifest(checkpoint.folder, checkpoint.step)
    begin(folder, checkpoint.step)
    unfinished = _aside(folder, checkpoint.step)
    for file in files:
        path = unfinished / file.name
        with errors_naming(path):
            shutil.copyfile(checkpoint.folder / file.name, path)
            sync(path)
    replace_file(_list_path(unfinished, 0), json.dumps([asdict(file) for file in files]))
    return finish(folder, checkpoint.step, about)


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove checkpoints before `step`, which is durable: those until the next one, and others but for the newest.

    `keep` are left, and `step` as one more if it is itself one until the next.
    """
    lasting: list[int] = []
    passing: list[int] = []
    for found in steps_in(folder):
        (passing if _is_until_next(folder_of(folder, found)) else lasting).append(found)
    older = [found for found in lasting if found < step]
    left = keep - (step in lasting)
    for found in sorted([*(found for found in passing if found < step), *older[: max(0, len(older) - left)]]):
        remove_folder(folder_of(folder, found))


def clear_after(folder: Path, step: int) -> None:
    """Remove the checkpoints after `step`, from which a run continues: they were refused and must not be kept."""
    for found in steps_in(folder):
        if found > step:
            remove_folder(folder_of(folder, found))


def clear_unfinished(folder: Path) -> None:
    for path in folder.glob(f"step-*{_UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)


# Reading


def verify(folder: Path, step: int) -> Checkpoint:
    """Raise CheckpointError if a file was changed, or if no run can continue from the checkpoint."""
    path = folder_of(folder, step)
    about, files = _read_manifest(path, step)
    for file in files:
        try:
            _check_is_inside(path, file.name)
            size = (path / file.name).stat().st_size
            if size != file.size:
                raise CheckpointError(f"checkpoint {path} is torn: {file.name} has {size} bytes, not {file.size}")
            if hash_file(path / file.name) != file.sha256:
                raise CheckpointError(f"checkpoint {path} is damaged: {file.name} is not what was written")
        except OSError as error:
            raise CheckpointError(f"checkpoint {path} is torn: {file.name}: {error.strerror}") from None
    checkpoint = Checkpoint(path, step, about, tuple(file.name for file in files))
    for name, tensor in read_tensors(checkpoint):
        with _reading(checkpoint, _shown(name)):
            is_finite = bool(tensor.isfinite().all())
        if not is_finite:
            raise CheckpointError(f"checkpoint {path} is damaged: {_shown(name)} has numbers that are not finite")
        checkpoint.tensors[name] = TensorKind(tuple(tensor.shape), tensor.dtype)
    return checkpoint


def latest_good(
    folder: Path,
    on_refused: Callable[[str], None],
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
    *,
    before: int | None = None,
) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None if there is none at all.

    Args:
        on_refused: told why a checkpoint is not used
        check: raises a CheckpointError for a checkpoint that is whole, but not to be used
        before: a step, for one that is older
    """
    steps = [step for step in steps_in(folder) if before is None or step < before]
    for step in reversed(steps):
        try:
            found = verify(folder, step)
            check(found)
        except CheckpointError as error:
            on_refused(str(error))
        else:
            return found
    if steps:
        raise CheckpointError(f"none of the checkpoints in {folder} is whole; start again with another output")
    return None


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, Tensor]) -> None:
    """A CheckpointError unless a checkpoint has tensors of these names, shapes and dtypes, and no others."""
    for name in [*checkpoint.tensors, *expected]:
        if name not in checkpoint.tensors:
            raise CheckpointError(f"checkpoint {checkpoint.folder} is of another model: it has no {name}")
        tensor = expected.get(name)
        if tensor is None or checkpoint.tensors[name] != TensorKind(tuple(tensor.shape), tensor.dtype):
            raise CheckpointError(f"checkpoint {checkpoint.folder} is of another model: it has another {_shown(name)}")


def read_tensors(checkpoint: Checkpoint, beginning: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor whose name has this prefix, shards joined; a CheckpointError if they cannot be read."""
    from safetensors import safe_open

    places: dict[str, list[str]] = {}
    for name in checkpoint.files:  # in the order of the ranks
        with _reading(checkpoint, name), safe_open(checkpoint.folder / name, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - no mapping
                if key.startswith(beginning):
                    places.setdefault(key, []).append(name)
    for key, names in places.items():
        shards = []
        for name in names:
            with _reading(checkpoint, name), safe_open(checkpoint.folder / name, "pt") as tensors:
                shards.append(tensors.get_tensor(key))
        with _reading(checkpoint, names[-1]):
            whole = shards[0] if len(shards) == 1 else torch.cat(shards)
        yield key, whole


@contextlib.contextmanager
def _reading(checkpoint: Checkpoint, name: str) -> Iterator[None]:
    """Turn errors in this block into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or _shown(str(error))
        raise CheckpointError(f"checkpoint {checkpoint.folder} is torn: {name}: {reason}") from None
    except Exception as error:  # safetensors and PyTorch have an error for each way in which a file can be damaged
        raise CheckpointError(
            f"checkpoint {checkpoint.folder} is damaged: {name} holds no tensors of a run: {_shown(str(error))}"
        ) from None


def _read_manifest(path: Path, step: int) -> tuple[dict[str, Any], list[_File]]:
    """What the writer of the checkpoint noted, and its files."""
    try:
        _check_is_inside(path, MANIFEST)
        if (path / MANIFEST).stat().st_size > _BYTES_OF_A_MANIFEST:
            raise ValueError
        document = parse_json((path / MANIFEST).read_bytes())
        claimed = document.pop("sha256")
        files = [_File(**file) for file in document["files"]]
        if _own_hash(document) != claimed or document["format"] != _FORMAT:
            raise ValueError
        if type(document["step"]) is not int or document["step"] != step:
            raise ValueError
        if not isinstance(document["about"], dict) or len({file.name for file in files}) != len(files):
            raise ValueError
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} is torn: its {MANIFEST}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise CheckpointError(f"checkpoint {path} is damaged: its {MANIFEST} is not what was written") from None
    return document["about"], files


def _is_until_next(path: Path) -> bool:
    """Of one that cannot be read: False."""
    try:
        return parse_json((path / MANIFEST).read_bytes())["about"].get(UNTIL_NEXT) is True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _check_is_inside(folder: Path, name: str) -> None:
    """Raise CheckpointError for a link out of the folder, and for anything but a regular file: a pipe never ends."""
    path = os.path.realpath(folder / name, strict=True)
    if os.path.dirname(path) != os.path.realpath(folder) or not os.path.isfile(path):
        raise CheckpointError(f"checkpoint {folder} is damaged: {name} is not a file of its own")


def _shown(text: str) -> str:
    """Text from a file that may be damaged, as part of a line."""
    words = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > BYTES_PER_FILE:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    if part:
        yield part


def _aside(folder: Path, step: int) -> Path:
    return folder / (folder_of(folder, step).name + _UNFINISHED)


def _list_path(unfinished: Path, rank: int) -> Path:
    return unfinished / f"rank-{rank:05}.json"


def _own_hash(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
