"""Files of tensors, in the format of safetensors: writing one rank's part of a checkpoint, and reading."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from muse_lab.pretraining.checkpoints.manifest import (
    CheckpointError,
    Chunk,
    StoredFile,
    StoredPart,
    StoredTensor,
    TensorKind,
    as_line,
)
from muse_lab.records.files import replace_file

BYTES_PER_FILE = 2**30


class Piece(NamedTuple):
    """A rank's part of one tensor, in host memory."""

    name: str
    kind: TensorKind
    """of the whole tensor"""
    offsets: tuple[int, ...]
    numbers: Tensor


def whole_pieces(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Whole tensors of this process, copied to host memory."""
    return [
        Piece(name, TensorKind(tuple(tensor.shape), tensor.dtype), (0,) * tensor.dim(), copy_to_host(tensor))
        for name, tensor in tensors.items()
    ]


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy that stays as it is while training goes on."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def write_pieces(folder: Path, rank: int, pieces: Iterable[Piece]) -> list[StoredPart]:
    """Write files, durable and hashed, and return what is in them."""
    from safetensors.torch import save

    parts = []
    for number, group in enumerate(_groups(pieces)):
        path = folder / f"rank-{rank:05}-{number:05}.safetensors"
        content = save({name: piece.numbers for name, piece in group.items()})
        replace_file(path, content)
        file = StoredFile(path.name, len(content), hashlib.sha256(content).hexdigest())
        for name, piece in group.items():
            chunk = Chunk(file.name, piece.offsets, tuple(piece.numbers.shape))
            parts.append(StoredPart(name, piece.kind, chunk, file))
    return parts


def contents_by_file(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, TensorKind]]:
    """Shape and dtype of each part of a tensor, by file and tensor name."""
    contents: dict[str, dict[str, TensorKind]] = {}
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            contents.setdefault(chunk.file, {})[name] = TensorKind(chunk.sizes, tensor.kind.dtype)
    return contents


def check_contents(folder: Path, file: str, expected: Mapping[str, TensorKind]) -> None:
    """Raise CheckpointError unless a file has the chunks in the manifest, and all numbers are finite."""
    from safetensors import safe_open

    with reading(folder, file), safe_open(folder / file, "pt") as opened:
        for name in sorted(set(opened.keys()) ^ expected.keys()):
            has = "has no" if name in expected else "has another"
            raise CheckpointError(f"checkpoint {folder} is damaged: {file} {has} {as_line(name)}")
        for name, kind in expected.items():
            numbers = opened.get_tensor(name)
            if TensorKind(tuple(numbers.shape), numbers.dtype) != kind:
                raise CheckpointError(f"checkpoint {folder} is damaged: {file} has another {as_line(name)}")
            if not bool(numbers.isfinite().all()):
                raise CheckpointError(
                    f"checkpoint {folder} is damaged: {as_line(name)} has numbers that are not finite"
                )


def read_tensor(folder: Path, name: str, tensor: StoredTensor) -> Tensor:
    """A tensor, joined from its chunks."""
    from safetensors import safe_open

    whole = None
    for chunk in tensor.chunks:
        with reading(folder, chunk.file), safe_open(folder / chunk.file, "pt") as opened:
            numbers = opened.get_tensor(name)
            if len(tensor.chunks) == 1:
                return numbers
            if whole is None:
                whole = torch.empty(tensor.kind.shape, dtype=tensor.kind.dtype)
            whole[box(chunk.offsets, chunk.sizes)] = numbers
    assert whole is not None
    return whole


def box(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


@contextlib.contextmanager
def reading(folder: Path, file: str) -> Iterator[None]:
    """Turn errors in this block into a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        reason = error.strerror or as_line(str(error))
        raise CheckpointError(f"checkpoint {folder} is torn: {file}: {reason}") from None
    except Exception as error:  # safetensors and PyTorch have an error for each way in which a file can be damaged
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {file} holds no tensors of a run: {as_line(str(error))}"
        ) from None


def _groups(pieces: Iterable[Piece]) -> Iterator[dict[str, Piece]]:
    """The pieces of each file; no file has two pieces of one tensor."""
    group: dict[str, Piece] = {}
    size = 0
    for piece in pieces:
        if group and (size + piece.numbers.nbytes > BYTES_PER_FILE or piece.name in group):
            yield group
            group, size = {}, 0
        group[piece.name] = piece
        size += piece.numbers.nbytes
    if group:
        yield group
