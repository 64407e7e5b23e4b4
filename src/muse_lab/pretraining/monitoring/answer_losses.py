"""The loss of a model on answers to needles, by the distance to their definitions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel

from muse_lab.pretraining.model.sequence_parts import own_part

ALL = "all"
NEAR = 256
"""The smallest bound of distances from answers to definitions: up to 256 tokens, up to 512, and so on."""


@torch.no_grad()
def answer_losses(
    model: PreTrainedModel, documents: Iterable[tuple[Tensor, Tensor]], sequence: DeviceMesh | None = None
) -> dict[str, Tensor]:
    """The summed loss of answer tokens, under the model's own attention, and their number, (2), by kind.

    Kinds are all answers, first tokens of uids, later tokens of uids, and answers by distance.

    Args:
        documents: (length + 1,) tokens, and for each the distance to the beginning of its needle's definition; 0 for
            tokens that are no answers
        sequence: the ranks that share each document; each has the answers in its part
    """
    total: dict[str, Tensor] = {}
    for document, distances in documents:
        tokens, back = document.to(model.device), distances.to(model.device)
        is_first = (back > 0) & ~pad(back[:-1] > 0, (1, 0))
        targets, back, is_first = (own_part(full[1:], sequence, 0) for full in (tokens, back, is_first))
        places = torch.nonzero(back)[:, 0]
        logits = model(tokens[None, :-1], use_cache=False, logits_to_keep=places).logits[0]
        losses = cross_entropy(logits.float(), targets[places], reduction="none")
        for name, are_counted in _kinds(back[places], is_first[places], len(document)).items():
            summed = (losses * are_counted).sum()
            own = torch.stack([summed, are_counted.sum().to(summed)]).double()
            total[name] = total[name] + own if name in total else own
    return total


def _kinds(distances: Tensor, is_first: Tensor, length: int) -> dict[str, Tensor]:
    """The answers of each kind, as masks; all documents of one length have the same kinds."""
    kinds = {ALL: torch.ones_like(is_first), "first tokens": is_first, "later tokens": ~is_first}
    nearest, farthest = 0, NEAR
    while nearest < length:
        kinds[f"{nearest + 1} to {farthest} back"] = (distances > nearest) & (distances <= farthest)
        nearest, farthest = farthest, 2 * farthest
    return kinds
