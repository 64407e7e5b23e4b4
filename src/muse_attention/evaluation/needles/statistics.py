"""What the answers of needle samples say: shares, by depth, and differences of two."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from muse_attention.evaluation.means import Mean, Share
from muse_attention.evaluation.needles.results import NeedleResults, NeedleTask, Outcome
from muse_attention.evaluation.needles.scores import Answer
from muse_attention.pretraining.needles.samples import BUCKETS, KINDS

Measure = Callable[[Answer], bool]


def is_exact(answer: Answer) -> bool:
    return answer.is_exact


def is_preferred(answer: Answer) -> bool:
    return answer.is_preferred


class Tokens(NamedTuple):
    """Means over the tokens of uids, each given the right ones before it."""

    right: float
    """share of those that are the most probable"""
    rank: float
    """how many tokens are more probable"""


def groups(results: NeedleResults) -> list[tuple[int, str]]:
    """The (length, kind) there are, in order."""
    found = {(task.length, task.kind) for task in results.outcomes}
    order = list(KINDS)
    return sorted(found, key=lambda group: (group[0], order.index(group[1])))


def attentions(results: NeedleResults, length: int, kind: str) -> list[str]:
    """In the order in which they were measured."""
    return list(
        dict.fromkeys(task.attention for task in results.outcomes if (task.length, task.kind) == (length, kind))
    )


def answers(results: NeedleResults, length: int, kind: str, attention: str) -> list[Answer]:
    return [answer for outcome in by_sample(results, length, kind, attention).values() for answer in outcome.answers]


def by_sample(results: NeedleResults, length: int, kind: str, attention: str) -> dict[tuple[int, int], Outcome]:
    """What was answered, by bucket and number of the sample."""
    return {
        (task.bucket, task.number): outcome
        for task, outcome in results.outcomes.items()
        if (task.length, task.kind, task.attention) == (length, kind, attention) and outcome.answers
    }


def share(found: Iterable[Answer], measure: Measure) -> Share | None:
    """None if there are no answers."""
    rights = [measure(answer) for answer in found]
    return Share(sum(rights), len(rights)) if rights else None


def by_depth(found: Sequence[Answer], measure: Measure) -> list[Share | None]:
    """Of the definitions in each bucket."""
    return [share((answer for answer in found if answer.bucket == bucket), measure) for bucket in range(BUCKETS)]


def against_exact(results: NeedleResults, length: int, kind: str, attention: str, measure: Measure) -> Mean | None:
    """Share of an attention less that of exact attention."""
    own, exact = (by_sample(results, length, kind, name) for name in (attention, "exact"))
    return difference(own, exact, measure)


def difference(
    own: Mapping[tuple[int, int], Outcome], other: Mapping[tuple[int, int], Outcome], measure: Measure
) -> Mean | None:
    """Of shares, over the samples that both have answered; None if there are none."""
    shares = [
        (_mean(outcome, measure), _mean(other[sample], measure)) for sample, outcome in own.items() if sample in other
    ]
    return Mean.of_differences(*zip(*shares, strict=True)) if shares else None


def token_means(found: Iterable[Answer]) -> Tokens | None:
    ranks = [rank for answer in found for rank in answer.ranks]
    if not ranks:
        return None
    return Tokens(statistics.fmean(rank == 0 for rank in ranks), statistics.fmean(ranks))


def failures(results: NeedleResults) -> list[tuple[NeedleTask, str]]:
    return [(task, outcome.error) for task, outcome in results.outcomes.items() if outcome.error]


def samples_of(results: NeedleResults, length: int, kinds: Iterable[str], attention: str) -> list[Outcome]:
    """What was answered, in several kinds together."""
    return [outcome for kind in kinds for outcome in by_sample(results, length, kind, attention).values()]


def _mean(outcome: Outcome, measure: Measure) -> float:
    return statistics.fmean(map(measure, outcome.answers))
