"""Samples of a corpus, as a pure function of the seed, the step and the rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from muse_lab.pretraining.data.corpus import TRAIN, Corpus
from muse_lab.pretraining.needles.mixture import NeedleDocuments

_ROUNDS = 6


class Windows:
    """All samples of `length + 1` tokens, in order: inputs, and targets one token later.

    Documents of a bucket follow one another without padding, and are cut wherever a sample ends. Every token is an
    input at most once, and a target at most once. The rest at the end of a bucket is not used.
    """

    def __init__(self, corpus: Corpus, length: int, *, split: str = TRAIN) -> None:
        if length < 1:
            raise ValueError(f"cannot train on samples of {length} tokens; length must be at least 1")
        self.corpus = corpus
        self.length = length
        self._streams = corpus.streams(split)
        self._ends = np.cumsum([max(0, stream.tokens - 1) // length for stream in self._streams], dtype=np.int64)
        if not len(self):
            tokens = sum(stream.tokens for stream in self._streams)
            raise ValueError(
                f"the split {split!r} has {tokens} tokens in {len(self._streams)} buckets, and none has a sample of "
                f"{length} + 1; prepare more text or choose a shorter length"
            )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Tensor:
        """(length + 1,) int64"""
        if not 0 <= index < len(self):
            raise IndexError(f"there is no sample {index} of {len(self)}")
        stream = int(np.searchsorted(self._ends, index, side="right"))
        start = (index - (int(self._ends[stream - 1]) if stream else 0)) * self.length
        return torch.from_numpy(self.corpus.tokens(self._streams[stream], start, start + self.length + 1))

    def spaced(self, number: int) -> list[Tensor]:
        """`number` samples, evenly spaced among all: no bucket of documents is left out."""
        return [self[index * len(self) // number] for index in range(number)]


@dataclass(frozen=True)
class Batches:
    """Windows, shuffled anew in every epoch, for any number of ranks.

    A step takes the next `batch` windows of the shuffled order, and each rank its share of them: the step is the only
    state, and the windows of a step do not depend on the number of ranks.
    """

    windows: Windows
    batch: int
    """windows of a step, over all ranks"""
    seed: int = 0
    ranks: int = 1
    mixture: NeedleDocuments | None = None
    """documents that replace some windows"""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.batch < 1 or self.batch % self.ranks:
            raise ValueError(
                f"batch={self.batch} cannot be shared by {self.ranks} ranks; choose a multiple, like batch={self.ranks}"
            )

    def read(self, step: int, rank: int = 0) -> Tensor:
        """(batch / ranks, length + 1) int64"""
        return torch.stack([self._sample(number) for number in self._numbers(step, rank)])

    def _numbers(self, step: int, rank: int) -> range:
        """Numbers of the samples, counted over the whole run."""
        if step < 0 or not 0 <= rank < self.ranks:
            raise ValueError(f"there is no step {step} of rank {rank} of {self.ranks}")
        share = self.batch // self.ranks
        first = step * self.batch + rank * share
        return range(first, first + share)

    def _sample(self, number: int) -> Tensor:
        if self.mixture is not None and self.mixture.replaces(number):
            return self.mixture.make(number)
        epoch, position = divmod(number, len(self.windows))
        return self.windows[shuffled(position, len(self.windows), f"{self.seed}/{epoch}")]


def shuffled(position: int, size: int, key: str) -> int:
    """The element at a position of a permutation of `range(size)`: computed, not stored, the same on every machine.

    A Feistel network on the next even number of bits, repeated until it lands inside the range.
    """
    half = max(1, (size - 1).bit_length() + 1 >> 1)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for turn in range(_ROUNDS):
            mixed = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        position = left << half | right
        if position < size:
            return position
