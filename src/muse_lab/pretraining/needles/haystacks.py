"""Haystacks: files of source code as tokens, among which needles are hidden.

The files of a corpus are cut out at its delimiters, and joined as if they were of one repository: names of repositories
and end marks are left out, because a model may have learned to ignore what is before an end mark.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.data.corpus_documents import FILE_MARK, REPOSITORY_MARK
from muse_lab.pretraining.data.shards import Stream
from muse_lab.pretraining.data.tokenizer import Tokenizer, for_plain_text, read_tokenizer

Tokens = NDArray[np.int64]

_SCANNED_AT_ONCE = 2**24


class CorpusHaystack:
    """The files of one split of a corpus, by number. Texts without files, such as those of Dolma, are one file each."""

    def __init__(self, corpus: Corpus, split: str) -> None:
        self._corpus = corpus
        self._split = split
        self._streams = corpus.streams(split)
        bounds = [_file_bounds(corpus, stream) for stream in self._streams]
        self._bounds = np.concatenate([np.empty((0, 2), np.int64), *bounds])
        self._ends = np.cumsum([len(stream_bounds) for stream_bounds in bounds], dtype=np.int64)
        self.tokens = int((self._bounds[:, 1] - self._bounds[:, 0]).sum())

    @property
    def source(self) -> str:
        return f"the split {self._split!r} of the corpus {self._corpus.fingerprint}: {self._corpus.manifest.source}"

    def __len__(self) -> int:
        return len(self._bounds)

    def read(self, file: int, limit: int) -> Tokens:
        """The first tokens of a file, at most `limit`: its delimiter and its path come first."""
        stream = self._streams[int(np.searchsorted(self._ends, file, side="right"))]
        start, stop = map(int, self._bounds[file])
        return self._corpus.tokens(stream, start, min(stop, start + limit))


@dataclass(frozen=True)
class TextHaystack:
    """Files that are already encoded."""

    source: str
    files: tuple[Tokens, ...]

    @classmethod
    def encode(
        cls, tokenizer: Tokenizer, texts: Iterable[tuple[str, str]], *, enough: int, source: str
    ) -> TextHaystack:
        """Encode (path, text) pairs until there are `enough` tokens. Delimiters in a text are plain text."""
        plain = for_plain_text(tokenizer)
        mark = tokenizer.encode(file_mark(tokenizer), add_special_tokens=False).ids
        files, total = [], 0
        for path, text in texts:
            files.append(np.array(mark + plain.encode(f"{path}\n{text}", add_special_tokens=False).ids, np.int64))
            total += len(files[-1])
            if total >= enough:
                break
        return cls(source, tuple(files))

    @property
    def tokens(self) -> int:
        return sum(map(len, self.files))

    def __len__(self) -> int:
        return len(self.files)

    def read(self, file: int, limit: int) -> Tokens:
        """As of a corpus."""
        return self.files[file][:limit]


Haystack = CorpusHaystack | TextHaystack


def file_mark(tokenizer: Tokenizer) -> str:
    """The text before the path of a file: the delimiter of a corpus, or a comment if there is none."""
    return "\n\n# " if tokenizer.token_to_id(FILE_MARK) is None else FILE_MARK


def bury(haystack: Haystack, first: int, length: int, placed: Sequence[tuple[int, Tokens]]) -> Tokens:
    """`length` tokens: those of `placed` at their positions, in order, and files of the haystack between them.

    Files are taken cyclically from number `first` on. Each gap begins with a new file, and its last file is cut to
    fit.
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
    places: list[Tokens] = []
    kinds: list[Tokens] = []
    for start in range(0, stream.tokens, _SCANNED_AT_ONCE):
        tokens = corpus.tokens(stream, start, min(stream.tokens, start + _SCANNED_AT_ONCE))
        indices = np.flatnonzero(np.isin(tokens, np.array([repository, file, corpus.manifest.end])))
        places.append(indices + start)
        kinds.append(tokens[indices])
    # The stream begins as if an end mark were before it, and ends with one.
    marks = np.concatenate([np.array([-1]), *places, np.array([stream.tokens])])
    kind = np.concatenate([np.array([corpus.manifest.end]), *kinds])
    starts = marks[:-1] + (kind != file)
    bounds = np.stack([starts, marks[1:]], axis=1)
    return bounds[(kind != repository) & (bounds[:, 0] < bounds[:, 1])]
