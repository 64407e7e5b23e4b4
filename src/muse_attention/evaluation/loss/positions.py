"""The loss of a model at every position of long texts, under one attention after another.

The results are one JSON file, replaced after every sample of every attention, so that an interrupted run goes on where
it stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from muse_attention.declared_types import check_types
from muse_attention.evaluation.attentions import check_meaning, settings_of
from muse_attention.evaluation.settings import OnStep, Settings, start_or_continue
from muse_attention.files import replace_file
from muse_attention.recorded_names import with_full_names
from muse_attention.strict_json import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_POSITIONS_AT_ONCE = 512
"""Whose logits are in memory at the same time."""
_TOKENS_CHECKED = 16


@dataclass
class Losses:
    """Of one attention, in nats, over the samples so far."""

    sums: Tensor
    """(length - 1), float64: of the token that follows each position, summed over samples"""
    means: list[float] = field(default_factory=list)
    """of each sample, over positions"""

    def add(self, losses: Tensor) -> None:
        """Another sample, (length - 1)."""
        self.sums = self.sums + losses
        self.means.append(float(losses.mean()))

    @property
    def by_position(self) -> Tensor:
        """(length - 1), averaged over samples."""
        return self.sums / len(self.means)


@dataclass
class Results:
    machine: dict[str, Any]
    settings: Settings
    commands: list[str] = field(default_factory=list)
    losses: dict[str, Losses] = field(default_factory=dict)
    """by the full name of the attention"""

    @property
    def whole(self) -> list[str]:
        """The attentions that have seen every sample."""
        return [name for name, losses in self.losses.items() if len(losses.means) == self.settings.samples]

    @property
    def finished(self) -> int:
        """Samples, over all attentions."""
        return sum(len(losses.means) for losses in self.losses.values())

    def missing(self, attentions: Sequence[str]) -> list[tuple[int, str]]:
        """What is still to do: all attentions on one sample before the next, for any part to be a fair comparison."""
        done = {name: len(losses.means) for name, losses in self.losses.items()}
        samples = range(self.settings.samples)
        return [(sample, name) for sample in samples for name in attentions if done.get(name, 0) <= sample]


def start_results(settings: Settings, path: Path, *, resume: bool) -> Results:
    """Empty results, or with `resume` those of the file if there is one; a ValueError if they cannot be continued."""
    return start_or_continue(settings, path, resume=resume, empty=Results, read=read_results)


def measure(
    model: PreTrainedModel,
    tokens: Tensor,
    attentions: Sequence[str],
    results: Results,
    path: Path,
    *,
    on_step: OnStep = lambda description, finished: None,
) -> None:
    """Fill `results` with what is missing of `attentions`, by full names, on (samples, length) tokens.

    The file is written after every sample of every attention.
    """
    check_model(model, tokens)
    samples, length = tokens.shape
    for finished, (sample, attention) in enumerate(results.missing(attentions)):
        on_step(f"{attention}, sample {sample + 1} of {samples}", finished)
        losses = position_losses(model, tokens[sample], attention)
        if not math.isfinite(float(losses.sum())):
            raise ValueError(f"the loss under {attention} is not a finite number in {model.dtype}; use another dtype")
        results.losses.setdefault(attention, Losses(torch.zeros(length - 1, dtype=torch.float64))).add(losses)
        write_results(results, path)


def position_losses(
    model: PreTrainedModel, ids: Tensor, attention: str, *, at_once: int = _POSITIONS_AT_ONCE
) -> Tensor:
    """(length - 1) cross-entropies, in nats, of the tokens that follow each position of (length) ids."""
    return token_losses(model, ids, ids[1:], attention, at_once=at_once)


def token_losses(
    model: PreTrainedModel, ids: Tensor, targets: Tensor, attention: str, *, at_once: int = _POSITIONS_AT_ONCE
) -> Tensor:
    """Cross-entropies, in nats, of (targets), each of which follows a position of (length) ids, from the first one on.

    Logits are computed for `at_once` positions at a time, and their softmax in at least float32. The result is float64,
    on the CPU.
    """
    from muse_attention.huggingface import use_attention

    ids, targets = ids.to(model.device), targets.to(model.device)
    with use_attention(model, attention), torch.no_grad():
        hidden = _hidden_states(model, ids[None])[0, : len(targets)]
        parts = [
            cross_entropy(_at_least_float32(_logits(model, states)), following, reduction="none")
            for states, following in zip(hidden.split(at_once), targets.split(at_once), strict=True)
        ]
    return torch.cat(parts).double().cpu()


def check_model(model: PreTrainedModel, tokens: Tensor) -> None:
    """A ValueError if a model's logits are more than its last layer's output."""
    few = tokens[:1, :_TOKENS_CHECKED].to(model.device)
    with torch.no_grad():
        expected = model(few, use_cache=False).logits
        found = None if model.get_output_embeddings() is None else _logits(model, _hidden_states(model, few))
    tolerance = 4 * torch.finfo(expected.dtype).eps * expected.abs().max()
    if found is None or found.shape != expected.shape or (found - expected).abs().max() > tolerance:
        raise ValueError(
            f"{type(model).__name__} does more to its logits than its output embeddings do (a softcap, a scale); "
            "its loss cannot be measured in parts: use another model"
        )


def _hidden_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    states: Tensor = model.base_model(ids, use_cache=False).last_hidden_state
    return states


def _logits(model: PreTrainedModel, states: Tensor) -> Tensor:
    logits: Tensor = model.get_output_embeddings()(states)
    return logits


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def write_results(results: Results, path: Path) -> None:
    document = {
        "machine": results.machine,
        "settings": asdict(results.settings),
        "commands": results.commands,
        "losses": [_losses_to_json(attention, losses) for attention, losses in results.losses.items()],
    }
    replace_file(path, json.dumps(document) + "\n")


def read_results(path: Path) -> Results:
    """Read what `write_results` wrote; a ValueError if it is something else."""
    try:
        document = with_full_names(parse_json(path.read_bytes()))
        settings = Settings(**document["settings"])
        results = Results(
            machine=dict(document["machine"]),
            settings=settings,
            commands=list(document["commands"]),
            losses={entry["attention"]: _losses_from_json(entry, settings) for entry in document["losses"]},
        )
        check_types(results)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not hold the results of muse loss; choose another --name, or drop --resume to start over"
        ) from error
    for entry in document["losses"]:
        check_meaning(entry["attention"], entry["config"])
    return results


def _losses_to_json(attention: str, losses: Losses) -> dict[str, Any]:
    return {
        "attention": attention,
        "config": settings_of(attention),
        "means": losses.means,
        "sums": losses.sums.tolist(),
    }


def _losses_from_json(entry: dict[str, Any], settings: Settings) -> Losses:
    losses = Losses(torch.tensor(entry["sums"], dtype=torch.float64), [float(mean) for mean in entry["means"]])
    if losses.sums.shape != (settings.length - 1,) or not 1 <= len(losses.means) <= settings.samples:
        raise ValueError("the numbers are not those of the settings")
    return losses
