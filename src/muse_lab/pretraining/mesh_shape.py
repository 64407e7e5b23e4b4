"""How the ranks of a run share its work: `mesh=2x4`, data x sequence.

There are two groups of four ranks. Each group has sequences of its own, and each rank of a group an equal part of every
sequence. Ranks of a group are neighbours, so `torchrun` puts them on one machine where it has room for a group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

AUTO = "auto"
"""All ranks along data: each has whole sequences."""
_SHAPE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")


class MeshShape(NamedTuple):
    data: int
    """groups of ranks"""
    sequence: int
    """ranks of a group"""

    def __str__(self) -> str:
        return f"mesh={self.data}x{self.sequence}"


def read_mesh(text: object) -> MeshShape | None:
    """Parse a shape like `2x4`; None for `auto`, ValueError for anything else."""
    if text == AUTO:
        return None
    match = _SHAPE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"mesh={text!r} must be {AUTO}, or data x sequence ranks, like 2x4")
    return MeshShape(int(match[1]), int(match[2]))


def choose_shape(text: str, *, ranks: int, batch: int, heads: int, length: int) -> MeshShape:
    """The shape of a run; raises ValueError, the same on every rank, if the ranks cannot share the work in it.

    Args:
        text: `mesh` of the recipe
        ranks: number of ranks
        batch: sequences of an update
        heads: of each attention layer
        length: of a sequence
    """
    shape = read_mesh(text) or MeshShape(ranks, 1)
    fitting = [
        MeshShape(ranks // sequence, sequence)
        for sequence in _divisors(ranks)
        if heads % sequence == length % sequence == batch % (ranks // sequence) == 0
    ]
    instead = f", or use {_listed([str(fit) for fit in fitting])}" if fitting else ""
    wanted = shape.data * shape.sequence
    if wanted != ranks:
        running = "1 process runs" if ranks == 1 else f"{ranks} run"
        raise ValueError(f"{shape} has {wanted} ranks, but {running}: start {wanted} with torchrun{instead}")
    if batch % shape.data:
        raise ValueError(
            f"batch={batch} cannot be shared by {shape.data} ranks along data; choose a multiple, like "
            f"batch={shape.data}{instead}"
        )
    if heads % shape.sequence:
        raise ValueError(
            f"{shape}: {shape.sequence} ranks along the sequence do not divide the {heads} heads of the model; "
            f"{_listed([str(number) for number in _divisors(heads)])} do{instead}"
        )
    if length % shape.sequence:
        multiple = -(-length // shape.sequence) * shape.sequence
        raise ValueError(
            f"{shape}: {shape.sequence} ranks along the sequence do not divide length={length}; choose a multiple, "
            f"like length={multiple}{instead}"
        )
    return shape


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
