"""Lookups in needle samples, in every head of every layer of a model that reads with exact attention.

The query is the token before the first uid that is asked for, the last of the prompt; the needle is the definition of
that uid. The results are one JSON file, from which an interrupted run goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from muse_attention.fidelity.lookups import Lookup, look_up
from muse_attention.registry import get_attention
from muse_lab.evaluation.needles.results import MeasuredSamples, NeedleTask, by_task, measure_samples
from muse_lab.models import PreTrainedModel
from muse_lab.pretraining.needles.samples import NeedleSamples, Sample
from muse_lab.records.stored_results import OnStep, rounded

_DIGITS = 4


@dataclass(frozen=True)
class Found:
    """One sample under one attention: the fields of `Lookup`, by layer and head."""

    weight: list[list[float]]
    found: list[list[float]]
    exact: list[list[float]]
    pairs: list[list[int]]


@dataclass
class LookupResults(MeasuredSamples):
    command = "muse eval needles --lookups"

    measured: dict[NeedleTask, Found] = field(default_factory=dict, metadata=by_task(name="lookups"))
    layers: list[int] = field(default_factory=list)
    """the layers that were measured, by number"""


def measure(
    model: PreTrainedModel,
    samples: NeedleSamples,
    tasks: Sequence[NeedleTask],
    results: LookupResults,
    path: Path,
    on_step: OnStep = lambda description, finished: None,
) -> None:
    """Fill `results` with what is missing of `tasks`: the model reads each sample once, for all attentions."""

    def measure_sample(sample: Sample, sample_tasks: list[NeedleTask]) -> list[Found]:
        results.layers, lookups = _look_up(model, sample, [task.attention for task in sample_tasks])
        return lookups

    measure_samples(samples, tasks, results, path, measure_sample, on_step)


def _look_up(model: PreTrainedModel, sample: Sample, attentions: Sequence[str]) -> tuple[list[int], list[Found]]:
    """The layers, and the lookups of each attention in them."""
    from muse_attention.huggingface.capture import visit_layers  # here: transformers is not always installed

    place = (len(sample.prompt) - 1, sample.questions[0].definition)
    layers: dict[int, list[Lookup]] = {}

    def visit(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        layers[layer] = [
            lookup
            for name in attentions
            for lookup in look_up(get_attention(name), query, key, value, [place], scale=scale, enable_gqa=True)
        ]

    visit_layers(model, torch.from_numpy(sample.prompt)[None], visit)
    by_attention = [
        Found(
            [rounded(lookup.weight[0], _DIGITS) for lookup in lookups],
            [rounded(lookup.found[0], _DIGITS) for lookup in lookups],
            [rounded(lookup.exact[0], _DIGITS) for lookup in lookups],
            [lookup.pairs[0].tolist() for lookup in lookups],
        )
        for lookups in zip(*layers.values(), strict=True)
    ]
    return list(layers), by_attention
