"""Metrics on TensorBoard and on Weights & Biases while a run trains. Both are optional packages."""

from __future__ import annotations

import contextlib
import importlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from muse_attention.core.extras import how_to_install
from muse_lab.records.files import replace_file
from muse_lab.records.untrusted import read_regular

TENSORBOARD, WANDB, WANDB_ID = "tensorboard", "wandb", "wandb-id.txt"
"""Names in the folder of a run."""
_NAMES = {TENSORBOARD: "TensorBoard", WANDB: "Weights & Biases"}
_PROJECT = "muse-attention"
_SHOWN = 200
"""Characters of an error of another package."""


def check_installed(name: str) -> None:
    """Raise a one-line ImportError if `TENSORBOARD` or `WANDB` is not installed."""
    try:
        importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{_NAMES[name]} is not installed: {how_to_install(name)}, or leave it out") from None


class Boards:
    """The requested boards. A board that fails is left out from then on, and the run continues."""

    def __init__(
        self,
        names: Iterable[str],
        output: Path,
        step: int,
        recipe: Mapping[str, Any],
        on_broken: Callable[[str], None] = lambda message: None,
    ) -> None:
        """
        Args:
            names: `TENSORBOARD`, `WANDB`
            step: what was written after it is dropped
            on_broken: called with a message about each board that fails
        """
        self._on_broken = on_broken
        self._boards: dict[str, _TensorBoard | _Wandb] = {}
        for name in names:
            with self._leaving_out(name):
                self._boards[name] = _TensorBoard(output, step) if name == TENSORBOARD else _Wandb(output, recipe)

    def add(self, values: Mapping[str, float], step: int) -> None:
        for name, board in list(self._boards.items()):
            with self._leaving_out(name):
                board.add(values, step)

    def close(self) -> None:
        for name, board in list(self._boards.items()):
            with self._leaving_out(name):
                board.close()

    @contextlib.contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of any kind: the packages have errors of their own
            self._boards.pop(name, None)
            reason = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
            self._on_broken(f"{_NAMES[name]} is left out from now on: {reason}")


class _TensorBoard:
    def __init__(self, output: Path, step: int) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(str(output / TENSORBOARD), purge_step=step + 1)

    def add(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run on Weights & Biases, which continues when training is resumed. `WANDB_MODE=offline` needs no network.

    Steps that are made again after a run was killed have the same values as before; Weights & Biases keeps the first.
    """

    def __init__(self, output: Path, recipe: Mapping[str, Any]) -> None:
        path = output / WANDB_ID
        if not path.exists():
            replace_file(path, uuid.uuid4().hex)
        self._run: Any = importlib.import_module(WANDB).init(
            project=_PROJECT,
            name=output.name,
            id=read_regular(path).decode().strip(),
            resume="allow",
            dir=str(output),
            config=dict(recipe),
        )

    def add(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
