"""The attention's error while a model trains: relative to exact attention, in each global layer, on a current batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from muse_attention.by_name import get_attention
from muse_attention.capture import visit_layers
from muse_attention.fidelity import measure

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def relative_squared_errors(model: PreTrainedModel, input_ids: Tensor, attention: str) -> dict[int, float]:
    """The paper's RSE by layer, averaged over heads; the model attends exactly meanwhile."""
    attend = get_attention(attention)
    errors: dict[int, float] = {}

    def visit(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        found = measure(attend, query, key, value, is_causal=True, scale=scale)
        errors[layer] = found.pooled()["relative_squared_error"]

    visit_layers(model, input_ids, visit)
    return errors
