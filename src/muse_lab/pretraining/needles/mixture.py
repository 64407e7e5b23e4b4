"""Needle documents among the samples of a corpus, made for a model to learn retrieval from.

Such a document is files of the training split, with definitions and questions among them that are two thirds of it. A
file of questions asks for one needle most often, or for two or four, and the answers are learnt from as any other text
is. How far back each is defined is drawn first, evenly on a logarithmic scale from 64 tokens to the whole document. A
quarter of the documents are as in evaluation: their last tenth is questions, and definitions are anywhere before. The
names and uids are none of those that evaluation draws.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from muse_lab.pretraining.data.corpus import TRAIN, Corpus
from muse_lab.pretraining.data.tokenizer import read_tokenizer
from muse_lab.pretraining.needles.haystacks import CorpusHaystack, Tokens, bury, check_enough
from muse_lab.pretraining.needles.writer import TRAINING, Needle, NeedleWriter

_FILLED = 2 / 3
"""Share of a document that is needles."""
_ASKED_AT_THE_END = 1 / 4
"""Share of the documents whose questions are all at the end."""
_END = 1 / 10
"""Share of such a document that is questions."""
_NEAREST = 64
"""Tokens, about, from a definition to its question."""
_PROBED = 8192
"""Minimum tokens of the documents on which a rank measures answers: at least a hundred of them are answers."""
_ASKED_TOGETHER = {1: 6, 2: 1, 4: 1}
"""Needles that a file asks for, and how often. A single call is always as far behind its import."""


class _Event(NamedTuple):
    """A definition, or a file of questions."""

    point: float
    """where it stands, as a share of the haystack"""
    tokens: Tokens
    needles: tuple[Needle, ...]
    """that it defines or asks for"""
    answers: tuple[range, ...] = ()
    """where the uid of each is, if it asks for them"""


class NeedleDocuments:
    """Documents of `length + 1` tokens, and which samples of a run they take the place of."""

    def __init__(
        self,
        corpus: Corpus,
        length: int,
        *,
        share: float,
        seed: int = 0,
        split: str = TRAIN,
        purpose: str = TRAINING,
    ) -> None:
        """
        Args:
            split: whose files they are among
            purpose: `TRAINING` or `EVALUATION`: names and uids are for one of them
        """
        self._writer = NeedleWriter(read_tokenizer(corpus.folder))
        self._haystack = CorpusHaystack(corpus, split)
        self._length = length
        self._share = share
        self._seed = seed
        self._purpose = purpose
        check_enough(self._haystack, length)
        longest = self._writer.longest
        self._definition = len(self._writer.definition(longest))
        self._questions = {number: len(self._writer.questions([longest] * number).tokens) for number in _ASKED_TOGETHER}
        """the most tokens of a file that asks for this many needles"""
        shortest = len(self._writer.opening()) + self._definition + self._questions[1]
        if length < shortest:
            raise ValueError(
                f"needle documents of {length} tokens have no room for needles; choose a length of at least {shortest}"
            )

    def replaces(self, number: int) -> bool:
        """Whether this sample of the run is a needle document: so is `share` of them, by chance."""
        mixed = hashlib.blake2b(f"{self._seed}/niah/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(mixed, "little") < self._share * 2**64

    def make(self, number: int) -> Tensor:
        """(length + 1,) int64, a pure function of the seed and the number."""
        return self.make_with_answers(number)[0]

    def make_with_answers(self, number: int) -> tuple[Tensor, Tensor]:
        """A document, and (length + 1,) int64: of tokens of uids that must be looked up, those of imports, how many
        tokens before them the definition of the needle begins; 0 of all others."""
        rng = random.Random(f"{self._seed}/{self._purpose}/{self._length}/{number}")
        opening = self._writer.opening()
        events = sorted(self._events(rng), key=lambda event: event.point)
        free = self._length + 1 - len(opening) - sum(len(event.tokens) for event in events)
        placed, done = [(0, opening)], len(opening)
        distances, defined = torch.zeros(self._length + 1, dtype=torch.int64), dict[Needle, int]()
        for event in events:
            position = done + int(event.point * free)
            placed.append((position, event.tokens))
            if event.answers:
                for needle, answer in zip(event.needles, event.answers, strict=True):
                    places = torch.arange(position + answer.start, position + answer.stop)
                    distances[places] = places - defined[needle]
            else:
                defined |= dict.fromkeys(event.needles, position)
            done += len(event.tokens)
        first = rng.randrange(len(self._haystack))
        return torch.from_numpy(bury(self._haystack, first, self._length + 1, placed)), distances

    def make_probes(self, rank: int = 0, ranks: int = 1) -> list[tuple[Tensor, Tensor]]:
        """Documents that are no samples of a run, with their answers: all ranks have as many."""
        number = math.ceil(_PROBED / self._length)
        return [self.make_with_answers(-1 - rank - ranks * index) for index in range(number)]

    def _events(self, rng: random.Random) -> Iterator[_Event]:
        is_asked_at_the_end = rng.random() < _ASKED_AT_THE_END
        for group in self._draw_groups(rng, is_asked_at_the_end):
            if is_asked_at_the_end:
                question, points = 1.0, [rng.random() for _ in group]
            else:
                distances = [self._draw_distance(rng) for _ in group]
                question = rng.uniform(max(distances), 1)
                points = [question - distance for distance in distances]
            for point, needle in zip(points, group, strict=True):
                yield _Event(point, self._writer.definition(needle), (needle,))
            order = rng.sample(group, len(group))
            asked = self._writer.questions(order)
            yield _Event(question, asked.tokens, tuple(order), asked.answers)

    def _draw_groups(self, rng: random.Random, is_asked_at_the_end: bool) -> list[list[Needle]]:
        """Needles that are asked for together, one group for each file of questions."""
        if is_asked_at_the_end:
            room, costs = self._length * _END, self._questions
        else:
            room = self._length * _FILLED
            costs = {size: tokens + size * self._definition for size, tokens in self._questions.items()}
        sizes: list[int] = []
        while sum(sizes) + max(_ASKED_TOGETHER) <= self._writer.most:
            fitting = [size for size, often in _ASKED_TOGETHER.items() if costs[size] <= room for _ in range(often)]
            if not fitting:
                break
            sizes.append(rng.choice(fitting))
            room -= costs[sizes[-1]]
        sizes = sizes or [1]
        needles = iter(self._writer.draw(rng, self._purpose, sum(sizes)))
        return [[next(needles) for _ in range(size)] for size in sizes]

    def _draw_distance(self, rng: random.Random) -> float:
        """From a definition to its question, as a share of the document."""
        return math.exp(rng.uniform(math.log(min(1.0, _NEAREST / self._length)), 0))
