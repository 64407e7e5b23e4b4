"""Documents on disk, while there is no tokenizer yet: every source is read once, and memory holds one of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from muse_lab.pretraining.data.corpus_documents import REPOSITORY_MARK, Document, Piece
from muse_lab.records.files import errors_naming


@dataclass(frozen=True)
class Spooled:
    """All of a document but its text."""

    repository: str
    part: int
    files: int
    size: int
    digest: bytes
    """of its text, save the name of the repository"""
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
        with contextlib.suppress(OSError):  # whatever is not on disk by now is not needed
            self._file.close()

    def add(self, document: Document) -> Spooled:
        line = json.dumps(document.pieces, ensure_ascii=False).encode()
        files = [piece for piece in document.pieces if piece.mark != REPOSITORY_MARK]
        digest = hashlib.sha256(json.dumps(files, ensure_ascii=False).encode()).digest()
        with errors_naming(self._path):
            self._file.write(line)
        self._size += len(line)
        return Spooled(
            document.repository,
            document.part,
            document.files,
            document.size,
            digest,
            self._size - len(line),
            self._size,
        )

    def read(self, spooled: Spooled) -> Document:
        with errors_naming(self._path):
            self._file.seek(spooled.start)
            pieces = json.loads(self._file.read(spooled.stop - spooled.start))
        return Document(
            spooled.repository,
            spooled.part,
            tuple(Piece(mark, text) for mark, text in pieces),
            spooled.files,
            spooled.size,
        )
