"""What a run measures at every step: a line of JSON each, and TensorBoard where it is asked for."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from muse_attention.extras import how_to_install
from muse_attention.files import errors_naming, replace_file, sync
from muse_attention.strict_json import parse_json

FILE, BOARD = "metrics.jsonl", "tensorboard"


@dataclass(frozen=True)
class Step:
    """One update, counted from 1."""

    step: int
    loss: float
    """in nats for each token, before the update"""
    learning_rate: float
    gradient_norm: float
    """before clipping"""
    attention: str
    tokens: int
    """seen so far"""
    tokens_per_second: float
    rse: dict[int, float] = field(default_factory=dict)
    """relative squared error of the attention by layer, where it was measured"""
    attention_means: dict[str, float] = field(default_factory=dict)
    """all measures of `fidelity.Fidelity` averaged over layers, where they were measured: the error and its tail, pairs
    and keys per query, share of queries that retrieve, share of heads at their budget"""
    answers_loss: float | None = None
    """in nats for each token of a uid that is imported, where needles are learnt from and it was measured"""

    @property
    def mean_rse(self) -> float | None:
        return sum(self.rse.values()) / len(self.rse) if self.rse else None


class Metrics:
    """Lines of steps after `step`, as of a run that was killed behind it, are forgotten.

    `on_broken` hears of lines before it that cannot be read, and are left out.

    JSON has no number for what is not finite, as an error behind exact attention that is zero: it is left out.
    """

    def __init__(
        self,
        output: Path,
        step: int,
        *,
        tensorboard: bool = False,
        on_broken: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._path = output / FILE
        lines = _read_lines(self._path, on_broken)
        replace_file(self._path, "".join(line for number, line in lines.items() if number <= step))
        self._board = _open_board(output / BOARD, step) if tensorboard else None

    def add(self, step: Step) -> None:
        values = asdict(step)
        for name in ("rse", "attention_means"):
            values[name] = {key: number for key, number in values[name].items() if math.isfinite(number)}
        if step.answers_loss is not None and not math.isfinite(step.answers_loss):
            values["answers_loss"] = None
        values = {name: value for name, value in values.items() if value not in (None, {})}
        with errors_naming(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values, allow_nan=False) + "\n")
        if self._board is not None:
            for name in ("loss", "learning_rate", "gradient_norm", "tokens_per_second"):
                self._board.add_scalar(name, values[name], step.step)
            if "answers_loss" in values:
                self._board.add_scalar("answers_loss", step.answers_loss, step.step)
            for layer, error in step.rse.items():
                self._board.add_scalar(f"rse/layer {layer}", error, step.step)
            for name, mean in step.attention_means.items():
                self._board.add_scalar(f"attention/{name}", mean, step.step)

    def sync(self) -> None:
        """Return when all lines are on the disk."""
        with errors_naming(self._path):
            sync(self._path)
            sync(self._path.parent)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def read_metrics(output: Path, on_broken: Callable[[str], None] = lambda message: None) -> list[dict[str, Any]]:
    """Every line that can be read, by step; `on_broken` hears of the others."""
    return [parse_json(line) for line in _read_lines(output / FILE, on_broken).values()]


def check_tensorboard() -> None:
    """An ImportError of one line if it is not there."""
    try:
        importlib.import_module("tensorboard")
    except ImportError:
        raise ImportError(f"TensorBoard is not installed: {how_to_install('tensorboard')}, or leave it out") from None


def _read_lines(path: Path, on_broken: Callable[[str], None]) -> dict[int, str]:
    """By step, in order. An incomplete last line is left by a run that was killed, and is ignored."""
    if not path.exists():
        return {}
    found: dict[int, str] = {}
    broken = []
    with errors_naming(path):
        *lines, torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate([*lines, torn], start=1):
        step = _step_of(line)
        if step is not None and step not in found:
            found[step] = f"{line}\n"
        elif number <= len(lines):
            broken.append(number)
    if broken:
        first = f"line {broken[0]}" if len(broken) == 1 else f"line {broken[0]} and {len(broken) - 1} more"
        on_broken(f"{path} is damaged: {first} cannot be read and left out; all others are kept")
    return dict(sorted(found.items()))


def _step_of(line: str) -> int | None:
    """None for a line that is broken."""
    try:
        step = parse_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int and step >= 1 else None


def _open_board(folder: Path, step: int) -> Any:
    check_tensorboard()
    return importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder), purge_step=step + 1)
