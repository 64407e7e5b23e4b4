"""A prepared corpus: its manifest, which is written last and lists every file with its hash, and its tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muse_lab.pretraining.data.shards import (
    DTYPES,
    Indexed,
    Stamp,
    Stream,
    check_file,
    check_stamp,
    read_index,
    read_tokens,
)
from muse_lab.records.dataclass_json import from_json
from muse_lab.records.files import replace_file
from muse_lab.records.untrusted import parse_json, read_regular

MANIFEST = "manifest.json"
TRAIN, HELD_OUT = "train", "held-out"
_FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What a corpus is made of."""

    source: str
    """in words"""
    settings: dict[str, Any]
    vocabulary: int
    """number of tokens in it"""
    end: int
    """the token behind every document"""
    dtype: str
    counts: dict[str, int]
    skipped_files: dict[str, int]
    """by reason"""
    skipped_documents: dict[str, int]
    broken: dict[str, str]
    """reasons why sources could not be read, by name: the first hundred"""
    files: dict[str, str]
    """hashes of the tokenizer's files, by name"""
    streams: tuple[Stream, ...]
    format: int = _FORMAT
    muse_attention: str = ""
    """the version that wrote it"""

    def tokens(self, split: str) -> int:
        return sum(stream.tokens for stream in self.streams if stream.split == split)

    def file_names(self) -> list[str]:
        """All files but the manifest."""
        names = list(self.files)
        for stream in self.streams:
            names += [shard.file for shard in stream.shards] + [stream.index]
        return names


@dataclass(frozen=True)
class Corpus:
    """A corpus without open files: it can be pickled and shared by processes.

    Reading raises ValueError if a file was changed after the corpus was opened.
    """

    folder: Path
    manifest: Manifest
    fingerprint: str
    """sixteen hexadecimal digits that identify the data"""
    stamps: dict[str, Stamp]
    """of all files, by name"""

    def streams(self, split: str) -> list[Stream]:
        return [stream for stream in self.manifest.streams if stream.split == split]

    def tokens(self, stream: Stream, start: int, stop: int) -> NDArray[np.int64]:
        self._check(MANIFEST)
        return read_tokens(self.folder, stream, start, stop, self.manifest.dtype, self.stamps).astype(np.int64)

    def documents(self, stream: Stream) -> Iterator[Indexed]:
        self._check(stream.index)
        return read_index(self.folder, stream)

    def read_file(self, name: str) -> bytes:
        """One of the tokenizer's files."""
        content = read_regular(self.folder / name)
        self._check(name)
        return content

    def _check(self, name: str) -> None:
        path = self.folder / name
        check_stamp(path, self.stamps[name], path.stat())


def write_manifest(manifest: Manifest, folder: Path) -> None:
    replace_file(folder / MANIFEST, json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n")


def read_corpus(folder: Path, *, hashes: bool = True) -> Corpus:
    """Open a corpus; raises ValueError if it is not whole. Without `hashes`, only the sizes of files are compared."""
    path = folder / MANIFEST
    try:
        stamps = {MANIFEST: Stamp.of(path.stat())}
        content = read_regular(path)
    except OSError:
        raise ValueError(
            f"there is no corpus in {folder}: it has no {MANIFEST}, which is written last; run muse prepare"
        ) from None
    try:
        document = parse_json(content)
        manifest: Manifest = from_json(Manifest, document)
        names = manifest.file_names()
        if manifest.format != _FORMAT or manifest.dtype not in DTYPES or any(Path(name).name != name for name in names):
            raise ValueError
        if document.keys() - vars(manifest):
            raise ValueError
        sizes_agree = all(sum(shard.tokens for shard in stream.shards) == stream.tokens for stream in manifest.streams)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(f"{path} is no manifest of this version of muse prepare; run it again") from None
    if not sizes_agree:
        raise ValueError(f"{path} contradicts itself: shards do not add up to their stream; run muse prepare again")
    width = np.dtype(manifest.dtype).itemsize
    for name, sha256 in manifest.files.items():
        stamps[name] = check_file(folder / name, sha256, hashes=hashes)
    for stream in manifest.streams:
        stamps[stream.index] = check_file(folder / stream.index, stream.index_sha256, hashes=hashes)
        for shard in stream.shards:
            size = shard.tokens * width
            stamps[shard.file] = check_file(folder / shard.file, shard.sha256, size, hashes=hashes)
    return Corpus(folder, manifest, hashlib.sha256(content).hexdigest()[:16], stamps)
