"""Answers of a model to standard tasks, under one attention after another.

The results are one JSON file, replaced while samples are answered, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from muse_attention.declared_types import check_types
from muse_attention.evaluation.attentions import check_meaning, settings_of
from muse_attention.evaluation.settings import start_or_continue
from muse_attention.evaluation.tasks.benchmarks import BENCHMARKS, Benchmark, Data
from muse_attention.files import replace_file
from muse_attention.recorded_names import with_full_names
from muse_attention.sizes import format_size
from muse_attention.strict_json import parse_json

_SECONDS_BETWEEN_WRITES = 2.0


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
class Cell:
    """A task at one length, and its answers under every attention."""

    task: str
    length: int | None
    data: Data
    samples: int
    """to answer: all of the data, or the first of them"""
    answers: dict[str, dict[int, Answer]] = field(default_factory=dict)
    """by the full name of the attention, and by sample"""

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
class Results:
    machine: dict[str, Any]
    settings: TaskSettings
    commands: list[str] = field(default_factory=list)
    cells: dict[tuple[str, int | None], Cell] = field(default_factory=dict)
    """by task and length"""

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

    def open_cell(self, task: str, length: int | None, data: Data, samples: int) -> Cell:
        """The cell of a task, new or begun before; a ValueError if it was begun with other data."""
        cell = self.cells.setdefault((task, length), Cell(task, length, data, samples))
        if cell.data.sha256 != data.sha256 or cell.samples != samples:
            raise ValueError(
                f"cannot resume {task}: its data are not those of the answers there are; "
                "choose another --name, or drop --resume to start over"
            )
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


def start_results(settings: TaskSettings, path: Path, *, resume: bool) -> Results:
    """Empty results, or with `resume` those of the file if there is one; a ValueError if they cannot be continued."""
    return start_or_continue(settings, path, resume=resume, empty=Results, read=read_results)


def measure(
    harness: AnswersTasks,
    parts: Sequence[Part],
    folder: Path | None,
    results: Results,
    path: Path,
    *,
    on_step: OnStep = lambda description, finished, total: None,
    on_failure: Callable[[str], None] = lambda line: None,
) -> None:
    """Fill `results` with what is missing of `parts`, and write the file every few seconds, and whenever it ends.

    A sample that fails is recorded, and asked again when the run is resumed; `on_failure` is told of each way to fail
    once for a task and an attention. A task that cannot be opened is a TaskNotOpenedError.
    """
    written = time.monotonic()
    told: set[tuple[Part, str, str]] = set()
    try:
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
            if time.monotonic() - written > _SECONDS_BETWEEN_WRITES:
                write_results(results, path)
                written = time.monotonic()
    finally:
        if results.cells:
            write_results(results, path)


def _missing(
    harness: AnswersTasks, parts: Sequence[Part], folder: Path | None, results: Results, on_step: OnStep
) -> Iterator[tuple[Part, int, str, Cell, Any]]:
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


def write_results(results: Results, path: Path) -> None:
    document = {
        "machine": results.machine,
        "settings": asdict(results.settings),
        "commands": results.commands,
        "tasks": [_cell_to_json(cell) for cell in results.cells.values()],
    }
    replace_file(path, json.dumps(document) + "\n")


def read_results(path: Path) -> Results:
    """Read what `write_results` wrote; a ValueError if it is something else."""
    try:
        document = with_full_names(parse_json(path.read_bytes(), finite=False))
        cells = [_cell_from_json(entry) for entry in document["tasks"]]
        results = Results(
            machine=dict(document["machine"]),
            settings=TaskSettings(**document["settings"]),
            commands=list(document["commands"]),
            cells={(cell.task, cell.length): cell for cell in cells},
        )
        check_types(results)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not hold the results of muse eval tasks; choose another --name, or drop --resume to start "
            "over"
        ) from error
    for entry in document["tasks"]:
        for named in entry["attentions"]:
            check_meaning(named["attention"], named["config"])
    return results


def _cell_to_json(cell: Cell) -> dict[str, Any]:
    return {
        "task": cell.task,
        "length": cell.length,
        "published": cell.benchmark.published,
        "data": asdict(cell.data),
        "samples": cell.samples,
        "attentions": [
            {
                "attention": attention,
                "config": settings_of(attention),
                "answers": [asdict(answers[index]) for index in sorted(answers)],
            }
            for attention, answers in cell.answers.items()
        ],
    }


def _cell_from_json(entry: dict[str, Any]) -> Cell:
    cell = Cell(entry["task"], entry["length"], Data(**entry["data"]), int(entry["samples"]))
    metrics = set(cell.benchmark.metrics)
    for named in entry["attentions"]:
        answers = [Answer(**answer) for answer in named["answers"]]
        if any(answer.error is None and set(answer.scores) != metrics for answer in answers):
            raise ValueError("the scores are not those of the task")
        cell.answers[named["attention"]] = {answer.index: answer for answer in answers}
    return cell
