"""Statistics of answers to needle samples: shares, shares by depth, and differences of two."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from muse_lab.evaluation.needles.results import NeedleResults, NeedleTask, Outcome
from muse_lab.evaluation.needles.scores import Answer
from muse_lab.pretraining.needles.samples import BUCKETS, KINDS
from muse_lab.records.means import Mean, Share

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

    def samples(self, together: Iterable[Group]) -> dict[tuple[int, str, int, int], Outcome]:
        """Answered samples, by length, kind, bucket and number of the sample."""
        wanted = set(together)
        return {
            (task.length, task.kind, task.bucket, task.number): outcome
            for task, outcome in self.results.measured.items()
            if task.attention == self.attention and (task.length, task.kind) in wanted and outcome.answers
        }

    def answers(self, together: Iterable[Group]) -> list[Answer]:
        return [answer for outcome in self.samples(together).values() for answer in outcome.answers]


def groups(results: NeedleResults) -> list[Group]:
    """The groups that were asked, in order."""
    return in_order({(task.length, task.kind) for task in results.measured})


def in_order(cells: Iterable[Cell]) -> list[Cell]:
    """Sort tuples that begin with a length and a kind: by length, then by kind in the order of `KINDS`."""
    kinds = list(KINDS)
    return sorted(cells, key=lambda cell: (cell[0], kinds.index(cell[1])))


def share(answers: Iterable[Answer], measure: Measure) -> Share | None:
    """The share of answers that pass; None if there are none."""
    rights = [measure(answer) for answer in answers]
    return Share(sum(rights), len(rights)) if rights else None


def by_depth(answers: Sequence[Answer], measure: Measure) -> list[Share | None]:
    """The share for the definitions in each bucket."""
    return [share((answer for answer in answers if answer.bucket == bucket), measure) for bucket in range(BUCKETS)]


def difference(
    own: Asked, other: Asked, together: Iterable[Group], measure: Measure, *, bucket: int | None = None
) -> Mean | None:
    """Difference of the shares of questions, at one depth if a bucket is given, in samples that both have answered.

    The standard error is over samples, as questions of one sample are answered right or wrong together. None if there
    are no such questions.
    """
    together = list(together)
    samples, others = own.samples(together), other.samples(together)
    gains = [
        [
            measure(answer) - measure(others_answer)
            for answer, others_answer in zip(outcome.answers, others[sample].answers, strict=True)
            if bucket in (None, answer.bucket)
        ]
        for sample, outcome in samples.items()
        if sample in others
    ]
    gains = [sample_gains for sample_gains in gains if sample_gains]
    return Mean.of_ratio([*map(sum, gains)], [*map(len, gains)]) if gains else None


def failures(results: NeedleResults) -> list[tuple[NeedleTask, str]]:
    return [(task, outcome.error) for task, outcome in results.measured.items() if outcome.error]
