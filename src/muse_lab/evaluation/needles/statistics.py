"""What the answers of needle samples say: shares, by depth, and differences of two."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from muse_lab.evaluation.means import Mean, Share
from muse_lab.evaluation.needles.results import NeedleResults, NeedleTask, Outcome
from muse_lab.evaluation.needles.scores import Answer
from muse_lab.pretraining.needles.samples import BUCKETS, KINDS

Measure = Callable[[Answer], bool]
is_exact: Measure = operator.attrgetter("is_exact")
is_preferred: Measure = operator.attrgetter("is_preferred")

Group = tuple[int, str]
"""A length and a kind."""
Cell = TypeVar("Cell", bound=tuple[Any, ...])


class Asked(NamedTuple):
    """A model, by its results, and the attention that read the prompts."""

    results: NeedleResults
    attention: str

    def samples(self, found: Iterable[Group]) -> dict[tuple[int, str, int, int], Outcome]:
        """What was answered, by length, kind, bucket and number of the sample."""
        wanted = set(found)
        return {
            (task.length, task.kind, task.bucket, task.number): outcome
            for task, outcome in self.results.measured.items()
            if task.attention == self.attention and (task.length, task.kind) in wanted and outcome.answers
        }

    def answers(self, found: Iterable[Group]) -> list[Answer]:
        return [answer for outcome in self.samples(found).values() for answer in outcome.answers]


def groups(results: NeedleResults) -> list[Group]:
    """Those there are, in order."""
    return in_order({(task.length, task.kind) for task in results.measured})


def in_order(found: Iterable[Cell]) -> list[Cell]:
    """Of tuples that begin with a length and a kind: by length, and by kind as they are listed."""
    kinds = list(KINDS)
    return sorted(found, key=lambda group: (group[0], kinds.index(group[1])))


def share(found: Iterable[Answer], measure: Measure) -> Share | None:
    """None if there are no answers."""
    rights = [measure(answer) for answer in found]
    return Share(sum(rights), len(rights)) if rights else None


def by_depth(found: Sequence[Answer], measure: Measure) -> list[Share | None]:
    """Of the definitions in each bucket."""
    return [share((answer for answer in found if answer.bucket == bucket), measure) for bucket in range(BUCKETS)]


def difference(
    own: Asked, other: Asked, found: Iterable[Group], measure: Measure, *, bucket: int | None = None
) -> Mean | None:
    """Of the shares of questions, of one depth if a bucket is given, in the samples that both have answered.

    The standard error is over samples, as questions of one sample are answered right or wrong together. None if there
    are no such questions.
    """
    found = list(found)
    samples, others = own.samples(found), other.samples(found)
    gains = [
        [
            measure(answer) - measure(others_answer)
            for answer, others_answer in zip(outcome.answers, others[sample].answers, strict=True)
            if bucket in (None, answer.bucket)
        ]
        for sample, outcome in samples.items()
        if sample in others
    ]
    gains = [of_sample for of_sample in gains if of_sample]
    return Mean.of_ratio([*map(sum, gains)], [*map(len, gains)]) if gains else None


def failures(results: NeedleResults) -> list[tuple[NeedleTask, str]]:
    return [(task, outcome.error) for task, outcome in results.measured.items() if outcome.error]
