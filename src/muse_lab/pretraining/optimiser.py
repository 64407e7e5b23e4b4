"""AdamW as in the paper, and all that a run has learnt as tensors by name: weights and both moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muse_lab.pretraining.checkpoints.store import Checkpoint, read_tensors
from muse_lab.pretraining.recipes import Recipe

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
_KINDS = (WEIGHT, *MOMENTS)


def make_optimiser(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """The paper names no weight without decay, so all have it. The learning rate is set before each update."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=recipe.peak_rate,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.epsilon,
        weight_decay=recipe.weight_decay,
    )


def set_learning_rate(optimiser: torch.optim.AdamW, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate


def learnt(model: nn.Module, optimiser: torch.optim.AdamW) -> dict[str, Tensor]:
    """All of it, sharded as the model is, after at least one update."""
    return dict(_named(model, optimiser))


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all numbers are finite, with one synchronisation of the device."""
    return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())


def expected_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Of each tensor of a checkpoint, one of the same shape and dtype; the model may be on the meta device."""
    return {f"{kind}/{name}": parameter for name, parameter in model.named_parameters() for kind in _KINDS}


def restore(model: nn.Module, optimiser: torch.optim.AdamW, checkpoint: Checkpoint, *, skipped: int = 0) -> None:
    """Put a checkpoint of such a model into it and into its optimiser.

    Args:
        skipped: updates of the run that were not made
    """
    for parameter in model.parameters():
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
        optimiser.state[parameter] = {"step": torch.tensor(float(checkpoint.step - skipped)), **moments}
    _fill(dict(_named(model, optimiser)), checkpoint)


def restore_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Put those of a checkpoint of such a model into one that is not trained any further."""
    _fill({f"{WEIGHT}/{name}": parameter for name, parameter in model.named_parameters()}, checkpoint, f"{WEIGHT}/")


def _fill(targets: dict[str, Tensor], checkpoint: Checkpoint, beginning: str = "") -> None:
    """With all tensors of a checkpoint, or with those whose names have this prefix. Their shapes have been checked."""
    if any(isinstance(target, DTensor) for target in targets.values()):
        from muse_lab.pretraining.checkpoints.together import load_together

        load_together(targets, checkpoint.folder, checkpoint.tensors)
        return
    with torch.no_grad():
        for name, tensor in read_tensors(checkpoint, beginning):
            targets[name].copy_(tensor)


def _named(model: nn.Module, optimiser: torch.optim.AdamW) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield f"{WEIGHT}/{name}", parameter
        for moment in MOMENTS:
            yield f"{moment}/{name}", optimiser.state[parameter][moment]
