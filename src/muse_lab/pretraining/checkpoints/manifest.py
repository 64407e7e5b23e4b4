"""The manifest of a checkpoint: the hash of every file, and of itself, and where each part of each tensor is.

    {"format": 1, "step": 500, "about": {...}, "sha256": "...",
     "files": [{"name": "rank-00000-00000.safetensors", "size": 1234, "sha256": "..."}, ...],
     "tensors": {"weight/lm_head.weight": {"dtype": "float32", "shape": [512, 64],
                                           "chunks": [[0, [0, 0], [256, 64]], [1, [256, 0], [256, 64]]]}}}

A chunk is the number of its file, its offsets and its sizes: a run of rows, as ranks shard along the first dimension.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from muse_lab.records.dataclass_json import from_json
from muse_lab.records.untrusted import read_json

MANIFEST = "manifest.json"
_FORMAT = 1
LARGEST_MANIFEST = 2**28
"""Bytes."""
_FILE_NAME = re.compile(r"rank-[0-9]{5,}-[0-9]{5,}\.safetensors")
_SHOWN = 200
"""Characters of an untrusted text."""
_Sizes = tuple[int, ...]


class CheckpointError(ValueError):
    """A checkpoint that is torn, damaged, or of another run."""


class TensorKind(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


class Chunk(NamedTuple):
    """A part of a tensor, and the file that it is in under the tensor's name."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    kind: TensorKind
    chunks: tuple[Chunk, ...]
    """which make up the whole tensor"""


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint. Its name is never a path: nothing outside of the checkpoint is read."""

    name: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        if not _FILE_NAME.fullmatch(self.name):
            raise ValueError("not the name of a file of tensors")


class StoredPart(NamedTuple):
    """A part of one tensor, and the file that has it."""

    name: str
    kind: TensorKind
    """of the whole tensor"""
    chunk: Chunk
    file: StoredFile


@dataclass(frozen=True)
class Manifest:
    step: int
    """finished updates"""
    about: dict[str, Any]
    """what its writer noted: the recipe, the corpus"""
    files: tuple[StoredFile, ...]
    tensors: dict[str, StoredTensor]
    """by name"""
    sha256: str


def make_manifest(step: int, about: dict[str, Any], parts: Iterable[StoredPart]) -> str:
    """The text of a manifest; raises ValueError if the parts do not make up whole tensors."""
    files: dict[str, StoredFile] = {}
    kinds: dict[str, TensorKind] = {}
    chunks: dict[str, list[Chunk]] = {}
    for part in parts:
        files[part.file.name] = part.file
        kinds[part.name] = part.kind
        chunks.setdefault(part.name, []).append(part.chunk)
    for tensor_chunks in chunks.values():
        tensor_chunks.sort(key=lambda chunk: chunk.offsets)
    tensors = {name: StoredTensor(kind, tuple(chunks[name])) for name, kind in kinds.items()}
    return write_manifest(step, about, [files[name] for name in sorted(files)], tensors)


def write_manifest(
    step: int, about: dict[str, Any], files: Iterable[StoredFile], tensors: Mapping[str, StoredTensor]
) -> str:
    listed = list(files)
    numbers = {file.name: number for number, file in enumerate(listed)}
    document = {
        "format": _FORMAT,
        "step": step,
        "about": about,
        "files": [asdict(file) for file in listed],
        "tensors": {
            name: {
                "dtype": str(tensor.kind.dtype).removeprefix("torch."),
                "shape": tensor.kind.shape,
                "chunks": [(numbers[chunk.file], chunk.offsets, chunk.sizes) for chunk in tensor.chunks],
            }
            for name, tensor in tensors.items()
        },
    }
    for name, tensor in tensors.items():
        check_is_whole(name, tensor)
    return json.dumps({**document, "sha256": _own_hash(document)}) + "\n"


def read_manifest(path: Path, step: int) -> Manifest:
    """The manifest of the checkpoint in `path`; raises CheckpointError if it is not the one written for this step."""
    try:
        check_is_inside(path, MANIFEST)
        document = read_json(path / MANIFEST, LARGEST_MANIFEST)
        claimed = document.pop("sha256")
        files = from_json(tuple[StoredFile, ...], document["files"])
        if _own_hash(document) != claimed or document["format"] != _FORMAT:
            raise ValueError
        if type(document["step"]) is not int or document["step"] != step:
            raise ValueError
        if not isinstance(document["about"], dict) or len({file.name for file in files}) != len(files):
            raise ValueError
        tensors = _parse_tensors(document["tensors"], files)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} is torn: its {MANIFEST}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"checkpoint {path} is damaged: its {MANIFEST} is not what was written") from None
    return Manifest(step, document["about"], files, tensors, claimed)


def check_is_whole(name: str, tensor: StoredTensor) -> None:
    """Raise ValueError unless the chunks are runs of whole rows in order, from the first row to the last."""
    shape, begin = tensor.kind.shape or (1,), 0  # one number is a row by itself
    for chunk in tensor.chunks:
        offsets, sizes = chunk.offsets or (0,), chunk.sizes or (1,)
        if offsets != (begin, *[0] * (len(shape) - 1)) or sizes[0] < 1 or sizes[1:] != shape[1:]:
            raise ValueError(f"a chunk of {name} does not follow the one before it")
        begin += sizes[0]
    if begin != shape[0]:
        raise ValueError(f"the chunks of {name} do not make it up")


def check_is_inside(folder: Path, name: str) -> None:
    """Raise CheckpointError for a link out of the folder, and for anything but a regular file, such as a pipe."""
    path = os.path.realpath(folder / name, strict=True)
    if os.path.dirname(path) != os.path.realpath(folder) or not os.path.isfile(path):
        raise CheckpointError(f"checkpoint {folder} is damaged: {name} is not a file of its own")


def as_line(text: str) -> str:
    """Untrusted text, as a printable part of one line."""
    words = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."


def _parse_tensors(document: Any, files: tuple[StoredFile, ...]) -> dict[str, StoredTensor]:
    tensors, file_names = {}, {number: file.name for number, file in enumerate(files)}
    for name, values in document.items():
        dtype = getattr(torch, values["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError
        chunks = [
            Chunk(file_names[number], offsets, sizes)
            for number, offsets, sizes in from_json(list[tuple[int, _Sizes, _Sizes]], values["chunks"])
        ]
        if len({chunk.file for chunk in chunks}) < len(chunks):  # a file has one chunk per name
            raise ValueError
        tensors[name] = StoredTensor(TensorKind(from_json(_Sizes, values["shape"]), dtype), tuple(chunks))
        check_is_whole(name, tensors[name])
    return tensors


def _own_hash(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
