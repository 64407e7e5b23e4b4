"""The loss of a model at every position of long texts, under one attention after another, and what each costs in loss.

The results are one JSON file, replaced after every sample of every attention, so that an interrupted run goes on where
it stopped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from muse_attention.config import MuSeConfig
from muse_attention.core.precision import compute_dtype
from muse_lab.evaluation.settings import TextSettings
from muse_lab.models import PreTrainedModel
from muse_lab.records.attention_names import EXACT
from muse_lab.records.dataclass_json import entries
from muse_lab.records.means import Mean
from muse_lab.records.stored_results import OnStep, StoredResults

_POSITIONS_AT_ONCE = 512
"""Positions whose logits are in memory at the same time."""
_TOKENS_CHECKED = 16
Cost = Callable[[str], Mean]
"""The cost of an attention by name: the loss under it minus that under exact attention, in nats."""


@dataclass(frozen=True)
class Ending:
    """One sample under one attention, before a position after which its text was replaced.

    Each is a list of means between powers of two of the position, as of `curves.bins_of`.
    """

    losses: list[float]
    """in nats, before the text was replaced"""
    other_losses: list[float]
    """of the same tokens, with another text after them"""
    errors: list[float]
    """relative squared errors of the attention, before the text was replaced"""
    other_errors: list[float]


@dataclass
class Losses:
    """The losses of one attention, in nats, over the samples so far."""

    means: list[float] = field(default_factory=list)
    """of each sample, the mean over positions"""
    sums: list[float] = field(default_factory=list)
    """losses of the token that follows each position, summed over samples"""
    endings: dict[int, list[Ending]] = field(default_factory=dict, metadata=entries("position", value="samples"))
    """of each sample, by the position after which the text was replaced"""

    def add(self, losses: Tensor) -> None:
        """Add the losses of a sample, (length - 1), float64."""
        self.sums = (
            losses.tolist() if not self.sums else (torch.tensor(self.sums, dtype=torch.float64) + losses).tolist()
        )
        self.means.append(float(losses.mean()))

    @property
    def by_position(self) -> Tensor:
        """(length - 1), float64, averaged over samples."""
        return torch.tensor(self.sums, dtype=torch.float64) / len(self.means)


@dataclass
class LossResults(StoredResults):
    command = "muse loss"
    is_finite = True

    settings: TextSettings
    losses: dict[str, Losses] = field(default_factory=dict, metadata=entries("attention"))
    """by the full name of the attention"""

    @property
    def named(self) -> list[str]:
        return list(self.losses)

    def check(self) -> None:
        for losses in self.losses.values():
            if len(losses.sums) != self.settings.length - 1 or not 1 <= len(losses.means) <= self.settings.samples:
                raise ValueError("the numbers are not those of the settings")
            for position, endings in losses.endings.items():
                if not 2 <= position < self.settings.length:
                    raise ValueError("the position of another ending is not inside a sample")
                bins = {len(means) for ending in endings for means in vars(ending).values()}
                if bins != {max(1, (position - 2).bit_length())} or len(endings) > self.settings.samples:
                    raise ValueError("the numbers of another ending are not those of the settings")

    @property
    def whole(self) -> list[str]:
        """The attentions that have seen every sample."""
        return [name for name, losses in self.losses.items() if len(losses.means) == self.settings.samples]

    def missing(self, attentions: Sequence[str], position: int | None = None) -> list[tuple[int, str]]:
        """(sample, attention) still to measure: all attentions on one sample before the next, so that any part is fair.

        With a position, those missing in `Losses.endings` there.
        """
        done = {
            name: len(losses.means if position is None else losses.endings.get(position, []))
            for name, losses in self.losses.items()
        }
        samples = range(self.settings.samples)
        return [(sample, name) for sample in samples for name in attentions if done.get(name, 0) <= sample]


def figure_attentions(length: int) -> tuple[str, ...]:
    """The attentions of the paper's Llama figure, around `MuSeConfig.paper_sizes`.

    Exact attention; MuSe with half, all, twice and four times the clusters, a sixteenth of them opened; one query
    cluster, tilted; and no tilt.
    """
    base = MuSeConfig.paper_sizes(length)
    clusters = base.key_clusters
    configs = [
        base.replace(query_clusters=number, key_clusters=number, retrieved_clusters=max(1, number // 16))
        for number in (clusters // 2, clusters, 2 * clusters, 4 * clusters)
    ]
    configs += [base.replace(query_clusters=1), base.replace(tilt=False)]
    return ("exact", *(f"muse:{config}" for config in configs))


def measure(
    model: PreTrainedModel,
    tokens: Tensor,
    attentions: Sequence[str],
    results: LossResults,
    path: Path,
    *,
    on_step: OnStep = lambda description, finished: None,
) -> None:
    """Fill `results` with what is missing of `attentions`, by full names, on (samples, length) tokens.

    The file is written after every sample of every attention.
    """
    check_model(model, tokens)
    for finished, (sample, attention) in enumerate(results.missing(attentions)):
        on_step(f"{attention}, sample {sample + 1} of {len(tokens)}", finished)
        losses = finite_losses(model, tokens[sample], attention)
        results.losses.setdefault(attention, Losses()).add(losses)
        results.write(path)


def cost_on(model: PreTrainedModel, tokens: Tensor) -> Cost:
    """The costs on (samples, length) tokens.

    Exact attention is measured once, at the first call. Raises ValueError if the loss cannot be measured.
    """
    check_model(model, tokens)

    @functools.cache
    def losses(attention: str) -> list[float]:
        return [float(finite_losses(model, ids, attention).mean()) for ids in tokens]

    return lambda attention: Mean.of_differences(losses(attention), losses(EXACT))


def finite_losses(model: PreTrainedModel, ids: Tensor, attention: str) -> Tensor:
    """`position_losses`; raises ValueError if one is not finite."""
    losses = position_losses(model, ids, attention)
    if not math.isfinite(float(losses.sum())):
        raise ValueError(f"the loss under {attention} is not a finite number in {model.dtype}; use another dtype")
    return losses


def position_losses(model: PreTrainedModel, ids: Tensor, attention: str, targets: Tensor | None = None) -> Tensor:
    """Cross-entropies, in nats, of (targets), each of which follows a position of (length) ids, from the first one on.

    By default they are the (length - 1) ids after the first.
    Logits are computed for a few positions at a time, and their softmax in at least float32. The result is float64, on
    the CPU.
    """
    from muse_attention.huggingface import use_attention

    ids, targets = (tensor.to(model.device) for tensor in (ids, ids[1:] if targets is None else targets))
    with use_attention(model, attention), torch.no_grad():
        hidden = _hidden_states(model, ids[None])[0, : len(targets)]
        parts = [
            cross_entropy(_logits(model, states), following, reduction="none")
            for states, following in zip(
                hidden.split(_POSITIONS_AT_ONCE), targets.split(_POSITIONS_AT_ONCE), strict=True
            )
        ]
    return torch.cat(parts).double().cpu()


def check_model(model: PreTrainedModel, tokens: Tensor) -> None:
    """Raise ValueError if a model's logits are more than its output embeddings give."""
    ids = tokens[:1, :_TOKENS_CHECKED].to(model.device)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        own_logits = None if model.get_output_embeddings() is None else _logits(model, _hidden_states(model, ids))
    tolerance = 4 * torch.finfo(expected.dtype).eps * expected.abs().max()
    if own_logits is None or own_logits.shape != expected.shape or (own_logits - expected).abs().max() > tolerance:
        raise ValueError(
            f"{type(model).__name__} does more to its logits than its output embeddings do (a softcap, a scale); "
            "its loss cannot be measured in parts: use another model"
        )


def _hidden_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    states: Tensor = model.base_model(ids, use_cache=False).last_hidden_state
    return states


def _logits(model: PreTrainedModel, states: Tensor) -> Tensor:
    logits: Tensor = model.get_output_embeddings()(states)
    return logits.to(compute_dtype(logits.dtype))
