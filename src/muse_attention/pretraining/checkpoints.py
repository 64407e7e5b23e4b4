"""Checkpoints that are whole or absent: written aside, hashed, renamed, and verified before anything is read from them.

    checkpoints/step-00000500/
        manifest.json                    hash of every file, and of itself
        rank-00000-00000.safetensors     tensors, sharded along their first dimension; each rank writes its own

While it is written, a checkpoint is `step-00000500.tmp`, and so is an old one while it is removed: what has that name
is nobody's, and the next run clears it away. Nothing is pickled. Shards of any number of ranks are read by any other.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muse_attention.files import errors_naming, remove_folder, replace_file, replace_folder
from muse_attention.pretraining.shards import hash_file

MANIFEST = "manifest.json"
BYTES_PER_FILE = 2**30
_FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".tmp"


class CheckpointError(ValueError):
    """A checkpoint that is torn, damaged, or of another run."""


@dataclass(frozen=True)
class Checkpoint:
    """One that was verified."""

    folder: Path
    step: int
    """updates that were made"""
    about: dict[str, Any]
    """what its writer noted: the recipe, the corpus"""
    files: tuple[str, ...]


@dataclass(frozen=True)
class _File:
    name: str
    size: int
    sha256: str


def folder_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def steps_in(folder: Path) -> list[int]:
    """Of all checkpoints that are finished, whole or not, in order."""
    if not folder.is_dir():
        return []
    found = [_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()]
    return sorted(int(match[1]) for match in found if match)


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
    """Give a checkpoint that all ranks have written its manifest and its name."""
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


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove the checkpoints before `step`, which is durable, but for the newest `keep - 1`."""
    older = [found for found in steps_in(folder) if found < step]
    for found in older[: max(0, len(older) - (keep - 1))]:
        remove_folder(folder_of(folder, found))


def clear_after(folder: Path, step: int) -> None:
    """Remove the checkpoints after `step`, where a run goes on: they were refused, and must not count as kept."""
    for found in steps_in(folder):
        if found > step:
            remove_folder(folder_of(folder, found))


def clear_unfinished(folder: Path) -> None:
    for path in folder.glob(f"step-*{_UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)


# Reading


def verify(folder: Path, step: int) -> Checkpoint:
    """A CheckpointError if anything is not as it was written."""
    path = folder_of(folder, step)
    try:
        document = json.loads((path / MANIFEST).read_bytes())
        claimed = document.pop("sha256")
        files = [_File(**file) for file in document["files"]]
        if _own_hash(document) != claimed or document["format"] != _FORMAT or document["step"] != step:
            raise ValueError
        about = dict(document["about"])
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} is torn: its {MANIFEST}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f"checkpoint {path} is damaged: its {MANIFEST} is not what was written") from None
    for file in files:
        try:
            size = (path / file.name).stat().st_size
            if size != file.size:
                raise CheckpointError(f"checkpoint {path} is torn: {file.name} has {size} bytes, not {file.size}")
            if hash_file(path / file.name) != file.sha256:
                raise CheckpointError(f"checkpoint {path} is damaged: {file.name} is not what was written")
        except OSError as error:
            raise CheckpointError(f"checkpoint {path} is torn: {file.name}: {error.strerror}") from None
    return Checkpoint(path, step, about, tuple(file.name for file in files))


def latest_good(folder: Path, on_refused: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None if there is none at all; `on_refused` hears of each that is not."""
    steps = steps_in(folder)
    for step in reversed(steps):
        try:
            return verify(folder, step)
        except CheckpointError as error:
            on_refused(str(error))
    if steps:
        raise CheckpointError(f"none of the checkpoints in {folder} is whole; start again with another output")
    return None


def read_tensors(checkpoint: Checkpoint, beginning: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor whose name begins so, once, its shards joined."""
    from safetensors import safe_open

    places: dict[str, list[str]] = {}
    for name in checkpoint.files:  # in the order of the ranks
        with safe_open(checkpoint.folder / name, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - no mapping
                if key.startswith(beginning):
                    places.setdefault(key, []).append(name)
    for key, names in places.items():
        shards = []
        for name in names:
            with safe_open(checkpoint.folder / name, "pt") as tensors:
                shards.append(tensors.get_tensor(key))
        yield key, shards[0] if len(shards) == 1 else torch.cat(shards)


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
