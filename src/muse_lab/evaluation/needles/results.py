"""Needle samples under one attention after another: one JSON file, from which an interrupted run goes on.

A sample that fails is kept with its error, and the others go on; a run that is continued tries it again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from muse_lab.evaluation.needles.scores import Answer, answer
from muse_lab.models import PreTrainedModel, PreTrainedTokenizerBase
from muse_lab.pretraining.needles.samples import BUCKETS, KINDS, NeedleSamples, Sample, check_kind
from muse_lab.records.dataclass_json import entries
from muse_lab.records.stored_results import OnStep, StoredResults


@dataclass(frozen=True)
class NeedleSettings:
    """Settings that all numbers of a file share."""

    model: str
    """its name, and its shape in words"""
    haystack: str
    """in words"""
    seed: int
    device: str
    dtype: str
    fingerprint: str = ""
    """of the weights and the haystack: models and texts that words do not tell apart"""
    version: int = 1
    """of the texts of needles"""

    @property
    def shape(self) -> str:
        """The model's shape in words, without its name."""
        return self.model.rpartition(" (")[2]

    @property
    def facts(self) -> tuple[str, str]:
        """For a report: the model and the haystack."""
        return (
            f"Model: {self.model}, {self.dtype}, on {self.device}",
            f"Haystack: {self.haystack}; seed {self.seed}",
        )


class NeedleTask(NamedTuple):
    """One sample under one attention."""

    number: int
    length: int
    kind: str
    bucket: int
    attention: str
    """by its full name"""


@dataclass(frozen=True)
class Outcome:
    """Answers to all questions of a sample, or why there are none."""

    answers: tuple[Answer, ...] = ()
    error: str = ""


by_task = functools.partial(entries, "number", "length", "kind", "bucket", "attention")
"""Metadata of what was measured, by task."""


@dataclass
class MeasuredSamples(StoredResults):
    """Measurements of needle samples, one under each attention. A subclass says what is measured."""

    settings: NeedleSettings
    measured: dict[NeedleTask, Any] = field(default_factory=dict)

    @property
    def named(self) -> Iterator[str]:
        return (task.attention for task in self.measured)

    @property
    def lengths(self) -> list[int]:
        return sorted({task.length for task in self.measured})

    def attentions(self, length: int) -> list[str]:
        """The attentions at a length, in the order they were measured."""
        return list(dict.fromkeys(task.attention for task in self.measured if task.length == length))

    def check(self) -> None:
        for task in self.measured:
            check_kind(task.kind)

    def missing(self, tasks: Iterable[NeedleTask]) -> list[NeedleTask]:
        """Tasks still to do."""
        return [task for task in tasks if task not in self.measured]


@dataclass
class NeedleResults(MeasuredSamples):
    command = "muse eval needles"

    measured: dict[NeedleTask, Outcome] = field(default_factory=dict, metadata=by_task(name="needles"))

    def check(self) -> None:
        for task, outcome in self.measured.items():
            if not outcome.error and len(outcome.answers) != KINDS[task.kind].asked:
                raise ValueError("the answers are not those of the kind")

    def missing(self, tasks: Iterable[NeedleTask]) -> list[NeedleTask]:
        """Tasks still to do, failed ones included."""
        return [task for task in tasks if task not in self.measured or self.measured[task].error]


def plan(
    attentions: Mapping[int, Sequence[str]], kinds: Mapping[int, Sequence[str]], samples_per_depth: int
) -> list[NeedleTask]:
    """Every length and depth, in the kinds and under the attentions of that length.

    All of them see a sample before the next, and all depths have one before any has two: any part is a fair comparison.
    """
    return [
        NeedleTask(number, length, kind, bucket, attention)
        for number in range(samples_per_depth)
        for length, names in attentions.items()
        for kind in kinds[length]
        for bucket in range(BUCKETS)
        for attention in names
    ]


def measure_samples(
    samples: NeedleSamples,
    tasks: Sequence[NeedleTask],
    results: MeasuredSamples,
    path: Path,
    measure_sample: Callable[[Sample, list[NeedleTask]], Iterable[object]],
    on_step: OnStep,
) -> None:
    """Fill `results` with what is missing of `tasks`, one sample after another. The file is written on the way.

    Args:
        measure_sample: returns a result for each task of a sample, in their order
    """
    finished = 0
    with results.saving(path) as save:
        for (number, length, kind, bucket), group in itertools.groupby(
            results.missing(tasks), key=lambda task: task[:4]
        ):
            on_step(f"{kind} of {length} tokens", finished)
            sample_tasks = list(group)
            measured = measure_sample(samples.make(kind, length, bucket, number), sample_tasks)
            for task, result in zip(sample_tasks, measured, strict=True):
                results.measured[task] = result
                save()
            finished += len(sample_tasks)


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: NeedleSamples,
    tasks: Sequence[NeedleTask],
    results: NeedleResults,
    path: Path,
    on_step: OnStep = lambda description, finished: None,
) -> None:
    """Fill `results` with what is missing of `tasks`. The file is written on the way."""
    with results.saving(path) as save:
        for finished, task in enumerate(results.missing(tasks)):
            on_step(f"{task.attention}, {task.kind} of {task.length} tokens", finished)
            results.measured[task] = _attempt(model, tokenizer, samples, task)
            save()


def _attempt(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: NeedleSamples, task: NeedleTask
) -> Outcome:
    try:
        sample = samples.make(task.kind, task.length, task.bucket, task.number)
        return Outcome(answer(model, tokenizer, sample, task.attention))
    except Exception as error:  # one sample of many: the others go on whatever it is
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # it may have run out of memory
    return Outcome(error=message)
