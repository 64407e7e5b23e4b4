"""Needle documents among the training samples, from which a model learns retrieval.

Such a document has files of the training split, and between them definitions and questions, which are two thirds of it.
A file of questions asks mostly for one needle, sometimes for two or four, and its answers are trained on like any other
text. The distance from a question to each definition is log-uniform, from 64 tokens to the whole document. A quarter of
the documents are as in evaluation: questions in the last tenth, definitions anywhere before. Evaluation draws other
names and uids.
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
"""Smallest distance from a definition to its question, in tokens, approximately."""
_PROBED = 8192
"""Minimum tokens of the documents on which a rank measures answers: at least a hundred of them are answers."""
_ASKED_TOGETHER = {1: 6, 2: 1, 4: 1}
"""Numbers of needles that a file asks for, and their weights. A single call is always equally far from its import."""


class _Event(NamedTuple):
    """A definition, or a file of questions."""

    point: float
    """where it stands, as a share of the haystack"""
    tokens: Tokens
    needles: tuple[Needle, ...]
    """needles that it defines or asks for"""
    answers: tuple[range, ...] = ()
    """where the uid of each is, if it asks for them"""


class NeedleDocuments:
    """Documents of `length + 1` tokens that replace some of the samples of a run."""

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
            split: split of the files between the needles
            purpose: `TRAINING` or `EVALUATION`, which have different names and uids
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
        """Whether this sample of the run is a needle document, as a random `share` of them are."""
        mixed = hashlib.blake2b(f"{self._seed}/niah/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(mixed, "little") < self._share * 2**64

    def make(self, number: int) -> Tensor:
        """(length + 1,) int64, a pure function of the seed and the number."""
        return self.make_with_answers(number)[0]

    def make_with_answers(self, number: int) -> tuple[Tensor, Tensor]:
        """A document, and (length + 1,) int64: for tokens of imported uids, which must be looked up, the distance to
        the beginning of the needle's definition; 0 for all other tokens."""
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
        """Documents that are not samples of a run, with their answers; the same number on each rank."""
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
        while sum(sizes) + max(_ASKED_TOGETHER) <= self._writer.limit:
            fitting = [size for size, weight in _ASKED_TOGETHER.items() if costs[size] <= room for _ in range(weight)]
            if not fitting:
                break
            sizes.append(rng.choice(fitting))
            room -= costs[sizes[-1]]
        sizes = sizes or [1]
        needles = iter(self._writer.draw(rng, self._purpose, sum(sizes)))
        return [[next(needles) for _ in range(size)] for size in sizes]

    def _draw_distance(self, rng: random.Random) -> float:
        """Distance from a definition to its question, as a share of the document."""
        return math.exp(rng.uniform(math.log(min(1.0, _NEAREST / self._length)), 0))
