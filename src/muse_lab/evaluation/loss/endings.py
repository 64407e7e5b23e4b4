"""How the loss before a position changes when the text after it is replaced.

Under a strictly causal attention it does not change. The paper's method clusters the whole sequence: its error changes,
and so does the loss. Where the loss rises by more than the error explains, the model has used what the attention let it
see of the future.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muse_attention.baselines import exact_attention
from muse_attention.fidelity.error import position_error
from muse_attention.registry import get_attention
from muse_lab.evaluation.loss.curves import bins_of
from muse_lab.evaluation.loss.positions import Ending, LossResults, position_losses
from muse_lab.models import PreTrainedModel
from muse_lab.records.attention_names import EXACT
from muse_lab.records.means import Mean
from muse_lab.records.stored_results import OnStep


class Change(NamedTuple):
    """The effect of another ending, averaged over samples."""

    positions: tuple[int, int]
    """the first and the last"""
    loss: float
    other_loss: float
    error: float
    other_error: float
    rise: Mean
    """of the loss, paired over samples"""
    unexplained: Mean
    """the rise less what the change of the error explains"""


def ending_position(share: float, length: int, samples: int) -> int:
    """The position after which the text is replaced. Raises ValueError if there is none."""
    if not 2 <= share * length <= length - 1:
        raise ValueError(f"--other-ending {share:g} leaves no text before or after it; choose a share such as 0.5")
    if samples < 2:
        raise ValueError("--other-ending takes the text of the next sample; use at least 2 samples")
    return int(share * length)


def measure_endings(
    model: PreTrainedModel,
    tokens: Tensor,
    attentions: Sequence[str],
    position: int,
    results: LossResults,
    path: Path,
    *,
    on_step: OnStep = lambda description, finished: None,
) -> None:
    """Add what is missing of `attentions` to `results` that `measure` has filled, on the same (samples, length) tokens.

    The file is written after every sample of every attention.
    """
    for finished, (sample, attention) in enumerate(results.missing(attentions, position)):
        on_step(f"{attention}, another ending of sample {sample + 1} of {len(tokens)}", finished)
        own = tokens[sample]
        other = torch.cat([own[:position], tokens[(sample + 1) % len(tokens), position:]])
        measures = [
            function(model, ids, attention) for function in (position_losses, query_errors) for ids in (own, other)
        ]
        if not all(by_position[: position - 1].isfinite().all() for by_position in measures):
            raise ValueError(f"the loss or error under {attention} is not finite in {model.dtype}; use another dtype")
        means = [[part.loss for part in bins_of(by_position[: position - 1])] for by_position in measures]
        results.losses[attention].endings.setdefault(position, []).append(Ending(*means))
        results.write(path)


def query_errors(model: PreTrainedModel, ids: Tensor, attention: str) -> Tensor:
    """(length) relative squared errors of an attention's outputs, averaged over layers and heads.

    Each layer is measured on its inputs under exact attention, which no later token changes. Layers with a sliding
    window are left out.
    """
    from muse_attention.huggingface.capture import visit_layers

    function, errors = get_attention(attention), []

    def visit(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        call: dict[str, Any] = {"is_causal": True, "scale": scale, "enable_gqa": True}
        outputs: list[Any] = [one(query, key, value, **call) for one in (function, exact_attention)]
        errors.append(position_error(*outputs)[0].mean(0).cpu())

    visit_layers(model, ids[None], visit)
    return torch.stack(errors).mean(0)


def replaced(results: LossResults) -> dict[int, list[str]]:
    """The positions after which the text was replaced, with the attentions under which it was in every sample."""
    attentions: dict[int, list[str]] = {}
    for name in results.whole:
        for position, endings in results.losses[name].endings.items():
            if len(endings) == results.settings.samples:
                attentions.setdefault(position, []).append(name)
    return {position: names for position, names in sorted(attentions.items()) if EXACT in names}


def changes(results: LossResults, attention: str, position: int) -> list[Change]:
    """The change over all positions before, and then between powers of two."""
    bins = bins_of(torch.zeros(position - 1))
    sizes = torch.tensor([part.last - part.first + 1 for part in bins], dtype=torch.float64)

    def read(name: str, measure: str) -> Tensor:
        """(1 + bins, samples)"""
        endings = results.losses[name].endings[position]
        means = torch.tensor([getattr(ending, measure) for ending in endings], dtype=torch.float64).T
        return torch.cat([(sizes @ means / sizes.sum())[None], means])

    loss, other_loss, error, other_error = kinds = [read(attention, one.name) for one in fields(Ending)]
    explained = torch.where(error == 0, 0, (loss - read(EXACT, "losses")) * (other_error / error - 1))
    rise = other_loss - loss
    rises, unexplained = (list(map(Mean.of, one.tolist())) for one in (rise, rise - explained))
    spans = [(1, position - 1), *((part.first, part.last) for part in bins)]
    return list(map(Change, spans, *(one.mean(1).tolist() for one in kinds), rises, unexplained))
