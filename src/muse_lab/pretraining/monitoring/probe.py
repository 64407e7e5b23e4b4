"""What a run measures beside an update, of the weights before it: the attention's errors, and answers to needles."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from muse_lab.pretraining.determinism import autocast
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.monitoring.answer_losses import answer_losses
from muse_lab.pretraining.monitoring.error_limit import ERROR, Change, ErrorLimit, measure_attention
from muse_lab.pretraining.parallel import World, gathered
from muse_lab.pretraining.recipes import Recipe
from muse_lab.pretraining.schedule import EXACT


class Probed(NamedTuple):
    """What was measured, as `metrics.Step` has it, and what follows from it."""

    levels: dict[int, int]
    """of layers whose attention is tightened from the next update on"""
    errors: dict[int, float] = {}  # noqa: RUF012 - never changed
    means: dict[str, float] = {}  # noqa: RUF012
    answers: dict[str, float] = {}  # noqa: RUF012
    """nats for each token, by the kinds of `answer_losses`"""
    changes: tuple[Change, ...] = ()


@dataclass
class Probe:
    model: DecoderForCausalLM
    recipe: Recipe
    world: World
    documents: list[tuple[Tensor, Tensor]]
    """with needles, and the distances of their answers, of this rank's group"""
    error_limit: ErrorLimit | None = field(init=False)

    def __post_init__(self) -> None:
        recipe = self.recipe
        limited = recipe.error_limit and recipe.attention != EXACT
        self.error_limit = ErrorLimit.of(recipe.error_limit, recipe.attention, recipe.length) if limited else None

    def is_due(self, step: int) -> bool:
        """Beside an update, counted from 0."""
        every = self.recipe.probe_every
        has_something = self.recipe.attention != EXACT or self.documents
        return every > 0 and (step + 1) % every == 0 and bool(has_something)

    def run(self, tokens: Tensor, levels: dict[int, int], on_layer: Callable[[], None]) -> Probed:
        """What an attention that has errors does on the first sequence of each rank; and the loss of answers.

        Of a sequence that ranks share, each rank measures some of the heads.

        Collective: every rank must call it. `on_layer` is called behind every layer, and may raise.
        """
        recipe, model = self.recipe, self.model
        found = Probed(levels)
        with autocast(recipe, self.world.device), gathered(model), torch.compiler.set_stance("force_eager"):
            if self.error_limit is not None and model.config.attention == recipe.attention:
                limited = self.error_limit.probe(model, tokens[:1, :-1], levels, self._mean, on_layer)
                found = _with_measures(found, limited.measures)
                found = found._replace(levels=limited.levels, changes=tuple(limited.changes))
            elif recipe.attention != EXACT:
                measures = measure_attention(model, tokens[:1, :-1], recipe.attention, on_layer)
                found = _with_measures(found, self._means(measures))
            if self.documents:
                found = found._replace(answers=self._answers())
        return found

    def tightened(self, levels: dict[int, int]) -> dict[int, str]:
        """The attention of each layer that has not the recipe's."""
        return {} if self.error_limit is None else self.error_limit.by_layer(levels)

    def apply(self, levels: dict[int, int]) -> None:
        if self.error_limit is not None:
            self.error_limit.apply(self.model, levels)

    def _answers(self) -> dict[str, float]:
        """Without kinds that no document has."""
        of_rank = answer_losses(self.model, self.documents, self.world.sequence)
        numbers = torch.stack([torch.stack([loss.double(), number.double()]) for loss, number in of_rank.values()])
        of_all = self.world.mean(numbers).tolist()
        return {name: summed / number for name, (summed, number) in zip(of_rank, of_all, strict=True) if number}

    def _mean(self, measures: dict[str, float]) -> dict[str, float]:
        return self._means({0: measures})[0]

    def _means(self, by_layer: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
        """Over all ranks."""
        numbers = torch.tensor([list(layer.values()) for layer in by_layer.values()], device=self.world.device)
        of_layers = self.world.mean(numbers).tolist()
        return {
            number: dict(zip(layer, of_layer, strict=True))
            for (number, layer), of_layer in zip(by_layer.items(), of_layers, strict=True)
        }


def _with_measures(probed: Probed, by_layer: dict[int, dict[str, float]]) -> Probed:
    """With errors by layer, and each measure averaged over the layers that have it."""
    errors = {number: layer[ERROR] for number, layer in by_layer.items()}
    names = dict.fromkeys(name for layer in by_layer.values() for name in layer)
    means = {name: statistics.fmean(layer[name] for layer in by_layer.values() if name in layer) for name in names}
    return probed._replace(errors=errors, means=means)
