"""Documents on disk, until there is a tokenizer: every source is read once, and memory holds one at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from muse_lab.pretraining.data.corpus_documents import REPOSITORY_MARK, Document, Piece
from muse_lab.records.files import errors_naming


@dataclass(frozen=True)
class Spooled(Document):
    """A document without its pieces."""

    digest: bytes
    """hash of its text, but for the name of the repository"""
    start: int
    stop: int


class Spool:
    def __init__(self, path: Path) -> None:
        self._path = path
        with errors_naming(path):
            self._file = open(path, "x+b")  # noqa: SIM115
        self._size = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # what is not on disk by now is not needed
            self._file.close()

    def add(self, document: Document) -> Spooled:
        line = json.dumps(document.pieces, ensure_ascii=False).encode()
        files = [piece for piece in document.pieces if piece.mark != REPOSITORY_MARK]
        digest = hashlib.sha256(json.dumps(files, ensure_ascii=False).encode()).digest()
        with errors_naming(self._path):
            self._file.write(line)
        self._size += len(line)
        place = {"start": self._size - len(line), "stop": self._size}
        return Spooled(**{**vars(document), "pieces": (), "digest": digest, **place})

    def read(self, spooled: Spooled) -> Document:
        with errors_naming(self._path):
            self._file.seek(spooled.start)
            pieces = json.loads(self._file.read(spooled.stop - spooled.start))
        return replace(spooled, pieces=tuple(Piece(mark, text) for mark, text in pieces))
