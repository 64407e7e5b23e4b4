"""Curves from the metrics of a training run: loss against tokens and seconds, speed, and what its probes measured."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from muse_lab.pretraining.monitoring.metrics import EXACT_END
from muse_lab.records.attention_names import EXACT

POINTS = 32
"""Largest number of points of a curve."""
UNSETTLED = 3
"""Updates after a change of the attention that do not count for speed: memory is allocated, kernels are compiled."""
_PROBES = {"rse", "answers_loss"}
"""Names in `metrics.jsonl` of what takes time beside the update."""


class Point(NamedTuple):
    """Means over a few updates."""

    tokens: float
    seconds: float
    loss: float


class Speed(NamedTuple):
    tokens_per_second: float
    """the median"""
    updates: int
    """over which it is taken"""


class Probe(NamedTuple):
    """Relative squared errors by layer, measured at an update."""

    tokens: int
    errors: dict[int, float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.errors.values())

    @property
    def worst(self) -> tuple[int, float]:
        """The layer with the largest error, and its error."""
        return max(self.errors.items(), key=lambda layer: layer[1])


class Answers(NamedTuple):
    """Nats for each token of a uid that had to be looked up, measured at an update."""

    tokens: int
    loss: float
    attention: str
    """of the update"""
    by_kind: dict[str, float] = {}  # noqa: RUF012
    """the same of first and of later tokens of uids, and by distance"""


class Evaluated(NamedTuple):
    """What was measured on held-out text at an update, under exact attention."""

    tokens: int
    values: dict[str, float]
    """by their names in `metrics.jsonl`, without the suffix that means exact"""


@dataclass(frozen=True)
class TrainingCurves:
    seconds: float
    """of all updates; not of probes, checkpoints and pauses"""
    averaged: int
    """updates behind a point; fewer behind the first"""
    points: tuple[Point, ...]
    speeds: dict[str, Speed]
    """by the attention of the update; none of an attention that had no time to settle"""
    probes: tuple[Probe, ...]
    answers: tuple[Answers, ...] = ()
    evaluations: tuple[Evaluated, ...] = ()

    @classmethod
    def of(cls, steps: Sequence[Mapping[str, Any]]) -> TrainingCurves:
        """Curves from the lines of `metrics.jsonl`. Updates without a finite loss, which were skipped, are left out."""
        steps = [step for step in steps if "loss" in step or "skipped" not in step]
        averaged = max(1, -(-len(steps) // POINTS))
        updates = list(_updates(steps))
        return cls(
            seconds=updates[-1].seconds if updates else 0.0,
            averaged=averaged,
            points=tuple(_averages(updates, averaged)),
            speeds=_speeds(steps),
            probes=tuple(
                Probe(step["tokens"], {int(layer): float(error) for layer, error in step["rse"].items()})
                for step in steps
                if step.get("rse")
            ),
            answers=tuple(
                Answers(step["tokens"], step["answers_loss"], step["attention"], step.get("answers", {}))
                for step in steps
                if "answers_loss" in step
            ),
            evaluations=tuple(
                Evaluated(step["tokens"], values)
                for step in steps
                if (values := _under_exact_attention(step.get("evaluation", {}), step["attention"]))
            ),
        )


def _updates(steps: Sequence[Mapping[str, Any]]) -> Iterable[Point]:
    """Loss and seconds at each update; seconds count updates alone, not pauses."""
    tokens, seconds = 0, 0.0
    for step in steps:
        seconds += (step["tokens"] - tokens) / step["tokens_per_second"]
        tokens = step["tokens"]
        yield Point(tokens, seconds, step["loss"])


def _averages(updates: Sequence[Point], averaged: int) -> Iterable[Point]:
    """Means over so many consecutive updates, counted from the last one, none of which is in two means."""
    first = len(updates) % averaged or averaged
    for end in range(first, len(updates) + 1, averaged):
        group = updates[max(0, end - averaged) : end]
        yield Point(*(statistics.fmean(values) for values in zip(*group, strict=True)))


def _speeds(steps: Sequence[Mapping[str, Any]]) -> dict[str, Speed]:
    by_attention: dict[str, list[float]] = {}
    for attention, group in itertools.groupby(steps, key=lambda step: step["attention"]):
        settled = [step["tokens_per_second"] for step in list(group)[UNSETTLED:] if not step.keys() & _PROBES]
        by_attention.setdefault(attention, []).extend(settled)
    return {name: Speed(statistics.median(speeds), len(speeds)) for name, speeds in by_attention.items() if speeds}


def _under_exact_attention(measured: Mapping[str, float], attention: str) -> dict[str, float]:
    end = "" if attention == EXACT else EXACT_END
    return {name.removesuffix(end): value for name, value in measured.items() if name.endswith(end)}
