"""The precision of a run's products."""

from __future__ import annotations

import torch

from muse_lab.pretraining.recipes import Recipe


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16")
