"""What is measured now and then while a model trains: the error of its attention, and whether it looks needles up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muse_attention.by_name import get_attention
from muse_attention.capture import visit_layers
from muse_attention.fidelity import measure
from muse_attention.pretraining.model.chunked_loss import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def measure_attention(
    model: PreTrainedModel, input_ids: Tensor, attention: str, on_layer: Callable[[], None] = lambda: None
) -> dict[int, dict[str, float]]:
    """The measures of `fidelity.Fidelity` by layer, averaged over heads, on some tokens: the error, its tail, and what
    was retrieved. The model attends exactly meanwhile. `on_layer` is called behind every layer, and may raise."""
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
        visit(
            layer,
            lambda name: measure(get_attention(name), query, key, value, is_causal=True, scale=scale).pooled(),
        )

    visit_layers(model, input_ids, visit_inputs)


@torch.no_grad()
def answers_loss(model: PreTrainedModel, documents: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Nats for each token that is an answer, under the model's own attention; of a model that has a part of each
    sequence, the share of that part in it.

    `documents` are (length + 1,) tokens, and which of them are answers.
    """
    total, number = torch.zeros((), device=model.device), 0
    for document, is_answer in documents:
        tokens = document.to(model.device)
        targets = tokens[1:].masked_fill(~is_answer[1:].to(model.device), IGNORED)
        total += model(tokens[None, :-1], shift_labels=targets[None], num_items_in_batch=1, use_cache=False).loss
        number += int(is_answer[1:].sum())
    return total / number
