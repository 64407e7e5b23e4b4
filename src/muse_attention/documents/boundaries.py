"""`DocumentBoundaries`: where the documents in a row of tokens lie, known on the host.

Which kernels attend to a document depends on its length, so the host must know the lengths. FlashAttention's callers
pass them as `cu_seqlens`, an int32 tensor on the GPU. Reading it waits for the GPU, and every call reads it: a
tensor does not tell whether its memory was written since. Boundaries from a list, from a tensor on the CPU, or made
with this class once for all layers, never wait. They are checked where they are read, so that a check never waits by
itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class DocumentBoundaries:
    """Documents in a row of tokens, from left to right. Tokens in no document are padding."""

    begins: tuple[int, ...]
    """first token of each document"""
    ends: tuple[int, ...]
    """token after the last one of each document"""
    tokens: int
    """tokens in the row"""
    table: Tensor = field(init=False, repr=False, compare=False)
    """begins, ends and tokens, int64 on the CPU, for compiled graphs: integers would be constants in them"""

    def __post_init__(self) -> None:
        given = (*self.begins, *self.ends, self.tokens)
        if not _are_integers(given):
            raise ValueError("the boundaries of documents must be integers (for a tensor: tolist())")
        if len(self.begins) != len(self.ends):
            raise ValueError(f"{len(self.begins)} documents begin and {len(self.ends)} end; give each both")
        edges = [edge for document in zip(self.begins, self.ends, strict=True) for edge in document]
        if not edges:
            raise ValueError("a row needs at least one document")
        for begin, end in zip(self.begins, self.ends, strict=True):
            if begin >= end:
                raise ValueError(f"the document from {begin} to {end} has no token; leave it out")
        if any(before > after for before, after in pairwise([0, *edges, self.tokens])):
            raise ValueError(f"documents must follow each other inside a row of {self.tokens} tokens; these do not")
        if self.tokens > MOST_TOKENS:
            raise ValueError(f"a row of {self.tokens} tokens is too long; at most {MOST_TOKENS}, as int32 holds")
        with torch.inference_mode(False):  # no backward pass could keep an inference tensor
            object.__setattr__(self, "table", torch.tensor(given, device="cpu"))

    @classmethod
    def from_lengths(cls, lengths: Iterable[int]) -> Self:
        """Documents of these lengths, one after another."""
        has_numbers = isinstance(lengths, Iterable) and not isinstance(lengths, Tensor)
        numbers: list[Any] = list(lengths) if has_numbers else [None]
        if not _are_integers(numbers):
            raise ValueError("lengths must be a list of integers (for a tensor: tolist())")
        ends = [0, *accumulate(numbers)]
        return cls(tuple(ends[:-1]), tuple(ends[1:]), ends[-1])

    @classmethod
    def from_table(cls, table: Tensor) -> Self:
        """The boundaries that have this `table`."""
        *edges, tokens = table.tolist()
        number = len(edges) // 2
        return cls(tuple(edges[:number]), tuple(edges[number:]), tokens)

    @classmethod
    def read(cls, cu_seqlens: Boundaries, name: str = "cu_seqlens") -> Self:
        """Boundaries as FlashAttention takes them: 0, then the end of each document. Raises ValueError for bad ones."""
        if isinstance(cu_seqlens, cls):
            return cu_seqlens
        if isinstance(cu_seqlens, Tensor):
            check_ends(cu_seqlens, name)
            refuse_capture(cu_seqlens, name)
            ends = cu_seqlens.tolist()
        elif isinstance(cu_seqlens, list | tuple) and _are_integers(cu_seqlens):
            ends = list(cu_seqlens)
        else:
            raise ValueError(f"{name} must be an int32 tensor, a list of integers, or DocumentBoundaries")
        if len(ends) < 2 or ends[0] != 0:
            raise ValueError(f"{name} must begin with 0, and the end of at least one document must follow")
        for begin, end in pairwise(ends):
            if end <= begin:
                raise ValueError(f"{name} must ascend, but {end} follows {begin}: leave out documents without tokens")
        return cls(tuple(ends[:-1]), tuple(ends[1:]), ends[-1])

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in zip(self.begins, self.ends, strict=True))

    @functools.cached_property
    def longest(self) -> int:
        return max(self.lengths)

    def cut_at(self, begins: Iterable[int]) -> Self:
        """The same documents, cut at those of these tokens that are inside one."""
        inside = sorted({*self.begins, *begins})
        cut: list[tuple[int, int]] = []
        for begin, end in zip(self.begins, self.ends, strict=True):
            edges = [edge for edge in inside if begin <= edge < end]
            cut += pairwise([*edges, end])
        return type(self)(tuple(begin for begin, _ in cut), tuple(end for _, end in cut), self.tokens)

    def in_columns(self, rows: int, begin: int, end: int) -> Self:
        """The documents in tokens `begin` to `end` of each of `rows` equal rows, cut at both."""
        length = self.tokens // rows
        starts = range(0, self.tokens, length)
        cut = [
            (max(first, start + begin) - start - begin, min(last, start + end) - start - begin, row)
            for row, start in enumerate(starts)
            for first, last in zip(self.begins, self.ends, strict=True)
            if first < start + end and last > start + begin
        ]
        width = end - begin
        begins, ends = (tuple(edge[at] + edge[2] * width for edge in cut) for at in (0, 1))
        return type(self)(begins, ends, rows * width)

    def numbers(self) -> Tensor:
        """The document of each token, from 0; -1 for padding."""
        number = torch.full((self.tokens,), -1)
        for document, (begin, end) in enumerate(zip(self.begins, self.ends, strict=True)):
            number[begin:end] = document
        return number

    def mask(self, rows: int, is_causal: bool, device: torch.device | str = "cpu") -> Tensor:
        """What each token sees, (rows, length, length) boolean, for an attention without documents.

        Padding sees itself, so that no query sees nothing.
        """
        number = self.numbers().to(device).view(rows, -1)
        position = torch.arange(number.shape[1], device=device)
        seen = (number[:, :, None] == number[:, None]) & (number[:, None] >= 0)
        if is_causal:
            seen &= position[:, None] >= position
        return seen | (position[:, None] == position)


Boundaries = DocumentBoundaries | Tensor | Sequence[int]
"""What `DocumentBoundaries.read` reads."""


def check_ends(cu_seqlens: Tensor, name: str) -> None:
    """Check the dtype and shape of the ends of documents without reading them."""
    if cu_seqlens.layout != torch.strided:
        raise ValueError(f"{name} is a {cu_seqlens.layout} tensor; it must be dense: use to_dense()")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ValueError(
            f"{name} has dtype {cu_seqlens.dtype} and shape {tuple(cu_seqlens.shape)}; it must be int32 with one "
            "axis: 0, then the end of each document"
        )


def read_boundaries(
    tokens: int, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int
) -> DocumentBoundaries:
    """The boundaries of documents that attend to themselves, as `read` takes them. A ValueError for bad ones."""
    boundaries = DocumentBoundaries.read(cu_seqlens_q, "cu_seqlens_q")
    if cu_seqlens_k is not cu_seqlens_q and DocumentBoundaries.read(cu_seqlens_k, "cu_seqlens_k") != boundaries:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k differ: documents attend to themselves only; pass the same to both"
        )
    if boundaries.tokens != tokens:
        raise ValueError(f"cu_seqlens_q ends at {boundaries.tokens}, q has {tokens} tokens; they must be equal")
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(longest, bool) or not isinstance(longest, int) or longest < boundaries.longest:
            raise ValueError(
                f"{name}={longest!r} must be an integer of at least {boundaries.longest}, the length of the longest "
                "document"
            )
    return boundaries


def _are_integers(numbers: Iterable[Any]) -> bool:
    return all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)


def refuse_capture(tensor: Tensor, name: str) -> None:
    """Raise ValueError while a CUDA graph is captured, which does not allow a tensor to be read."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{name} on a GPU cannot be read while a CUDA graph is captured; pass DocumentBoundaries, which the graph "
            "keeps, or capture no graph"
        )
