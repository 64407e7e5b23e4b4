"""What is measured now and then while a model trains: the error of its attention, and whether it looks needles up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muse_attention.by_name import get_attention
from muse_attention.capture import visit_layers
from muse_attention.fidelity import measure
from muse_attention.pretraining.chunked_loss import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def relative_squared_errors(model: PreTrainedModel, input_ids: Tensor, attention: str) -> dict[int, float]:
    """The paper's RSE by layer, averaged over heads, on some tokens; the model attends exactly meanwhile."""
    attend = get_attention(attention)
    errors: dict[int, float] = {}

    def visit(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        found = measure(attend, query, key, value, is_causal=True, scale=scale)
        errors[layer] = found.pooled()["relative_squared_error"]

    visit_layers(model, input_ids, visit)
    return errors


@torch.no_grad()
def answers_loss(model: PreTrainedModel, document: Tensor, is_answer: Tensor) -> Tensor:
    """Nats for each token of (length + 1,) that is an answer, under the model's own attention."""
    targets = document[1:].masked_fill(~is_answer[1:], IGNORED)
    loss: Tensor = model(document[None, :-1], shift_labels=targets[None], use_cache=False).loss
    return loss
