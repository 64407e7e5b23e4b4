"""Lookups in needle samples, in every head of every layer of a model that attends exactly meanwhile.

The query is the token before the first uid that is asked for, the last of the prompt; the needle is the definition of
that uid. The results are one JSON file, from which an interrupted run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muse_attention.fidelity.lookups import Lookup, look_up
from muse_attention.registry import get_attention
from muse_lab.evaluation.needles.results import MeasuredSamples, NeedleTask, by_sample
from muse_lab.pretraining.needles.samples import NeedleSamples, Sample
from muse_lab.records.dataclass_json import entries
from muse_lab.records.stored_results import OnStep, rounded

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_DIGITS = 4


@dataclass(frozen=True)
class Found:
    """Of one sample under one attention: of every layer, of every head, what `Lookup` has."""

    weight: list[list[float]]
    found: list[list[float]]
    exact: list[list[float]]
    pairs: list[list[int]]


@dataclass
class LookupResults(MeasuredSamples):
    command = "muse eval needles --lookups"

    layers: list[int] = field(default_factory=list)
    """the layers that were measured, by number"""
    lookups: dict[NeedleTask, Found] = field(
        default_factory=dict, metadata=entries("number", "length", "kind", "bucket", "attention")
    )

    @property
    def measured(self) -> Mapping[NeedleTask, Found]:
        return self.lookups


def measure(
    model: PreTrainedModel,
    samples: NeedleSamples,
    tasks: Sequence[NeedleTask],
    results: LookupResults,
    path: Path,
    *,
    on_step: OnStep = lambda description, finished: None,
) -> None:
    """Fill `results` with what is missing of `tasks`: the model reads each sample once, for all attentions.

    The file is written on the way.
    """
    finished = 0
    with results.saving(path) as save:
        for sample, of_sample in by_sample(samples, results.missing(tasks)):
            on_step(f"{sample.kind} of {len(sample.tokens)} tokens", finished)
            _look_up(model, sample, of_sample, results)
            finished += len(of_sample)
            save()


def _look_up(model: PreTrainedModel, sample: Sample, tasks: Sequence[NeedleTask], results: LookupResults) -> None:
    from muse_attention.huggingface.capture import (  # here: only commands with a model need transformers
        NO_LAYERS,
        visit_layers,
    )

    place = (len(sample.prompt) - 1, sample.questions[0].definition)
    found: list[list[Lookup]] = [[] for _ in tasks]
    layers: list[int] = []

    def visit(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        layers.append(layer)
        for task, of_task in zip(tasks, found, strict=True):
            of_task += look_up(get_attention(task.attention), query, key, value, [place], scale=scale, enable_gqa=True)

    visit_layers(model, torch.from_numpy(sample.prompt)[None], visit)
    if not layers:
        raise ValueError(NO_LAYERS)
    results.layers = layers
    for task, of_task in zip(tasks, found, strict=True):
        results.lookups[task] = Found(
            [rounded(lookup.weight[0], _DIGITS) for lookup in of_task],
            [rounded(lookup.found[0], _DIGITS) for lookup in of_task],
            [rounded(lookup.exact[0], _DIGITS) for lookup in of_task],
            [lookup.pairs[0].tolist() for lookup in of_task],
        )
