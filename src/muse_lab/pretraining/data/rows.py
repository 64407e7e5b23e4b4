"""Whole documents in rows of one length, for attention that keeps documents apart.

A document goes to the fullest open row that has room for it. What is left of a row is filled with end marks. Only a
document that is longer than a row is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from muse_lab.pretraining.data.shards import StreamWriter

_OPEN_ROWS = 64
"""Rows that wait for documents that fit. More waste fewer tokens and take more memory."""


class _Packed(NamedTuple):
    tokens: NDArray[np.uint32]
    facts: dict[str, Any]
    """fields of the document in the index"""


@dataclass
class _Row:
    room: int
    documents: list[_Packed] = field(default_factory=list)


class RowPacker:
    """Writes documents to a stream, row by row. Each row has `length` tokens."""

    def __init__(self, writer: StreamWriter, length: int, end: int) -> None:
        """`end` is the end mark, the last token of every document."""
        self._writer = writer
        self._length = length
        self._end = end
        self._open: list[_Row] = []

    def add(self, tokens: NDArray[np.uint32], **facts: Any) -> None:
        for start in range(0, len(tokens), self._length):
            self._place(_Packed(tokens[start : start + self._length], facts))

    def finish(self) -> None:
        """Write all rows that are still open."""
        while self._open:
            self._close_fullest()

    def _place(self, document: _Packed) -> None:
        fitting = [row for row in self._open if row.room >= len(document.tokens)]
        row = min(fitting, key=lambda row: row.room, default=None)
        if row is None:
            if len(self._open) == _OPEN_ROWS:
                self._close_fullest()
            row = _Row(self._length)
            self._open.append(row)
        row.documents.append(document)
        row.room -= len(document.tokens)
        if row.room == 0:
            self._close_fullest()

    def _close_fullest(self) -> None:
        row = min(self._open, key=lambda row: row.room)
        self._open.remove(row)
        *earlier, last = row.documents
        filler = np.full(row.room, self._end, dtype=last.tokens.dtype)
        for document in (*earlier, _Packed(np.concatenate([last.tokens, filler]), last.facts)):
            self._writer.add(document.tokens, **document.facts)
