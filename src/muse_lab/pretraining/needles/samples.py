"""Code needle-in-a-haystack, the paper's own: samples that ask for uids defined far back in a repository.

A sample is a pure function of the seed, the kind, the length, the depth bucket and its number. It has exactly `length`
tokens, the answers among them, and ends with the last answer: the uids in its last file are for a model to complete.
Nine buckets are tenths of the context, named by their middles, 0.05 to 0.85; the questions are in the last tenth. Every
definition lies within its bucket as a whole.

    single             one definition, one question
    multi-key-2, -4    two or four other definitions too, in other buckets
    multi-query-2, -4  two or four definitions, in different buckets, and a question for each

The paper does not show its prompt: this one is ours.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from muse_lab.pretraining.data.tokenizer import Tokenizer
from muse_lab.pretraining.needles.haystacks import Haystack, Tokens, bury, check_enough
from muse_lab.pretraining.needles.writer import EVALUATION, Needle, NeedleWriter, occurrences

BUCKETS = 9
CANDIDATES = 8
"""Uids to choose from: the right one, others of the prompt, and decoys of the same form."""


@dataclass(frozen=True)
class Kind:
    asked: int
    """needles, one question each"""
    distractors: int
    """definitions that are not asked for"""


KINDS = {
    "single": Kind(1, 0),
    "multi-key-2": Kind(1, 2),
    "multi-key-4": Kind(1, 4),
    "multi-query-2": Kind(2, 0),
    "multi-query-4": Kind(4, 0),
}


@dataclass(frozen=True)
class Question:
    needle: Needle
    bucket: int
    """of the definition, 0 to 8"""
    definition: range
    """where it is in the sample"""
    answer: range
    """where the uid is in the sample"""
    candidates: Tokens
    """(candidates, tokens of a uid), the right one first"""


@dataclass(frozen=True)
class Sample:
    kind: str
    bucket: int
    """of one of the needles that are asked for"""
    number: int
    tokens: Tokens
    """(length), the answers included"""
    questions: tuple[Question, ...]
    """in the order in which they are asked"""
    distractors: tuple[Needle, ...]

    @property
    def prompt(self) -> Tokens:
        """The tokens before the first answer."""
        return self.tokens[: self.questions[0].answer.start]


class NeedleSamples:
    """Samples for one tokenizer in one haystack."""

    def __init__(self, tokenizer: Tokenizer, haystack: Haystack, *, begin: Sequence[int] = (), seed: int = 0) -> None:
        """
        Args:
            begin: tokens with which every text of the model begins
        """
        self._writer = NeedleWriter(tokenizer)
        self._haystack = haystack
        self._opening = np.concatenate([np.array(begin, np.int64), self._writer.opening()])
        self._seed = seed

    def make(self, kind: str, length: int, bucket: int, number: int) -> Sample:
        check_kind(kind)
        check_enough(self._haystack, length)
        if not 0 <= bucket < BUCKETS:
            raise ValueError(f"there is no depth bucket {bucket}; they are 0 to {BUCKETS - 1}")
        if length < (shortest := self.shortest(kind)):
            raise ValueError(
                f"a tenth of {length} tokens has no room for the needles of {kind}; choose at least {shortest}"
            )
        rng = random.Random(f"{self._seed}/{EVALUATION}/{kind}/{length}/{bucket}/{number}")
        while True:
            sample = self._draw(rng, kind, length, bucket, number)
            if _is_unambiguous(sample):  # else the haystack has one of the uids by chance
                return sample

    def shortest(self, kind: str) -> int:
        """The shortest length whose tenths have room for any definition and for all questions."""
        longest = self._writer.longest
        definition = len(self._opening) + len(self._writer.definition(longest))
        questions = self._writer.questions([longest] * KINDS[kind].asked).answers[-1].stop
        return 10 * (max(definition, questions) + 1)

    def _draw(self, rng: random.Random, kind: str, length: int, bucket: int, number: int) -> Sample:
        asked, distractors = KINDS[kind].asked, KINDS[kind].distractors
        needles = self._writer.draw(rng, EVALUATION, asked + distractors)
        other_buckets = rng.sample([number for number in range(BUCKETS) if number != bucket], len(needles) - 1)
        placed = []
        for needle, own in zip(needles, [bucket, *other_buckets], strict=True):
            definition = self._writer.definition(needle)
            placed.append((self._place(rng, length, own, len(definition)), definition, own))
        order = rng.sample(range(asked), asked)
        file = self._writer.questions([needles[index] for index in order])
        last = file.tokens[: file.answers[-1].stop]
        start = length - len(last)
        inserted = [(0, self._opening), *sorted((position, tokens) for position, tokens, _ in placed), (start, last)]
        tokens = bury(self._haystack, rng.randrange(len(self._haystack)), length, inserted)
        questions = tuple(
            Question(
                needle=needles[index],
                bucket=placed[index][2],
                definition=range(placed[index][0], placed[index][0] + len(placed[index][1])),
                answer=range(start + answer.start, start + answer.stop),
                candidates=self._candidates(rng, needles[index], needles),
            )
            for index, answer in zip(order, file.answers, strict=True)
        )
        return Sample(kind, bucket, number, tokens, questions, tuple(needles[asked:]))

    def _place(self, rng: random.Random, length: int, bucket: int, size: int) -> int:
        """A random position at which a definition lies within the bucket."""
        lowest = max(-(-bucket * length // 10), len(self._opening))
        highest = (bucket + 1) * length // 10 - size
        return rng.randint(lowest, highest)

    def _candidates(self, rng: random.Random, needle: Needle, needles: Sequence[Needle]) -> Tokens:
        uids = [needle.uid, *(other.uid for other in needles if other != needle)]
        uids += self._writer.draw_uids(rng, EVALUATION, CANDIDATES - len(uids), but=uids)
        return np.stack([self._writer.uid(Needle(needle.name, uid)) for uid in uids])


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; use one of {', '.join(KINDS)}")


def depth_of(bucket: int) -> float:
    """The middle of a bucket, as a share of the context."""
    return (2 * bucket + 1) / 20


def _is_unambiguous(sample: Sample) -> bool:
    """Whether each uid occurs only in its definition and its answer, and decoys do not occur."""
    defined = len(sample.questions) + len(sample.distractors)
    for question in sample.questions:
        counts = [occurrences(sample.tokens, candidate) for candidate in question.candidates]
        asked_too = len(sample.questions) - 1
        expected = [2] + [2] * asked_too + [1] * len(sample.distractors) + [0] * (CANDIDATES - defined)
        if counts != expected:
            return False
    return True
