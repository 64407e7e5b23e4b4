"""Where metrics can be watched while a run goes on: TensorBoard, and Weights & Biases. Both are optional packages."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from muse_attention.extras import how_to_install
from muse_attention.files import replace_file

TENSORBOARD, WANDB, WANDB_ID = "tensorboard", "wandb", "wandb-id.txt"
"""In the folder of a run."""
_NAMES = {TENSORBOARD: "TensorBoard", WANDB: "Weights & Biases"}
_PROJECT = "muse-attention"


class Board(Protocol):
    def add(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def check_installed(name: str) -> None:
    """An ImportError of one line if `TENSORBOARD` or `WANDB` is not there."""
    try:
        importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{_NAMES[name]} is not installed: {how_to_install(name)}, or leave it out") from None


class TensorBoard:
    def __init__(self, output: Path, step: int) -> None:
        """
        Args:
            step: what was written behind it is forgotten
        """
        check_installed(TENSORBOARD)
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(str(output / TENSORBOARD), purge_step=step + 1)

    def add(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of its own there, which goes on when the run is resumed. `WANDB_MODE=offline` needs no network.

    Steps that are made again after a run was killed have the same values as before; Weights & Biases keeps the first.
    """

    def __init__(self, output: Path, recipe: Mapping[str, Any]) -> None:
        check_installed(WANDB)
        path = output / WANDB_ID
        if not path.exists():
            replace_file(path, uuid.uuid4().hex)
        self._run: Any = importlib.import_module(WANDB).init(
            project=_PROJECT,
            name=output.name,
            id=path.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(output),
            config=dict(recipe),
        )

    def add(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
