"""AdamW as in the paper, and the weights and both moments of a run as tensors by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muse_lab.pretraining.checkpoints.store import Checkpoint, read_tensors
from muse_lab.pretraining.recipes import Recipe

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
_KINDS = (WEIGHT, *MOMENTS)


def make_optimiser(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW with decay on all weights: the paper exempts none. The learning rate is set before each update."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=recipe.peak_rate,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.epsilon,
        weight_decay=recipe.weight_decay,
    )


def learned_tensors(model: nn.Module, optimiser: torch.optim.AdamW) -> dict[str, Tensor]:
    """Weights and moments by name, sharded as the model is, after at least one update."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"{WEIGHT}/{name}"] = parameter
        tensors |= {f"{moment}/{name}": optimiser.state[parameter][moment] for moment in MOMENTS}
    return tensors


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all numbers are finite, with one synchronisation of the device."""
    return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())


def expected_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors with the names, shapes and dtypes of a checkpoint; the model may be on the meta device."""
    return {f"{kind}/{name}": parameter for name, parameter in model.named_parameters() for kind in _KINDS}


def restore(model: nn.Module, optimiser: torch.optim.AdamW, checkpoint: Checkpoint, *, skipped: int = 0) -> None:
    """Load a checkpoint into a model and its optimiser.

    Args:
        skipped: number of skipped updates of the run
    """
    for parameter in model.parameters():
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
        optimiser.state[parameter] = {"step": torch.tensor(float(checkpoint.step - skipped)), **moments}
    _fill(learned_tensors(model, optimiser), checkpoint)


def restore_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint into a model that is not trained any further."""
    _fill({f"{WEIGHT}/{name}": parameter for name, parameter in model.named_parameters()}, checkpoint, f"{WEIGHT}/")


def _fill(targets: dict[str, Tensor], checkpoint: Checkpoint, prefix: str = "") -> None:
    """Copy all tensors of a checkpoint, or those whose names begin with `prefix`, into the targets, whose
    shapes have been checked."""
    if any(isinstance(target, DTensor) for target in targets.values()):
        from muse_lab.pretraining.checkpoints.together import load_together

        load_together(targets, checkpoint.folder, checkpoint.tensors)
        return
    with torch.no_grad():
        for name, tensor in read_tensors(checkpoint, prefix):
            targets[name].copy_(tensor)
