"""Errors of attentions against exact attention on a model's own queries, keys and values: every head of every layer.

The results are one JSON file, replaced every few seconds, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muse_attention.baselines import exact_attention
from muse_attention.fidelity.error import FOUND, pool
from muse_attention.fidelity.error import measure as measure_fidelity
from muse_attention.fidelity.gradients import ExactGradients, measure_gradients
from muse_attention.registry import get_attention
from muse_lab.evaluation.settings import TextSettings
from muse_lab.models import PreTrainedModel
from muse_lab.records.dataclass_json import entries
from muse_lab.records.stored_results import OnStep, StoredResults, rounded
from muse_lab.report.fidelity_columns import COLUMNS, GRADIENTS

_DIGITS = 6

Heads = dict[str, list[float]]
"""The heads of a layer: their numbers, by measure."""


class FidelityRequest(NamedTuple):
    attention: str
    length: int


@dataclass
class FidelityResults(StoredResults):
    command = "muse fidelity"

    settings: TextSettings
    layers: list[int] = field(default_factory=list)
    """the layers that were measured, by number"""
    has_all_layers: bool = False
    """whether these are all: known when a sample was finished"""
    measured: dict[FidelityRequest, list[list[Heads]]] = field(
        default_factory=dict, metadata=entries("attention", "length", value="samples")
    )
    """the measures of each sample, layer by layer"""

    @property
    def named(self) -> list[str]:
        return [request.attention for request in self.measured]

    def is_whole(self, request: FidelityRequest, *, gradients: bool = False) -> bool:
        """Whether all samples and layers were measured; if `gradients`, those too."""
        return all(self.has_sample(request, sample, gradients=gradients) for sample in range(self.settings.samples))

    def has_sample(self, request: FidelityRequest, sample: int, *, gradients: bool = False) -> bool:
        samples = self.measured.get(request, [])
        if not (self.has_all_layers and sample < len(samples) and len(samples[sample]) == len(self.layers)):
            return False
        return not gradients or all(_has_gradients(heads) for heads in samples[sample])

    def measures(self, request: FidelityRequest) -> list[str]:
        """The measures that are known of all samples and layers."""
        heads = [layer for sample in self.measured[request] for layer in sample]
        return [column.measure for column in COLUMNS if all(column.measure in layer for layer in heads)]

    def by_head(self, request: FidelityRequest, measure: str) -> Tensor:
        """(layers, heads), averaged over samples."""
        by_sample = torch.tensor(
            [[layer[measure] for layer in sample] for sample in self.measured[request]], dtype=torch.float64
        )
        return by_sample.nanmean(0) if measure == FOUND else by_sample.mean(0)

    def pooled(self, request: FidelityRequest) -> dict[str, float]:
        """Each measure that is known, averaged over all samples, layers and heads."""
        return pool({measure: self.by_head(request, measure) for measure in self.measures(request)})

    @property
    def heads(self) -> int:
        """Heads of all layers."""
        first = next((request for request in self.measured if self.is_whole(request)), None)
        return 0 if first is None else self.by_head(first, COLUMNS[0].measure).numel()


def steps(model: PreTrainedModel, requests: Sequence[FidelityRequest], samples: int) -> int:
    """Layers that `measure` visits, if nothing is there yet."""
    return len({request.length for request in requests}) * samples * number_of_layers(model)


def number_of_layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


def measure(
    model: PreTrainedModel,
    tokens: Tensor,
    requests: Sequence[FidelityRequest],
    results: FidelityResults,
    path: Path,
    *,
    gradients: bool = False,
    on_step: OnStep = lambda description, finished: None,
) -> None:
    """Fill `results` with what is missing of `requests`, on (samples, length) tokens, and write it every few seconds.

    Shorter requests are measured on the beginning of each sample. If `gradients`, their errors are measured too.
    """
    from muse_attention.huggingface.capture import visit_layers  # here: transformers is not always installed

    finished = 0
    with results.saving(path) as save:
        for length in sorted({request.length for request in requests}, reverse=True):
            wanted = [request for request in dict.fromkeys(requests) if request.length == length]
            for sample, ids in enumerate(tokens):
                on_step(f"{length} tokens", finished)
                if not all(results.has_sample(request, sample, gradients=gradients) for request in wanted):
                    on_layer = functools.partial(_measure_layer, results, wanted, sample, gradients, save)

                    def visit(layer: int, *inputs: Any, on_layer: Any = on_layer, before: int = finished) -> None:
                        on_step(f"{inputs[0].shape[2]} tokens, layer {layer}", before + layer)
                        on_layer(layer, *inputs)

                    visit_layers(model, ids[None, :length], visit)
                    results.has_all_layers = True
                finished += number_of_layers(model)


def _measure_layer(
    results: FidelityResults,
    requests: Sequence[FidelityRequest],
    sample: int,
    gradients: bool,
    save: Callable[[], None],
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
) -> None:
    if layer not in results.layers:
        results.layers.append(layer)
    place = results.layers.index(layer)
    call: dict[str, Any] = {"is_causal": True, "scale": scale, "enable_gqa": True}
    exact: Any = None
    exact_gradients: ExactGradients | None = None
    for request in requests:
        attention = get_attention(request.attention)
        samples = results.measured.setdefault(request, [])
        while len(samples) <= sample:
            samples.append([])
        if len(samples[sample]) <= place:
            exact = exact or exact_attention(query, key, value, return_lse=True, **call)
            fidelity = measure_fidelity(attention, query, key, value, exact=exact, **call)
            samples[sample].append({name: rounded(tensor[0], _DIGITS) for name, tensor in fidelity.by_head().items()})
        if gradients and not _has_gradients(samples[sample][place]):
            exact_gradients = exact_gradients or ExactGradients.of(query, key, value, **call)
            errors = measure_gradients(attention, query, key, value, exact=exact_gradients, **call)
            samples[sample][place].update({name: rounded(tensor[0], _DIGITS) for name, tensor in vars(errors).items()})
        save()


def _has_gradients(heads: Heads) -> bool:
    return all(column.measure in heads for column in GRADIENTS)
