"""How the files of a repository become documents, and which bucket of sizes a document belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

REPOSITORY_MARK = "<reponame>"
FILE_MARK = "<filename>"
END_MARK = "<endoftext>"
MARKS = (END_MARK, REPOSITORY_MARK, FILE_MARK)
BYTES_PER_TOKEN = 3.5


class Piece(NamedTuple):
    """A text, and the delimiter before it, if there is one."""

    mark: str
    text: str


@dataclass(frozen=True)
class Document:
    repository: str
    part: int
    """number of this part, of a repository that is too large for one document"""
    pieces: tuple[Piece, ...]
    files: int
    size: int
    """bytes of the content of its files"""

    @property
    def text(self) -> str:
        return "".join(f"{mark}{text}" for mark, text in self.pieces)


@dataclass(frozen=True)
class Buckets:
    """Documents by their estimated tokens, on a log2 scale: at least `smallest`, fewer than `largest`."""

    smallest: int = 16 * 1024
    largest: int = 256 * 1024

    def __post_init__(self) -> None:
        if not 0 < self.smallest < self.largest:
            raise ValueError(f"no document has at least {self.smallest} and fewer than {self.largest} tokens")

    def find(self, size: int) -> int:
        """The power of two at or below the tokens estimated from a number of bytes."""
        return 1 << max(0, estimate_tokens(size).bit_length() - 1)

    def is_too_small(self, size: int) -> bool:
        return estimate_tokens(size) < self.smallest

    def is_too_large(self, size: int) -> bool:
        return size > self.most_bytes

    @property
    def most_bytes(self) -> int:
        return int(self.largest * BYTES_PER_TOKEN) - 1


def estimate_tokens(size: int) -> int:
    return int(size / BYTES_PER_TOKEN)


def join_files(repository: str, files: Iterable[tuple[str, str]], most_bytes: int) -> list[Document]:
    """One document of all (path, text) pairs, or one for each run of neighbours if all have more than `most_bytes`.

    In a document, files are in the order of their depth, then of their paths.
    """
    sized = sorted((path, text, len(text.encode())) for path, text in files)
    documents = []
    for part, run in enumerate(_runs([size for *_, size in sized], most_bytes)):
        group = sorted(sized[run.start : run.stop], key=lambda file: (file[0].count("/"), file[0]))
        pieces = (Piece(REPOSITORY_MARK, repository), *(Piece(FILE_MARK, f"{path}\n{text}") for path, text, _ in group))
        documents.append(Document(repository, part, pieces, len(group), sum(size for *_, size in group)))
    return documents


def cut_text(name: str, text: str, most_bytes: int) -> list[Document]:
    """The text as it is, or cut at ends of lines if it has more than `most_bytes`."""
    encoded = text.encode()
    documents: list[Document] = []
    start = 0
    while start < len(encoded):
        remaining = len(encoded) - start
        stop = start + -(-remaining // -(-remaining // most_bytes))  # parts of about equal size
        if stop < len(encoded):
            stop = encoded.rfind(b"\n", start, stop) + 1 or _character_start(encoded, stop)
        part = encoded[start:stop].decode()
        documents.append(Document(name, len(documents), (Piece("", part),), 1, stop - start))
        start = stop
    return documents


def _runs(sizes: Sequence[int], limit: int) -> list[range]:
    """Runs of neighbours whose sizes add up to at most `limit`, few and of about equal size."""
    total = sum(sizes)
    target = total / max(1, -(-total // limit))
    runs = []
    start = held = 0
    for index, size in enumerate(sizes):
        if index > start and (held + size > limit or held >= target):
            runs.append(range(start, index))
            start, held = index, 0
        held += size
    return [*runs, range(start, len(sizes))] if sizes else []


def _character_start(encoded: bytes, position: int) -> int:
    while encoded[position] & 0xC0 == 0x80:
        position -= 1
    return position
