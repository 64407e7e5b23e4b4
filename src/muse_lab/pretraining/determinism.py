"""Precision of a run, and bitwise reproducible results on CUDA."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from muse_lab.pretraining.interruptions.failures import TrainingError
from muse_lab.pretraining.recipes import Recipe


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    """Autocast to the precision of the recipe."""
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16")


@contextlib.contextmanager
def determinism(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Make all operators on CUDA bitwise reproducible: PyTorch's attention has no switch of its own."""
    if not (recipe.deterministic and device.type == "cuda"):
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at the first matrix product
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    except TrainingError:
        raise
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise TrainingError(f"{first_line}; with deterministic=false the run is not bitwise reproducible") from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fill
