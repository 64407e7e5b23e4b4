"""Answers of a model to standard tasks, under one attention after another.

The results are one JSON file, replaced while samples are answered, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from muse_attention.sizes import format_size
from muse_lab.evaluation.tasks.benchmarks import BENCHMARKS, Benchmark, Data
from muse_lab.records.dataclass_json import entries
from muse_lab.records.stored_results import StoredResults


@dataclass(frozen=True)
class TaskSettings:
    """What all answers of a file have in common."""

    model: str
    """its name, and its shape in words"""
    harness: str
    """its name and version"""
    limit: int | None
    """samples of every task, at most"""
    device: str
    dtype: str
    fingerprint: str = ""
    """of the weights and the tokenizer"""


@dataclass(frozen=True)
class Answer:
    """To one sample; without scores if it failed."""

    index: int
    scores: dict[str, float] = field(default_factory=dict)
    """by metric"""
    tokens: int = 0
    """that went through the model at once"""
    is_cut: bool = False
    """whether the prompt is longer than the model's context, and lost its beginning"""
    response: str | None = None
    """what was generated; None where the model chooses"""
    error: str | None = None
    """why there are no scores"""


@dataclass
class TaskAnswers:
    """A task at one length, and its answers under every attention."""

    task: str
    length: int | None
    data: Data
    samples: int
    """to answer: all of the data, or the first of them"""
    answers: dict[str, dict[int, Answer]] = field(
        default_factory=dict,
        metadata=entries("attention", name="attentions", value="answers", of_values=entries("index")),
    )
    """by the full name of the attention, and by sample"""
    published: int = field(init=False)
    """samples that there would be"""

    def __post_init__(self) -> None:
        self.published = self.benchmark.published

    @property
    def benchmark(self) -> Benchmark:
        return BENCHMARKS[self.task]

    def scored(self, attention: str) -> list[Answer]:
        """In the order of the samples."""
        return sorted(
            (answer for answer in self.answers.get(attention, {}).values() if answer.error is None),
            key=lambda answer: answer.index,
        )

    def failed(self, attention: str) -> list[Answer]:
        return [answer for answer in self.answers.get(attention, {}).values() if answer.error is not None]

    def missing(self, attentions: Sequence[str]) -> list[tuple[int, str]]:
        """What is still to do: all attentions on one sample before the next, for any part to be a fair comparison."""
        done = {attention: {answer.index for answer in self.scored(attention)} for attention in attentions}
        return [(index, name) for index in range(self.samples) for name in attentions if index not in done[name]]


@dataclass
class TaskResults(StoredResults):
    command = "muse eval tasks"

    settings: TaskSettings
    cells: dict[tuple[str, int | None], TaskAnswers] = field(
        default_factory=dict, metadata=entries("task", "length", name="tasks")
    )
    """by task and length"""

    @property
    def named(self) -> list[str]:
        return [attention for cell in self.cells.values() for attention in cell.answers]

    def check(self) -> None:
        for cell in self.cells.values():
            scored = (answer for name in cell.answers for answer in cell.scored(name))
            if any(set(answer.scores) != set(cell.benchmark.metrics) for answer in scored):
                raise ValueError("the scores are not those of the task")

    @property
    def failed(self) -> int:
        """Samples, over all tasks and attentions."""
        return sum(len(cell.failed(attention)) for cell in self.cells.values() for attention in cell.answers)

    def failed_in(self, parts: Sequence[Part]) -> int:
        """Those of some parts alone."""
        cells = ((self.cells[part.benchmark.name, part.length], part.attentions) for part in parts)
        return sum(len(cell.failed(attention)) for cell, attentions in cells for attention in attentions)

    def is_finished(self, task: str, length: int | None, attentions: Sequence[str]) -> bool:
        cell = self.cells.get((task, length))
        return cell is not None and not cell.missing(attentions)

    def open_cell(self, task: str, length: int | None, data: Data, samples: int) -> TaskAnswers:
        """The cell of a task, new or begun before; a ValueError if it was begun with other data."""
        cell = self.cells.setdefault((task, length), TaskAnswers(task, length, data, samples))
        if cell.data.sha256 != data.sha256 or cell.samples != samples:
            raise ValueError(f"the data of {task} are not those of the answers there are; {self.remedy}")
        return cell


@dataclass(frozen=True)
class Part:
    """A task at one length, to be answered under these attentions, by their full names."""

    benchmark: Benchmark
    length: int | None
    attentions: tuple[str, ...]

    def __str__(self) -> str:
        return self.benchmark.name if self.length is None else f"{self.benchmark.name} at {format_size(self.length)}"


class TaskNotOpenedError(ValueError):
    """The samples of a task cannot be read or made."""


class AnswersTasks(Protocol):
    """A model behind a harness: opens a task, and answers one sample of what it opened."""

    def open(self, benchmark: Benchmark, length: int | None, folder: Path | None, limit: int | None) -> Any: ...
    def answer(self, opened: Any, index: int, attention: str) -> Answer: ...


OnStep = Callable[[str, int, int | None], None]
"""Told what begins, how many samples of a task are finished, and of how many."""


def measure(
    harness: AnswersTasks,
    parts: Sequence[Part],
    folder: Path | None,
    results: TaskResults,
    path: Path,
    *,
    on_step: OnStep = lambda description, finished, total: None,
    on_failure: Callable[[str], None] = lambda line: None,
) -> None:
    """Fill `results` with what is missing of `parts`, and write the file on the way.

    A sample that fails is recorded, and asked again when the run is continued; `on_failure` is told of each way to fail
    once for a task and an attention. A task that cannot be opened is a TaskNotOpenedError.
    """
    told: set[tuple[Part, str, str]] = set()
    with results.saving(path) as save:
        for part, index, attention, cell, opened in _missing(harness, parts, folder, results, on_step):
            try:
                answer = harness.answer(opened, index, attention)
            except Exception as error:  # the other samples may fare better
                line = f"{type(error).__name__}: {' '.join(str(error).split())}"
                answer = Answer(index, error=line)
                if (part, attention, line) not in told:
                    told.add((part, attention, line))
                    on_failure(f"{part}, sample {index + 1}, failed under {attention}: {line}")
            cell.answers.setdefault(attention, {})[index] = answer
            save()


def _missing(
    harness: AnswersTasks, parts: Sequence[Part], folder: Path | None, results: TaskResults, on_step: OnStep
) -> Iterator[tuple[Part, int, str, TaskAnswers, Any]]:
    """Tasks are opened one after another: making the samples of a long one takes a while."""
    for part in parts:
        if results.is_finished(part.benchmark.name, part.length, part.attentions):
            continue
        on_step(f"data of {part}", 0, None)
        try:
            opened = harness.open(part.benchmark, part.length, folder, results.settings.limit)
        except (ImportError, ValueError) as error:
            raise TaskNotOpenedError(str(error)) from error
        cell = results.open_cell(part.benchmark.name, part.length, opened.data, opened.samples)
        missing = cell.missing(part.attentions)
        for finished, (index, attention) in enumerate(missing):
            on_step(f"{part}, {attention}", finished, len(missing))
            yield part, index, attention, cell, opened
