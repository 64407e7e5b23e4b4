"""Small random language models, sharp enough that approximate attention shows in their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from muse_attention.huggingface.capture import visit_layers

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """Two layers, four query heads on two key heads of 16, float64, in evaluation mode."""
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).double().eval()


def write_model_folder(folder: Path) -> None:
    """A model as `load_model` reads it, with a tokenizer of letters."""
    torch.manual_seed(0)
    tiny_llama().save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path, **special: str) -> None:
    """One of letters; `special` says which are `eos_token` and so on."""
    letters = Tokenizer(models.BPE({chr(32 + index): index for index in range(VOCABULARY)}, []))
    PreTrainedTokenizerFast(tokenizer_object=letters, **special).save_pretrained(folder)


class AttentionInputs(NamedTuple):
    """What a layer attends with, as `visit_layers` hands it on."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float


def capture(model: PreTrainedModel, ids: Tensor) -> list[AttentionInputs]:
    """Of every layer without a window."""
    layers: list[AttentionInputs] = []
    visit_layers(model, ids, lambda _, *inputs: layers.append(AttentionInputs(*inputs)))
    return layers


def token_ids(length: int, batch: int = 1) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))
