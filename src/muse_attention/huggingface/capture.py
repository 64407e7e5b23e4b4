"""The queries, keys and values that the attention layers of a transformers model see, while it attends exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muse_attention.huggingface.fallbacks import attends_to_everything
from muse_attention.huggingface.forward import exact_forward
from muse_attention.huggingface.registration import implementation, register_function

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Visit = Callable[[int, Tensor, Tensor, Tensor, float], object]
"""Called with (layer index, query, key, value, scale): what one layer attends with, after RoPE. The tensors are (batch,
heads, length, head_dim), keys and values have the key heads, and the scale is the factor of the logits."""


def visit_layers(model: PreTrainedModel, input_ids: Tensor, visit: Visit) -> None:
    """Run a model over (batch, length) token ids, and call `visit` with the inputs of each layer, first to last.

    Layers with a sliding window are counted, but not visited: they attend exactly under every attention. There are no
    gradients, no cache and no logits; what a visitor does not keep is freed before the next layer. A ValueError if
    every layer has a window.
    """
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; it must be (batch, length), neither of them 0")
    register_function(_NAME, _visiting_forward)
    number = itertools.count()
    visited = []

    def count(module: torch.nn.Module, attends_to_everything: bool, *inputs: Any) -> None:
        calls = next(number)
        if attends_to_everything:
            index = getattr(module, "layer_idx", None)  # a layer that calls no interface is not counted
            visited.append(calls if index is None else index)
            visit(visited[-1], *inputs)

    token = _visitor.set(count)
    try:
        with implementation(model, _NAME), torch.no_grad():
            model.base_model(input_ids.to(model.device), use_cache=False)
    finally:
        _visitor.reset(token)
    if not visited:
        raise ValueError("every layer of this model has a sliding window, so none can be replaced; use another model")


_NAME = "muse-capture"
_visitor: ContextVar[Callable[..., None]] = ContextVar("visitor")


def _visiting_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    scale = 1 / math.sqrt(query.shape[3]) if scaling is None else scaling
    _visitor.get()(module, attends_to_everything(module, others), query, key, value, scale)
    return exact_forward(module, query, key, value, attention_mask, dropout, scaling, **others)
