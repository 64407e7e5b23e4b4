"""What the answers of needle samples say: shares, by depth, and differences of two."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from muse_attention.evaluation.means import Mean, Share
from muse_attention.evaluation.needles.results import NeedleResults, NeedleTask, Outcome
from muse_attention.evaluation.needles.scores import Answer
from muse_attention.pretraining.needles.samples import BUCKETS, KINDS

Measure = Callable[[Answer], bool]
is_exact: Measure = operator.attrgetter("is_exact")
is_preferred: Measure = operator.attrgetter("is_preferred")

Group = tuple[int, str]
"""A length and a kind."""
Cell = TypeVar("Cell", bound=tuple[Any, ...])


class Tokens(NamedTuple):
    """Means over the tokens of uids, each given the right ones before it."""

    right: float
    """share of those that are the most probable"""
    rank: float
    """how many tokens are more probable"""


class Asked(NamedTuple):
    """A model, by its results, and the attention that read the prompts."""

    results: NeedleResults
    attention: str

    def samples(self, found: Iterable[Group]) -> dict[tuple[int, str, int, int], Outcome]:
        """What was answered, by length, kind, bucket and number of the sample."""
        wanted = set(found)
        return {
            (task.length, task.kind, task.bucket, task.number): outcome
            for task, outcome in self.results.outcomes.items()
            if task.attention == self.attention and (task.length, task.kind) in wanted and outcome.answers
        }

    def answers(self, found: Iterable[Group]) -> list[Answer]:
        return [answer for outcome in self.samples(found).values() for answer in outcome.answers]


def groups(results: NeedleResults) -> list[Group]:
    """Those there are, in order."""
    return in_order({(task.length, task.kind) for task in results.outcomes})


def in_order(found: Iterable[Cell]) -> list[Cell]:
    """Of tuples that begin with a length and a kind: by length, and by kind as they are listed."""
    kinds = list(KINDS)
    return sorted(found, key=lambda group: (group[0], kinds.index(group[1])))


def attentions(results: NeedleResults, group: Group) -> list[str]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(task.attention for task in results.outcomes if (task.length, task.kind) == group))


def share(found: Iterable[Answer], measure: Measure) -> Share | None:
    """None if there are no answers."""
    rights = [measure(answer) for answer in found]
    return Share(sum(rights), len(rights)) if rights else None


def by_depth(found: Sequence[Answer], measure: Measure) -> list[Share | None]:
    """Of the definitions in each bucket."""
    return [share((answer for answer in found if answer.bucket == bucket), measure) for bucket in range(BUCKETS)]


def difference(own: Asked, other: Asked, group: Group, measure: Measure) -> Mean | None:
    """Of shares, over the samples that both have answered; None if there are none."""
    samples, others = own.samples([group]), other.samples([group])
    shares = [
        (_mean(outcome, measure), _mean(others[sample], measure))
        for sample, outcome in samples.items()
        if sample in others
    ]
    return Mean.of_differences(*zip(*shares, strict=True)) if shares else None


def token_means(found: Iterable[Answer]) -> Tokens | None:
    ranks = [rank for answer in found for rank in answer.ranks]
    if not ranks:
        return None
    return Tokens(statistics.fmean(rank == 0 for rank in ranks), statistics.fmean(ranks))


def failures(results: NeedleResults) -> list[tuple[NeedleTask, str]]:
    return [(task, outcome.error) for task, outcome in results.outcomes.items() if outcome.error]


def _mean(outcome: Outcome, measure: Measure) -> float:
    return statistics.fmean(map(measure, outcome.answers))
