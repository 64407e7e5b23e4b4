"""Runs of `examples/extend_context.py` that are recorded, and what several seeds of one kind have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from docs_build.records import GPU, RECORDS
from muse_attention.sizes import parse_size

FOLDER = RECORDS / "extension"
EXACT, DEFAULT, PAPER = "exact", "muse", "muse:paper"
_OF_RUN = ("attention", "seed", "tokens", "exact_tail")


class Run(NamedTuple):
    """One training run."""

    attention: str
    seed: int
    tokens: int
    exact_tail: float
    tokens_per_second: float
    before: dict[str, float]
    """held-out loss under exact attention, by positions"""
    after: dict[str, float]
    on_the_way: list[tuple[int, float]]
    """tokens so far, and the held-out loss over all positions"""
    others: str
    """all other settings"""

    @property
    def kind(self) -> tuple[str, int, float]:
        """What runs of several seeds share."""
        return self.attention, self.tokens, self.exact_tail


class Kind(NamedTuple):
    """Runs that differ in their seed alone, against exact training with the same seeds and tokens."""

    runs: list[Run]
    speed: float
    exact_speed: float
    gaps: list[float]
    """of the loss, in percent; none where exact attention was not trained on as many tokens"""

    @property
    def gap(self) -> str:
        if not self.gaps:
            return ""
        if len(self.gaps) == 1:
            return f"{self.gaps[0]:+.2f}%"
        return f"{mean(self.gaps):+.2f} ± {stdev(self.gaps) / len(self.gaps) ** 0.5:.2f}%"


def read_runs() -> list[Run]:
    """All that are recorded: of one model and one setting, but for what a `Run` names."""
    runs = {path: _read(path) for path in sorted(FOLDER.glob("*.json"))}
    if len({run.others for run in runs.values()}) > 1:
        raise ValueError(f"{FOLDER}: runs of several models or settings")
    if len({(run.kind, run.seed) for run in runs.values()}) < len(runs):
        raise ValueError(f"{FOLDER}: two records of one run")
    return list(runs.values())


def _read(path: Path) -> Run:
    result: dict[str, Any] = json.loads(path.read_text())
    arguments, measured = result["arguments"], result["held_out"]
    rows = arguments["batch"]
    if result["machine"] != GPU:
        raise ValueError(f"{path}: not of an {GPU}, as the page says")
    return Run(
        arguments["attention"], arguments["seed"], parse_size(arguments["tokens"]), arguments.get("exact_tail", 0),
        result["tokens_per_second"], measured[0]["loss"], measured[-1]["loss"],
        [(one["update"] * rows * parse_size(arguments["length"]), one["loss"]["all"]) for one in measured],
        str([(name, setting) for name, setting in arguments.items() if name not in _OF_RUN]),
    )  # fmt: skip


def group(runs: Sequence[Run]) -> list[Kind]:
    """Exact training first, then the default, then all others."""
    exact = {(run.seed, run.tokens): run for run in runs if run.kind[::2] == (EXACT, 0)}
    exact_speed = mean(run.tokens_per_second for run in exact.values())
    kinds = []
    for kind in sorted({run.kind for run in runs}, key=lambda kind: (kind[0] != EXACT, kind[0] != DEFAULT, kind)):
        of_kind = [run for run in runs if run.kind == kind]
        speed = mean(run.tokens_per_second for run in of_kind)
        # (Updates of the tail have the speed of exact attention.)
        speed = 1 / ((1 - kind[2]) / speed + kind[2] / exact_speed)
        pairs = [(run, exact[run.seed, run.tokens]) for run in of_kind if (run.seed, run.tokens) in exact]
        gaps = [100 * (run.after["all"] / other.after["all"] - 1) for run, other in pairs if run is not other]
        kinds.append(Kind(of_kind, speed, exact_speed, gaps))
    return kinds


def find(kinds: Sequence[Kind], attention: str) -> Kind:
    """Of as many tokens as exact training had, and without a tail."""
    tokens = next(kind.runs[0].tokens for kind in kinds if kind.runs[0].attention == EXACT)
    return next(kind for kind in kinds if kind.runs[0].kind == (attention, tokens, 0))


def read_pair() -> tuple[Kind, Kind]:
    """Exact training and the default, on the same tokens."""
    kinds = group(read_runs())
    return find(kinds, EXACT), find(kinds, DEFAULT)


def after_the_same_time() -> float:
    """Percent by which the loss of the default is lower where it was trained for as long, on more tokens."""
    runs = read_runs()
    longest = max((run for run in runs if run.kind[::2] == (DEFAULT, 0)), key=lambda run: run.tokens)
    exact = next(run for run in runs if run.kind[::2] == (EXACT, 0) and run.seed == longest.seed)
    seconds = [run.on_the_way[-1][0] / run.tokens_per_second for run in (longest, exact)]
    if not 0.95 < seconds[0] / seconds[1] < 1.05:
        raise ValueError(f"{FOLDER}: {seconds[0]:.0f} s of {longest.attention} are not the {seconds[1]:.0f} s of exact")
    return 100 * (1 - longest.after["all"] / exact.after["all"])
