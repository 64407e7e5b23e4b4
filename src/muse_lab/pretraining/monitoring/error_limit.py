"""The attention error of each layer while a model trains, and a limit on it.

The probe measures the relative squared error of every global layer. A layer above the limit gets a tighter attention
from the next update on. For MuSe with a tolerance, that is the loosest within the limit of three: a quarter of the
tolerance, a sixteenth of it, and exact attention. For any other attention it is exact attention. A layer is relaxed by
one level if the error of the looser attention is at most half the limit. The levels of the layers are part of the run's
state, so a resumed run has the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from muse_attention.fidelity.error import FOUND, measure
from muse_attention.huggingface.capture import visit_layers
from muse_attention.registry import config_at, get_attention
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.records.attention_names import EXACT
from muse_lab.records.means import mean_of_each

ERROR = "relative_squared_error"
_TIGHTER = (4, 16)
"""Divisors of the tolerance, level by level."""
_RELAXED_BELOW = 0.5
"""Share of the limit, so that a layer does not go back and forth."""


class Change(NamedTuple):
    """A change of a layer's attention."""

    layer: int
    error: float
    """with the attention before, or with the one after if the layer is relaxed"""
    before: str
    after: str
    is_relaxed: bool

    def describe(self, limit: float) -> str:
        switches, attention, why = "switches", self.before, f"above error_limit={limit:g}"
        if self.is_relaxed:
            switches, attention, why = "switches back", self.after, f"below {_RELAXED_BELOW:g} of error_limit={limit:g}"
        return (
            f"layer {self.layer} {switches} from {self.before} to {self.after}: the relative squared error of "
            f"{attention} is {self.error:.3g}, {why}"
        )


class Probed(NamedTuple):
    """Measurements, and what follows from them."""

    measures: dict[int, dict[str, float]]
    """by layer, under its attention in the update; none for layers with exact attention"""
    levels: dict[int, int]
    """of layers whose attention is tightened from the next update on"""
    changes: list[Change]
    answers: dict[str, float] = {}  # noqa: RUF012 - never changed
    """nats for each token, by the kinds of `answer_losses`"""

    @property
    def errors(self) -> dict[int, float]:
        return {layer: measures[ERROR] for layer, measures in self.measures.items()}

    @property
    def means(self) -> dict[str, float]:
        """Each measure, averaged over the layers that have it."""
        return mean_of_each(self.measures.values())


@dataclass(frozen=True)
class ErrorLimit:
    limit: float
    """infinite if errors are only measured"""
    attentions: tuple[str, ...]
    """by level, each tighter than the one before: the recipe's first, exact attention last"""

    @classmethod
    def of(cls, limit: float, attention: str, length: int) -> ErrorLimit:
        config = config_at(attention, length)
        tighter = []
        if config is not None and config.tolerance is not None:
            tighter = [f"muse:{config.replace(tolerance=config.tolerance / divisor)}" for divisor in _TIGHTER]
        return cls(limit, (attention, *tighter, EXACT))

    def by_layer(self, levels: dict[int, int]) -> dict[int, str]:
        return {layer: self.attentions[self._known(level)] for layer, level in levels.items()}

    def _known(self, level: int) -> int:
        """The level, or the last one if a damaged checkpoint names a higher one."""
        return min(level, len(self.attentions) - 1)

    def probe(
        self,
        model: DecoderForCausalLM,
        input_ids: Tensor,
        levels: dict[int, int],
        mean: Callable[[dict[str, float]], dict[str, float]],
        on_layer: Callable[[], None] = lambda: None,
    ) -> Probed:
        """Measure every layer under its attention, and under others if its level may change.

        The measures are those of `fidelity.Fidelity`, averaged over heads, on some tokens: the error, its tail, and how
        much was retrieved. The model attends exactly meanwhile.

        Args:
            mean: over all ranks, so that all decide the same
            on_layer: called after every layer; it may raise
        """
        probed = Probed({}, dict(levels), [])

        def visit(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
            def measure_at(level: int) -> dict[str, float]:
                attention = get_attention(self.attentions[level])
                pooled = measure(attention, query, key, value, is_causal=True, scale=scale).pooled()
                for name in (FOUND, "found_queries"):  # no means: not every layer and rank has them
                    pooled.pop(name, None)
                return mean(pooled)

            def error_at(level: int) -> float:
                return 0.0 if self.attentions[level] == EXACT else measure_at(level)[ERROR]

            level = after = self._known(levels.get(layer, 0))
            error = 0.0
            if self.attentions[level] != EXACT:
                probed.measures[layer] = measure_at(level)
                error = probed.measures[layer][ERROR]
            tighter = error
            while not tighter <= self.limit:  # also if the error is NaN
                after += 1
                tighter = error_at(after)
            if after == level > 0:
                error = error_at(level - 1)
                after -= error <= _RELAXED_BELOW * self.limit
            if after != level:
                probed.changes.append(
                    Change(layer, error, self.attentions[level], self.attentions[after], after < level)
                )
            probed.levels.pop(layer, None)
            if after:
                probed.levels[layer] = after
            on_layer()

        visit_layers(model, input_ids, visit)
        return probed
