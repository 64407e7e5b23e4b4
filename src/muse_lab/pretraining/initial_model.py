"""The model of a recipe: its configuration, and the weights that a run begins with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.model.configuration import DecoderConfig
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.recipes import Recipe
from muse_lab.records.untrusted import open_regular, read_regular

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
"""Files in the folder of a model."""


def make_config(corpus: Corpus, recipe: Recipe) -> DecoderConfig:
    changes: dict[str, Any] = {
        "vocab_size": corpus.manifest.vocabulary,
        "eos_token_id": corpus.manifest.end,
        "head_dim": recipe.head_dim,
        "max_position_embeddings": recipe.length,
        "attention": recipe.attention,
    }
    return DecoderConfig.scale(recipe.scale, **changes) if recipe.scale else DecoderConfig.tiny(**changes)


def make_model(corpus: Corpus, recipe: Recipe, weights: Mapping[str, Tensor] | None = None) -> DecoderForCausalLM:
    """A model with the given weights, or with random ones from the recipe's seed; in float32, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = DecoderForCausalLM(make_config(corpus, recipe)).train()
    if weights is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    return model


def make_empty_model(corpus: Corpus, recipe: Recipe) -> DecoderForCausalLM:
    """A model on the meta device: shapes and dtypes without weights."""
    with torch.device("meta"):
        return DecoderForCausalLM(make_config(corpus, recipe))


@dataclass(frozen=True)
class InitialWeights:
    tensors: dict[str, Tensor]
    fingerprint: str
    """SHA-256 of their file"""


def read_initial(corpus: Corpus, recipe: Recipe) -> InitialWeights:
    """The initial weights that the recipe names; raises ValueError if a run on this corpus cannot begin with them."""
    folder = Path(recipe.initial)
    setting = f"initial={folder}"
    try:
        tokenizer = hashlib.sha256(read_regular(folder / TOKENIZER)).hexdigest()
        with open_regular(folder / WEIGHTS) as file:
            weights = load_file(folder / WEIGHTS)
            fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, SafetensorError):
        nested = folder / "model"
        suggestion = f"initial={nested}" if nested.is_dir() else "one"
        raise ValueError(
            f"{setting} is not a folder of a model that muse train wrote, or not whole; give {suggestion}"
        ) from None
    if tokenizer != corpus.manifest.files[TOKENIZER]:
        raise ValueError(
            f"{setting} has another tokenizer than {corpus.folder}; prepare the corpus with --tokenizer {folder}"
        )
    expected = make_empty_model(corpus, recipe)
    shapes = {name: parameter.shape for name, parameter in expected.named_parameters()}
    if {name: weight.shape for name, weight in weights.items()} != shapes:
        raise ValueError(f"{setting} is not a model of scale={recipe.scale}; choose its scale")
    for name, weight in weights.items():
        if not weight.is_floating_point() or not torch.isfinite(weight.float()).all():
            raise ValueError(f"{setting} is damaged: {name} has numbers that are not finite; give another")
    return InitialWeights(weights, fingerprint)
