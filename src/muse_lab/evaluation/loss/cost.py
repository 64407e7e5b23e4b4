"""What attentions cost a model in loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from muse_lab.evaluation.loss.positions import check_model, finite_losses
from muse_lab.records.attention_names import EXACT
from muse_lab.records.means import Mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Cost = Callable[[str], Mean]
"""The cost of an attention by name: the loss under it minus that under exact attention, in nats."""


def cost_on(model: PreTrainedModel, tokens: Tensor) -> Cost:
    """The costs on (samples, length) tokens.

    Exact attention is measured once, at the first call. Raises ValueError if the loss cannot be measured.
    """
    check_model(model, tokens)

    @functools.cache
    def losses(attention: str) -> list[float]:
        return [float(finite_losses(model, ids, attention).mean()) for ids in tokens]

    return lambda attention: Mean.of_differences(losses(attention), losses(EXACT))
