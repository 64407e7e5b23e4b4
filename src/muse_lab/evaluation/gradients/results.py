"""The gradient of a model's weights for the answers of needle samples, under an attention and under exact attention.

The loss is the mean cross-entropy of all tokens of the uids that a sample asks for, each given the right ones before
it, as in training. The results are one JSON file, from which an interrupted run goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from muse_attention.core.precision import compute_dtype
from muse_lab.evaluation.needles.results import MeasuredSamples, NeedleTask, by_task, measure_samples
from muse_lab.models import PreTrainedModel
from muse_lab.pretraining.needles.samples import NeedleSamples, Sample
from muse_lab.records.attention_names import EXACT
from muse_lab.records.stored_results import OnStep

_QUERIES_AND_KEYS = ("q_proj", "k_proj")
"""Parts of the names of weights that make queries and keys; models that name them otherwise have none."""
_DIGITS = 6


@dataclass(frozen=True)
class Products:
    """Products of two gradients of the same weights, an attention's and exact attention's."""

    square: float
    """the squared norm of the attention's"""
    exact_square: float
    product: float


@dataclass(frozen=True)
class Gradients:
    """Gradients of one sample under one attention."""

    loss: float
    """in nats for each token of a uid"""
    exact_loss: float
    all_weights: Products
    queries_and_keys: Products
    """of the projections that make them; zeros if no weights are named so"""


@dataclass
class GradientResults(MeasuredSamples):
    command = "muse eval needles --gradients"
    is_finite = True

    measured: dict[NeedleTask, Gradients] = field(default_factory=dict, metadata=by_task(name="gradients"))


def measure(
    model: PreTrainedModel,
    samples: NeedleSamples,
    tasks: Sequence[NeedleTask],
    results: GradientResults,
    path: Path,
    on_step: OnStep = lambda description, finished: None,
) -> None:
    """Fill `results` with what is missing of `tasks`; exact attention is differentiated once for each sample."""

    def measure_sample(sample: Sample, sample_tasks: list[NeedleTask]) -> Iterator[Gradients]:
        exact = differentiate(model, sample, EXACT)
        for task in sample_tasks:
            yield _compare(differentiate(model, sample, task.attention), exact)

    measure_samples(samples, tasks, results, path, measure_sample, on_step)


def differentiate(model: PreTrainedModel, sample: Sample, attention: str) -> tuple[float, dict[str, Tensor]]:
    """The loss of the answers of a sample, and its gradient, by the name of the weights.

    Raises ValueError if one of them is not a finite number.
    """
    from muse_attention.huggingface import use_attention

    tokens = torch.from_numpy(sample.tokens).to(model.device)
    answered = torch.tensor([place for question in sample.questions for place in question.answer], device=model.device)
    model.zero_grad(set_to_none=True)
    with use_attention(model, attention), torch.enable_grad():
        logits = model(tokens[None], use_cache=False, logits_to_keep=answered - 1).logits[0]
        loss = cross_entropy(logits.to(compute_dtype(logits.dtype)), tokens[answered])
        loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    if not math.isfinite(loss.item()) or not all(gradient.isfinite().all() for gradient in gradients.values()):
        raise ValueError(
            f"the loss under {attention}, or its gradient, is not a finite number in {model.dtype}; use another dtype"
        )
    return loss.item(), gradients


def _compare(own: tuple[float, Mapping[str, Tensor]], exact: tuple[float, Mapping[str, Tensor]]) -> Gradients:
    (loss, own_gradients), (exact_loss, exact_gradients) = own, exact
    shared = [name for name in own_gradients if name in exact_gradients]
    projections = [name for name in shared if any(part in name.split(".") for part in _QUERIES_AND_KEYS)]
    products = (_products(own_gradients, exact_gradients, names) for names in (shared, projections))
    return Gradients(_rounded(loss), _rounded(exact_loss), *products)


def _products(own: Mapping[str, Tensor], exact: Mapping[str, Tensor], names: Sequence[str]) -> Products:
    pairs = ((own, own), (exact, exact), (own, exact))
    sums = (sum(float((one[name].double() * other[name].double()).sum()) for name in names) for one, other in pairs)
    return Products(*map(_rounded, sums))


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")
