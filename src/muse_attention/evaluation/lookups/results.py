"""Lookups in needle samples, in every head of every layer of a model that attends exactly meanwhile.

The query is the token before the first uid that is asked for, the last of the prompt; the needle is the definition of
that uid. The results are one JSON file, from which an interrupted run goes on.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muse_attention.by_name import get_attention
from muse_attention.declared_types import check_types
from muse_attention.evaluation.attentions import check_meaning, settings_of
from muse_attention.evaluation.lookups.weight import Lookup, found_weight
from muse_attention.evaluation.needles.results import Settings, Task
from muse_attention.evaluation.needles.samples import KINDS, NeedleSamples, Sample
from muse_attention.evaluation.settings import OnStep, start_or_continue
from muse_attention.files import replace_file
from muse_attention.recording import recorded_calls
from muse_attention.strict_json import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SECONDS_BETWEEN_WRITES = 5.0


@dataclass(frozen=True)
class Found:
    """Of one sample under one attention: of every layer, of every head, what `Lookup` has."""

    weight: list[list[float]]
    found: list[list[float]]
    exact: list[list[float]]
    pairs: list[list[int]]


@dataclass
class Results:
    machine: dict[str, Any]
    settings: Settings
    commands: list[str] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    """the layers that were measured, by number"""
    lookups: dict[Task, Found] = field(default_factory=dict)

    def missing(self, tasks: Iterable[Task]) -> list[Task]:
        return [task for task in tasks if task not in self.lookups]


def start_results(settings: Settings, path: Path, *, resume: bool) -> Results:
    """Empty results, or with `resume` those of the file if there is one; a ValueError if they cannot be continued."""
    return start_or_continue(settings, path, resume=resume, empty=Results, read=read_results)


def measure(
    model: PreTrainedModel,
    samples: NeedleSamples,
    tasks: Sequence[Task],
    results: Results,
    path: Path,
    *,
    on_step: OnStep = lambda description, finished: None,
) -> None:
    """Fill `results` with what is missing of `tasks`: the model reads each sample once, for all attentions.

    The file is written every few seconds, and whatever ends the run.
    """
    written, finished = time.monotonic(), 0
    try:
        for (number, length, kind, bucket), group in itertools.groupby(results.missing(tasks), key=_sample_of):
            of_sample = list(group)
            on_step(f"{kind} of {length} tokens", finished)
            sample = samples.make(kind, length, bucket, number)
            _look_up(model, sample, of_sample, results)
            finished += len(of_sample)
            if time.monotonic() - written > _SECONDS_BETWEEN_WRITES:
                write_results(results, path)
                written = time.monotonic()
    finally:
        if finished:
            write_results(results, path)


def _sample_of(task: Task) -> tuple[int, int, str, int]:
    return task.number, task.length, task.kind, task.bucket


def _look_up(model: PreTrainedModel, sample: Sample, tasks: Sequence[Task], results: Results) -> None:
    from muse_attention.capture import visit_layers  # here, for commands without a model to need no transformers

    found: list[list[Lookup]] = [[] for _ in tasks]
    layers: list[int] = []

    def visit(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        layers.append(layer)
        for task, of_task in zip(tasks, found, strict=True):
            of_task.append(_look_up_in_layer(task.attention, sample, query, key, value, scale))

    visit_layers(model, torch.from_numpy(sample.prompt)[None], visit)
    if not layers:
        raise ValueError("every layer of this model has a window, so that no attention changes it; use another model")
    results.layers = layers
    for task, of_task in zip(tasks, found, strict=True):
        results.lookups[task] = Found(
            [_rounded(lookup.weight[0]) for lookup in of_task],
            [_rounded(lookup.found[0]) for lookup in of_task],
            [_rounded(lookup.exact[0]) for lookup in of_task],
            [lookup.pairs[0].tolist() for lookup in of_task],
        )


def _look_up_in_layer(
    attention: str, sample: Sample, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Lookup:
    with recorded_calls() as calls:
        get_attention(attention)(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    (call,) = calls
    return found_weight(
        query, key, call.clusters, call.selection, call.config, query.shape[2] - 1, sample.questions[0].definition,
        scale=scale,
    )  # fmt: skip


def _rounded(numbers: Tensor) -> list[float]:
    """To four digits: files stay small."""
    return [float(f"{number:.4g}") for number in numbers.tolist()]


def write_results(results: Results, path: Path) -> None:
    attentions = dict.fromkeys(task.attention for task in results.lookups)
    document = {
        "machine": results.machine,
        "settings": asdict(results.settings),
        "commands": results.commands,
        "layers": results.layers,
        "attentions": [{"attention": name, "config": settings_of(name)} for name in attentions],
        "lookups": [asdict(task) | asdict(found) for task, found in results.lookups.items()],
    }
    replace_file(path, json.dumps(document) + "\n")


def read_results(path: Path) -> Results:
    """Read what `write_results` wrote; a ValueError if it is something else."""
    try:
        document = parse_json(path.read_bytes(), finite=False)
        results = Results(
            machine=dict(document["machine"]),
            settings=Settings(**document["settings"]),
            commands=list(document["commands"]),
            layers=list(document["layers"]),
            lookups=dict(map(_entry_from_json, document["lookups"])),
        )
        check_types(results)
        configs = [(entry["attention"], entry["config"]) for entry in document["attentions"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not hold the results of muse eval needles --lookups; choose another --name, or drop --resume "
            "to start over"
        ) from error
    for attention, config in configs:
        check_meaning(attention, config)
    return results


def _entry_from_json(entry: dict[str, Any]) -> tuple[Task, Found]:
    task = Task(**{name: entry[name] for name in ("number", "length", "kind", "bucket", "attention")})
    if task.kind not in KINDS:
        raise ValueError("there is no such kind of samples")
    return task, Found(entry["weight"], entry["found"], entry["exact"], entry["pairs"])
