"""The error of an attention in every layer of a model, on what the layer attends with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from muse_attention.fidelity.error import FOUND, measure
from muse_attention.huggingface.capture import visit_layers
from muse_attention.registry import get_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def measure_attention(
    model: PreTrainedModel, input_ids: Tensor, attention: str, on_layer: Callable[[], None] = lambda: None
) -> dict[int, dict[str, float]]:
    """The measures of `fidelity.Fidelity` by layer, averaged over heads, on some tokens: the error, its tail, and how
    much was retrieved. The model attends exactly meanwhile. `on_layer` is called behind every layer, and may raise."""
    found: dict[int, dict[str, float]] = {}

    def visit(layer: int, measure_under: Callable[[str], dict[str, float]]) -> None:
        found[layer] = measure_under(attention)
        on_layer()

    visit_measures(model, input_ids, visit)
    return found


def visit_measures(
    model: PreTrainedModel, input_ids: Tensor, visit: Callable[[int, Callable[[str], dict[str, float]]], None]
) -> None:
    """The same for each layer under the attentions that `visit` asks for: it is called with the number of the layer,
    and with a function from the name of an attention to its measures."""

    def visit_inputs(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        def measure_under(name: str) -> dict[str, float]:
            pooled = measure(get_attention(name), query, key, value, is_causal=True, scale=scale).pooled()
            pooled.pop(FOUND, None)  # what not every layer and rank has cannot be averaged over them
            return pooled

        visit(layer, measure_under)

    visit_layers(model, input_ids, visit_inputs)
