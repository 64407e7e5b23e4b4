"""Needle documents among the samples of a corpus, so that even a small model learns to retrieve.

Such a document is files of the training split with many definitions and many questions among them, one of each for
every 256 tokens, but at most 64. A file of questions asks for one, two or four needles, defined anywhere before it, and
the answers are learnt from as any other text is. The names and uids are none of those that evaluation draws.
"""

from __future__ import annotations

import hashlib
import random

import torch
from torch import Tensor

from muse_attention.pretraining.corpus import TRAIN, Corpus
from muse_attention.pretraining.haystacks import CorpusHaystack, Tokens, bury, check_enough
from muse_attention.pretraining.needles import TRAINING, NeedleWriter
from muse_attention.pretraining.tokenizer import read_tokenizer

_TOKENS_PER_NEEDLE = 256
_MOST_NEEDLES = 64
_ASKED_TOGETHER = (1, 2, 4)


class NeedleDocuments:
    """Documents of `length + 1` tokens, and which samples of a run they take the place of."""

    def __init__(self, corpus: Corpus, length: int, *, share: float, seed: int = 0) -> None:
        self._writer = NeedleWriter(read_tokenizer(corpus.folder))
        self._haystack = CorpusHaystack(corpus, TRAIN)
        self._length = length
        self._share = share
        self._seed = seed
        check_enough(self._haystack, length)
        self.make(0)  # too short a length is known before training begins

    def replaces(self, number: int) -> bool:
        """Whether this sample of the run is a needle document: so is `share` of them, by chance."""
        mixed = hashlib.blake2b(f"{self._seed}/niah/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(mixed, "little") < self._share * 2**64

    def make(self, number: int) -> Tensor:
        """(length + 1,) int64, a pure function of the seed and the number."""
        rng = random.Random(f"{self._seed}/{TRAINING}/{self._length}/{number}")
        opening = self._writer.opening()
        events = self._events(rng)
        free = self._length + 1 - len(opening) - sum(len(tokens) for _, tokens in events)
        if free < 0:
            raise ValueError(f"needle documents of {self._length} tokens have no room for needles; choose more")
        placed, done = [(0, opening)], len(opening)
        for point, tokens in events:
            placed.append((done + int(point * free), tokens))
            done += len(tokens)
        first = rng.randrange(len(self._haystack))
        return torch.from_numpy(bury(self._haystack, first, self._length + 1, placed))

    def _events(self, rng: random.Random) -> list[tuple[float, Tokens]]:
        """Definitions and questions, each at a share of the haystack, in order."""
        number = min(max(1, self._length // _TOKENS_PER_NEEDLE), _MOST_NEEDLES)
        needles = self._writer.draw(rng, TRAINING, number)
        events = []
        while needles:
            together = needles[: rng.choice(_ASKED_TOGETHER)]
            del needles[: len(together)]
            *definitions, question = sorted(rng.random() for _ in range(len(together) + 1))
            events += [
                (point, self._writer.definition(needle)) for point, needle in zip(definitions, together, strict=True)
            ]
            asked = rng.sample(together, len(together))
            events.append((question, self._writer.questions(asked).tokens))
        return sorted(events, key=lambda event: event[0])
