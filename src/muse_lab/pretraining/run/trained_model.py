"""The model of a run that has ended, as a folder that transformers reads."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from muse_lab.pretraining.initial_model import WEIGHTS
from muse_lab.pretraining.model.configuration import DecoderConfig
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.parallel import World, full_tensor
from muse_lab.pretraining.recipes import Recipe
from muse_lab.pretraining.run.folder import MODEL
from muse_lab.records.files import errors_naming, new_folder, remove_tree, replace_file, replace_folder


def write_model(
    model: DecoderForCausalLM,
    config: DecoderConfig,
    tokenizer: dict[str, bytes],
    recipe: Recipe,
    output: Path,
    world: World,
) -> Path:
    """Write a model with the attention of the last step. All ranks give their weights, and the first one writes."""
    weights = {}
    for name, parameter in model.named_parameters():
        weight = full_tensor(parameter).detach()
        if world.is_first:
            weights[name] = weight.cpu()
    folder, unfinished = output / MODEL, output / f"{MODEL}.tmp"
    if world.is_first:
        config.attention = recipe.attention_at(recipe.updates - 1)
        config.architectures = [DecoderForCausalLM.__name__]
        try:
            with errors_naming(folder):
                new_folder(unfinished)
                config.save_pretrained(unfinished)
                replace_file(unfinished / WEIGHTS, save(weights, metadata={"format": "pt"}))
                for name, content in tokenizer.items():
                    (unfinished / name).write_bytes(content)
                replace_folder(unfinished, folder)
        finally:
            remove_tree(unfinished)  # it may be what fills the disk
    return folder
