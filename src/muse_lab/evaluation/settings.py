"""The model and the text of a measurement, and their fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.sizes import format_size
from muse_lab.models import PreTrainedModel

_FINGERPRINT_WEIGHTS = 64
"""Weights of every tensor that are in the fingerprint of a model."""


@dataclass(frozen=True)
class TextSettings:
    """Settings that all numbers of a model on a text share."""

    model: str
    """its name, and its shape in words"""
    text: str
    """in words"""
    length: int
    samples: int
    device: str
    dtype: str
    fingerprint: str = ""
    """of the weights and the tokens: models and texts that words do not tell apart"""

    @property
    def title(self) -> str:
        """Title of a table on the terminal."""
        return f"{self.model}\n{self.text}, {self.samples} x {format_size(self.length)} tokens"


def describe_model(name: str, model: PreTrainedModel) -> str:
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ValueError(f"{name} is a {type(model).__name__}, which has no attention heads; use another model")
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return (
        f"{name} ({model.num_parameters() / 1e6:,.0f}M parameters, {config.num_hidden_layers} layers, "
        f"{heads} query heads on {key_heads} key heads)"
    )


def take_fingerprint(model: PreTrainedModel, tokens: Tensor) -> str:
    """Sixteen hexadecimal digits from all tokens, and from the first weights of every tensor."""
    digest = hashlib.sha256(tokens.cpu().to(torch.int64).numpy().tobytes())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.flatten()[:_FINGERPRINT_WEIGHTS].double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def longest_context(model: PreTrainedModel) -> int | None:
    """The model's context in tokens; None if its config does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_context(model: PreTrainedModel, length: int) -> None:
    """Raise ValueError if the length is more than the model's context."""
    longest = longest_context(model) or length
    if length > longest:
        raise ValueError(f"the model's context is {longest} tokens, less than {length}; choose a smaller length")
