"""Haystacks: files of source code as tokens, among which needles are hidden.

The files of a corpus are cut out at its delimiters, and stand there as if they were of one repository: names of
repositories and end marks are left out, for a model may have learnt that what is before an end mark is of no more use.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.data.corpus_documents import FILE_MARK, REPOSITORY_MARK
from muse_lab.pretraining.data.shards import Stream
from muse_lab.pretraining.data.tokenizer import for_plain_text, read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = NDArray[np.int64]

_SCANNED_AT_ONCE = 2**24


class Haystack(Protocol):
    """Files, by number."""

    @property
    def source(self) -> str:
        """In words."""

    @property
    def tokens(self) -> int:
        """Of all files."""

    def __len__(self) -> int: ...

    def read(self, file: int, most: int) -> Tokens:
        """The first tokens of a file, at most so many: its delimiter and its path come first."""


class CorpusHaystack:
    """The files of one split of a corpus. Texts that have no files in them, as those of Dolma, are a file each."""

    def __init__(self, corpus: Corpus, split: str) -> None:
        self._corpus = corpus
        self._split = split
        self._streams = corpus.streams(split)
        bounds = [_file_bounds(corpus, stream) for stream in self._streams]
        self._bounds = np.concatenate([np.empty((0, 2), np.int64), *bounds])
        self._ends = np.cumsum([len(of_stream) for of_stream in bounds], dtype=np.int64)
        self.tokens = int((self._bounds[:, 1] - self._bounds[:, 0]).sum())

    @property
    def source(self) -> str:
        return f"the split {self._split!r} of the corpus {self._corpus.fingerprint}: {self._corpus.manifest.source}"

    def __len__(self) -> int:
        return len(self._bounds)

    def read(self, file: int, most: int) -> Tokens:
        stream = self._streams[int(np.searchsorted(self._ends, file, side="right"))]
        start, stop = map(int, self._bounds[file])
        return self._corpus.tokens(stream, start, min(stop, start + most))


@dataclass(frozen=True)
class TextHaystack:
    """Files that are tokens already."""

    source: str
    files: tuple[Tokens, ...]

    @classmethod
    def encode(
        cls, tokenizer: Tokenizer, texts: Iterable[tuple[str, str]], *, enough: int, source: str
    ) -> TextHaystack:
        """The (path, text) of files, as many as it takes for `enough` tokens. Delimiters in a text are plain text."""
        plain = for_plain_text(tokenizer)
        mark = tokenizer.encode(file_mark(tokenizer), add_special_tokens=False).ids
        files, found = [], 0
        for path, text in texts:
            files.append(np.array(mark + plain.encode(f"{path}\n{text}", add_special_tokens=False).ids, np.int64))
            found += len(files[-1])
            if found >= enough:
                break
        return cls(source, tuple(files))

    @property
    def tokens(self) -> int:
        return sum(map(len, self.files))

    def __len__(self) -> int:
        return len(self.files)

    def read(self, file: int, most: int) -> Tokens:
        return self.files[file][:most]


def file_mark(tokenizer: Tokenizer) -> str:
    """What stands before the path of a file: the delimiter of a corpus, or a comment where there is none."""
    return "\n\n# " if tokenizer.token_to_id(FILE_MARK) is None else FILE_MARK


def bury(haystack: Haystack, first: int, length: int, placed: Sequence[tuple[int, Tokens]]) -> Tokens:
    """`length` tokens: each of `placed` where it says, in order, and files of the haystack between them.

    The files are those from number `first` on, and around. Each gap begins with a new one, and its last is cut to fit,
    so every position is met exactly.
    """
    parts, done = [], 0
    numbers = (number % len(haystack) for number in itertools.count(first))
    for position, tokens in [*placed, (length, np.empty(0, np.int64))]:
        assert done <= position, "what is placed overlaps"
        while done < position:
            parts.append(haystack.read(next(numbers), position - done))
            done += len(parts[-1])
        parts.append(tokens)
        done += len(tokens)
    assert done == length, "what is placed goes beyond the end"
    return np.concatenate(parts)


def check_enough(haystack: Haystack, length: int) -> None:
    if haystack.tokens < length:
        raise ValueError(
            f"{haystack.source} has {haystack.tokens} tokens in files, fewer than {length}: "
            "give more text, or a smaller length"
        )


def _file_bounds(corpus: Corpus, stream: Stream) -> Tokens:
    """(files, 2): where each begins, with its delimiter, and where it ends."""
    tokenizer = read_tokenizer(corpus.folder)
    repository, file = tokenizer.token_to_id(REPOSITORY_MARK), tokenizer.token_to_id(FILE_MARK)
    found: list[Tokens] = []
    kinds: list[Tokens] = []
    for start in range(0, stream.tokens, _SCANNED_AT_ONCE):
        tokens = corpus.tokens(stream, start, min(stream.tokens, start + _SCANNED_AT_ONCE))
        here = np.flatnonzero(np.isin(tokens, np.array([repository, file, corpus.manifest.end])))
        found.append(here + start)
        kinds.append(tokens[here])
    # The stream begins as if an end mark were before it, and ends with one.
    marks = np.concatenate([np.array([-1]), *found, np.array([stream.tokens])])
    kind = np.concatenate([np.array([corpus.manifest.end]), *kinds])
    starts = marks[:-1] + (kind != file)
    bounds = np.stack([starts, marks[1:]], axis=1)
    return bounds[(kind != repository) & (bounds[:, 0] < bounds[:, 1])]
