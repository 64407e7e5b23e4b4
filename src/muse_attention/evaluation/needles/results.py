"""Needle samples under one attention after another: one JSON file, from which an interrupted run goes on.

A sample that fails is kept with its error, and the others go on; a run that is resumed tries it again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from muse_attention.declared_types import check_types
from muse_attention.evaluation.attentions import check_meaning, settings_of
from muse_attention.evaluation.needles.samples import BUCKETS, KINDS, NeedleSamples
from muse_attention.evaluation.needles.scores import Answer, answer
from muse_attention.evaluation.settings import OnStep, start_or_continue
from muse_attention.files import replace_file
from muse_attention.recorded_names import with_full_names
from muse_attention.strict_json import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SECONDS_BETWEEN_WRITES = 1.0


@dataclass(frozen=True)
class Settings:
    """What all numbers of a file have in common."""

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


@dataclass(frozen=True, order=True)
class Task:
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


@dataclass
class Results:
    machine: dict[str, Any]
    settings: Settings
    commands: list[str] = field(default_factory=list)
    outcomes: dict[Task, Outcome] = field(default_factory=dict)

    def missing(self, tasks: Iterable[Task]) -> list[Task]:
        """What is still to do, what failed included."""
        return [task for task in tasks if task not in self.outcomes or self.outcomes[task].error]


def plan(
    attentions: Mapping[int, Sequence[str]], kinds: Mapping[int, Sequence[str]], samples_per_depth: int
) -> list[Task]:
    """Every length and depth, in the kinds and under the attentions of that length.

    All of them see a sample before the next, and all depths have one before any has two: any part is a fair comparison.
    """
    return [
        Task(number, length, kind, bucket, attention)
        for number in range(samples_per_depth)
        for length, names in attentions.items()
        for kind in kinds[length]
        for bucket in range(BUCKETS)
        for attention in names
    ]


def start_results(settings: Settings, path: Path, *, resume: bool) -> Results:
    """Empty results, or with `resume` those of the file if there is one; a ValueError if they cannot be continued."""
    return start_or_continue(settings, path, resume=resume, empty=Results, read=read_results)


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: NeedleSamples,
    tasks: Sequence[Task],
    results: Results,
    path: Path,
    *,
    on_step: OnStep = lambda description, finished: None,
) -> None:
    """Fill `results` with what is missing of `tasks`. The file is written once a second, and whatever ends the run."""
    written = time.monotonic()
    try:
        for finished, task in enumerate(results.missing(tasks)):
            on_step(f"{task.attention}, {task.kind} of {task.length} tokens", finished)
            results.outcomes[task] = _attempt(model, tokenizer, samples, task)
            if time.monotonic() - written > _SECONDS_BETWEEN_WRITES:
                write_results(results, path)
                written = time.monotonic()
    finally:
        if results.outcomes:
            write_results(results, path)


def _attempt(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: NeedleSamples, task: Task) -> Outcome:
    try:
        sample = samples.make(task.kind, task.length, task.bucket, task.number)
        return Outcome(answer(model, tokenizer, sample, task.attention))
    except Exception as error:  # one sample of many: whatever it is, the others go on
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # too little memory may be what it was
    return Outcome(error=message)


def write_results(results: Results, path: Path) -> None:
    attentions = dict.fromkeys(task.attention for task in results.outcomes)
    document = {
        "machine": results.machine,
        "settings": asdict(results.settings),
        "commands": results.commands,
        "attentions": [{"attention": name, "config": settings_of(name)} for name in attentions],
        "needles": [asdict(task) | asdict(outcome) for task, outcome in results.outcomes.items()],
    }
    replace_file(path, json.dumps(document) + "\n")


def read_results(path: Path) -> Results:
    """Read what `write_results` wrote; a ValueError if it is something else."""
    try:
        document = with_full_names(parse_json(path.read_bytes(), finite=False))
        results = Results(
            machine=dict(document["machine"]),
            settings=Settings(**document["settings"]),
            commands=list(document["commands"]),
            outcomes=dict(map(_entry_from_json, document["needles"])),
        )
        check_types(results)
        configs = [(entry["attention"], entry["config"]) for entry in document["attentions"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not hold the results of muse eval needles; choose another --name, or drop --resume to start "
            "over"
        ) from error
    for attention, config in configs:
        check_meaning(attention, config)
    return results


def _entry_from_json(entry: dict[str, Any]) -> tuple[Task, Outcome]:
    answers = tuple(Answer(**{**found, "ranks": tuple(found["ranks"])}) for found in entry["answers"])
    task = Task(**{name: entry[name] for name in ("number", "length", "kind", "bucket", "attention")})
    if task.kind not in KINDS or (not entry["error"] and len(answers) != KINDS[task.kind].asked):
        raise ValueError("the answers are not those of the kind")
    return task, Outcome(answers, entry["error"])
