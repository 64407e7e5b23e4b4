"""Measurements on the weights before an update: the attention's errors, and answers to needles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_lab.pretraining.determinism import autocast
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.monitoring.answer_losses import answer_losses
from muse_lab.pretraining.monitoring.error_limit import ErrorLimit, Probed
from muse_lab.pretraining.parallel import World, gathered
from muse_lab.pretraining.recipes import Recipe
from muse_lab.records.attention_names import EXACT


@dataclass
class Probe:
    model: DecoderForCausalLM
    recipe: Recipe
    world: World
    documents: list[tuple[Tensor, Tensor]]
    """needle documents, and the distances of their answers, for this rank's group"""

    def is_due(self, step: int) -> bool:
        """Whether to measure at an update, counted from 0."""
        every = self.recipe.probe_every
        has_something = self.recipe.attention != EXACT or self.documents
        return every > 0 and (step + 1) % every == 0 and bool(has_something)

    def run(self, tokens: Tensor, levels: dict[int, int], on_layer: Callable[[], None]) -> Probed:
        """Measure the errors of the attention on the first sequence of each rank, and the loss on answers.

        Ranks that share a sequence measure some of the heads each. Errors have no consequence while the model uses
        exact attention.

        Collective: every rank must call it. `on_layer` is called after every layer, and may raise.
        """
        recipe, model = self.recipe, self.model
        probed = Probed({}, levels, [])
        with autocast(recipe, self.world.device), gathered(model), torch.compiler.set_stance("force_eager"):
            if recipe.attention != EXACT:
                is_limited = recipe.error_limit > 0 and model.config.attention == recipe.attention
                limit = self._limit(recipe.error_limit if is_limited else math.inf)
                limited = limit.probe(model, tokens[:1, :-1], levels if is_limited else {}, self._mean, on_layer)
                probed = limited if is_limited else probed._replace(measures=limited.measures)
            if self.documents:
                probed = probed._replace(answers=self._answers())
        return probed

    def tightened(self, levels: dict[int, int]) -> dict[int, str]:
        """The attention of each layer whose attention is not the recipe's."""
        return self._limit(self.recipe.error_limit).by_layer(levels)

    def apply(self, levels: dict[int, int]) -> None:
        """Use the attentions of the layers' levels wherever the model uses the recipe's attention."""
        self.model.replace_attention(self.recipe.attention, self.tightened(levels))

    def _limit(self, limit: float) -> ErrorLimit:
        return ErrorLimit.of(limit, self.recipe.attention, self.recipe.length)

    def _answers(self) -> dict[str, float]:
        """The loss by kind, without kinds that no document has."""
        losses = answer_losses(self.model, self.documents, self.world.sequence)
        means = self.world.mean(torch.stack(list(losses.values())).double()).tolist()
        return {name: summed / number for name, (summed, number) in zip(losses, means, strict=True) if number}

    def _mean(self, measures: dict[str, float]) -> dict[str, float]:
        """The means over all ranks."""
        numbers = torch.tensor(list(measures.values()), device=self.world.device)
        return dict(zip(measures, self.world.mean(numbers).tolist(), strict=True))
