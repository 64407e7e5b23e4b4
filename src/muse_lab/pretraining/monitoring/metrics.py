"""Metrics of every step: a line of JSON each, and the boards of `boards.py` if they are requested."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from muse_lab.pretraining.monitoring.boards import Boards
from muse_lab.records.files import errors_naming, replace_file, sync
from muse_lab.records.untrusted import parse_json, read_regular

FILE = "metrics.jsonl"
LARGEST_METRICS = 2**30
"""Bytes: a million updates of a thousand each."""
EXACT_END = "_exact"
"""Suffix of names of evaluation results under exact attention, if the update had another attention."""
_GROUPS = {"rse": "rse/layer ", "attention_means": "attention/", "answers": "answers/", "evaluation": "evaluation/"}
"""Groups of scalars, and the prefixes of their names on a board."""
_SCALARS = ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "answers_loss")


@dataclass(frozen=True)
class Step:
    """One update, counted from 1."""

    step: int
    loss: float
    """in nats per token, before the update"""
    learning_rate: float
    gradient_norm: float
    """before clipping"""
    attention: str
    tokens: int
    """seen so far"""
    tokens_per_second: float
    rse: dict[int, float] = field(default_factory=dict)
    """relative squared error of the attention by layer, if it was measured"""
    attention_means: dict[str, float] = field(default_factory=dict)
    """all measures of `fidelity.Fidelity` averaged over layers, if they were measured: the error and its tail, pairs
    and keys per query, share of queries that retrieve"""
    answers_loss: float | None = None
    """in nats per token of imported uids, if the run has needles and measured it"""
    answers: dict[str, float] = field(default_factory=dict)
    """the same for first and for later tokens of uids, and by the distance to the needle's definition"""
    evaluation: dict[str, float] = field(default_factory=dict)
    """results of `held_out.py`, if the model was evaluated, before the update"""
    tightened: dict[int, str] = field(default_factory=dict)
    """layers that have a tighter attention from the next update on, if errors are limited and were measured"""
    skipped: str | None = None
    """why the update was not made; None if it was"""

    @property
    def mean_rse(self) -> float | None:
        return sum(self.rse.values()) / len(self.rse) if self.rse else None


class Metrics:
    """The metrics of a run. Lines after `step`, from a run that was killed later, are dropped.

    `on_broken` is called with a message about earlier lines that cannot be read, and are left out.

    Numbers that are not finite, such as the loss of a skipped update, are left out, because JSON does not have them.
    """

    def __init__(
        self,
        output: Path,
        step: int,
        *,
        boards: Boards | None = None,
        on_broken: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._path = output / FILE
        lines = _read_lines(self._path, on_broken)
        replace_file(self._path, "".join(line for number, line in lines.items() if number <= step))
        self._boards = boards

    def add(self, step: Step) -> None:
        values = asdict(step)
        for name in _GROUPS:
            values[name] = {key: number for key, number in values[name].items() if math.isfinite(number)}
        for name in ("loss", "gradient_norm", "answers_loss"):
            if values[name] is not None and not math.isfinite(values[name]):
                values[name] = None
        values = {name: value for name, value in values.items() if value not in (None, {})}
        with errors_naming(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values, allow_nan=False) + "\n")
        if self._boards:
            scalars = {name: values[name] for name in _SCALARS if name in values}
            for group, begin in _GROUPS.items():
                scalars |= {f"{begin}{name}": value for name, value in values.get(group, {}).items()}
            scalars |= {"skipped": 1} if "skipped" in values else {}
            self._boards.add(scalars, step.step)

    def sync(self) -> None:
        """Flush all lines to disk."""
        with errors_naming(self._path):
            sync(self._path)
            sync(self._path.parent)

    def close(self) -> None:
        if self._boards:
            self._boards.close()


def read_metrics(output: Path, on_broken: Callable[[str], None] = lambda message: None) -> list[dict[str, Any]]:
    """Every line that can be read, by step; `on_broken` is called with a message about the others."""
    return [parse_json(line) for line in _read_lines(output / FILE, on_broken).values()]


def _read_lines(path: Path, on_broken: Callable[[str], None]) -> dict[int, str]:
    """Lines by step, in order. An incomplete last line, left by a run that was killed, is ignored."""
    if not path.exists():
        return {}
    by_step: dict[int, str] = {}
    broken = []
    with errors_naming(path):
        *lines, torn = read_regular(path, LARGEST_METRICS).decode(errors="replace").split("\n")
    for number, line in enumerate([*lines, torn], start=1):
        step = _step_of(line)
        if step is not None and step not in by_step:
            by_step[step] = f"{line}\n"
        elif number <= len(lines):
            broken.append(number)
    if broken:
        first = f"line {broken[0]}" if len(broken) == 1 else f"line {broken[0]} and {len(broken) - 1} more"
        on_broken(f"{path} is damaged: {first} cannot be read and left out; all others are kept")
    return dict(sorted(by_step.items()))


def _step_of(line: str) -> int | None:
    """The step of a line; None for a line that is broken."""
    try:
        step = parse_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int and step >= 1 else None
