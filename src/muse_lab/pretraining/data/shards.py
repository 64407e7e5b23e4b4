"""Tokens on disk: a stream of documents, cut into files of equal length."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from muse_attention.sizes import format_size
from muse_lab.records.files import errors_naming
from muse_lab.records.untrusted import LARGEST, open_regular, stat_regular

TOKENS_PER_SHARD = 2**27
DTYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class Shard:
    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Indexed:
    """A document, and where its tokens are in their stream; the last one is the end mark."""

    repository: str
    part: int
    files: int
    size: int
    """bytes of the content of its files"""
    start: int
    tokens: int


@dataclass(frozen=True)
class Stream:
    """The documents of one bucket of one split, one after another."""

    split: str
    bucket: int
    """its documents have about this many tokens, or up to twice as many"""
    documents: int
    tokens: int
    shards: tuple[Shard, ...]
    """all of the same length, save the last"""
    index: str
    """the file that lists the documents, a JSON object in each line"""
    index_sha256: str


class Stamp(NamedTuple):
    """Changes when a file is rewritten. Inodes are not used: some network file systems renumber files."""

    size: int
    changed: int
    """nanoseconds"""

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns)


def smallest_dtype(vocabulary: int) -> str:
    return "uint16" if vocabulary <= 2**16 else "uint32"


class StreamWriter:
    """Writes the documents of a stream as they come."""

    def __init__(self, folder: Path, split: str, bucket: int, *, dtype: str, tokens_per_shard: int) -> None:
        self._folder = folder
        self._split = split
        self._bucket = bucket
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._tokens_per_shard = tokens_per_shard
        self._shards: list[Shard] = []
        self._tokens = 0
        self._documents = 0
        self._shard: _OpenFile | None = None
        self._index = _OpenFile(folder / f"{split}-{format_size(bucket)}.documents.jsonl")

    def add(self, tokens: NDArray[np.uint32], *, repository: str, part: int, files: int, size: int) -> None:
        document = Indexed(repository, part, files, size, self._tokens, len(tokens))
        self._index.write(f"{json.dumps(asdict(document), ensure_ascii=False)}\n".encode())
        self._documents += 1
        while len(tokens):
            name = f"{self._split}-{format_size(self._bucket)}-{len(self._shards):05}.tokens"
            self._shard = self._shard or _OpenFile(self._folder / name)
            fitting = tokens[: self._tokens_per_shard - self._tokens % self._tokens_per_shard]
            self._shard.write(fitting.astype(self._dtype).tobytes())
            self._tokens += len(fitting)
            tokens = tokens[len(fitting) :]
            if self._tokens % self._tokens_per_shard == 0:
                self._finish_shard()

    def finish(self) -> Stream:
        self._finish_shard()
        shards = tuple(self._shards)
        digest = self._index.finish()
        return Stream(self._split, self._bucket, self._documents, self._tokens, shards, self._index.path.name, digest)

    def close(self) -> None:
        """Close files that are not finished."""
        for file in (self._index, self._shard):
            if file is not None:
                file.close()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            before = sum(shard.tokens for shard in self._shards)
            digest = self._shard.finish()
            self._shards.append(Shard(self._shard.path.name, self._tokens - before, digest))
            self._shard = None


def read_tokens(
    folder: Path, stream: Stream, start: int, stop: int, dtype: str, stamps: Mapping[str, Stamp]
) -> NDArray[Any]:
    """Tokens from `start` to `stop` of the stream; raises ValueError if a shard was changed since its stamp."""
    if not 0 <= start <= stop <= stream.tokens:
        raise ValueError(f"there are no tokens {start} to {stop} in a stream of {stream.tokens}")
    little_endian = np.dtype(dtype).newbyteorder("<")
    parts = [np.empty(0, little_endian)]
    first = 0
    for shard in stream.shards:
        low, high = max(start - first, 0), min(stop - first, shard.tokens)
        if low < high:
            path, offset = folder / shard.file, low * little_endian.itemsize
            with open_regular(path) as file:
                tokens = np.fromfile(file, little_endian, high - low, offset=offset)
                check_stamp(path, stamps[shard.file], os.fstat(file.fileno()))  # afterwards: it covers what was read
            parts.append(tokens)
        first += shard.tokens
    return np.concatenate(parts)


def read_index(folder: Path, stream: Stream) -> Iterator[Indexed]:
    with open_regular(folder / stream.index) as file:
        while line := file.readline(LARGEST):
            yield Indexed(**json.loads(line))


def check_file(path: Path, sha256: str, size: int | None = None, *, hashes: bool = True) -> Stamp:
    """The stamp of a file; raises ValueError if it is missing, has another size or, with `hashes`, other content."""
    try:
        stamp = Stamp.of(stat_regular(path))
        if size is not None and stamp.size != size:
            raise ValueError(
                f"{path} has {stamp.size} bytes, not {size}: it was cut short or changed; run muse prepare again"
            )
        if hashes and hash_file(path) != sha256:
            raise ValueError(f"{path} is damaged: its hash is not that of the manifest; run muse prepare again")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; run muse prepare again") from None
    return stamp


def check_stamp(path: Path, stamp: Stamp, status: os.stat_result) -> None:
    """Raise ValueError if a file was changed after its stamp was taken."""
    if Stamp.of(status) != stamp:
        raise ValueError(f"{path} was changed after the corpus was opened")


def hash_file(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _OpenFile:
    """A file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with errors_naming(path):
            self._file: BinaryIO = open(path, "xb")  # noqa: SIM115
        self._digest = hashlib.sha256()

    def write(self, content: bytes) -> None:
        with errors_naming(self.path):
            self._file.write(content)
        self._digest.update(content)

    def finish(self) -> str:
        with errors_naming(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
