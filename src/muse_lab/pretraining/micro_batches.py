"""The loss of a batch and its gradients, a few sequences at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from muse_lab.pretraining.determinism import autocast
from muse_lab.pretraining.document_mask import separate_documents
from muse_lab.pretraining.model.chunked_loss import IGNORED
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.parallel import World, accumulate_gradients
from muse_lab.pretraining.recipes import Recipe


def differentiate(
    model: DecoderForCausalLM, tokens: Tensor, recipe: Recipe, world: World, end: int, on_part: Callable[[], None]
) -> Tensor:
    """The mean loss of this rank's tokens, and its gradients, which ranks average.

    Of a sequence that ranks share, each has the whole, and the model computes this rank's part of it.

    Args:
        tokens: (sequences, length + 1) of this rank
        end: the token that ends documents
        on_part: called before each part of `micro_batch` sequences
    """
    total = torch.zeros((), device=world.device)
    parts = tokens.split(recipe.micro_batch)
    counted: Tensor | float = tokens[:, 1:].numel()
    if recipe.document_mask:  # ranks may count different numbers of targets
        targets = (separate_documents(tokens, end).shift_labels != IGNORED).sum()
        counted = world.mean(targets.float()).clamp(min=1)
    counted = counted / world.sequence_ranks
    for number, part in enumerate(parts):
        accumulate_gradients(model, is_last=number == len(parts) - 1)
        ids, labels, positions = part[:, :-1], part[:, 1:].contiguous(), None
        if recipe.document_mask:
            ids, positions, labels = separate_documents(part, end)
        on_part()
        with autocast(recipe, world.device):
            loss = model(
                ids, position_ids=positions, shift_labels=labels, num_items_in_batch=counted, use_cache=False
            ).loss
        loss.backward()
        total += loss.detach()
    return total
