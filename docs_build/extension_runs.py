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
EARLIER = FOLDER / "tolerance-0.1"
"""Earlier runs, when the default had that tolerance."""
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
    """of the loss, in percent, of each seed; of the means, where exact attention was not trained with each seed; none
    where it was not trained on as many tokens"""

    @property
    def gap(self) -> str:
        if not self.gaps:
            return ""
        if len(self.gaps) == 1:
            return f"{self.gaps[0]:+.2f}%"
        return f"{mean(self.gaps):+.2f} ± {stdev(self.gaps) / len(self.gaps) ** 0.5:.2f}%"


def read_runs(folder: Path = FOLDER) -> list[Run]:
    """All that are recorded there: of one model and one setting, but for what a `Run` names."""
    runs = {path: _read(path) for path in sorted(folder.glob("*.json"))}
    if len({run.others for run in runs.values()}) > 1:
        raise ValueError(f"{folder}: runs of several models or settings")
    if len({(run.kind, run.seed) for run in runs.values()}) < len(runs):
        raise ValueError(f"{folder}: two records of one run")
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
        losses = {run.seed: run.after["all"] for run in of_kind}
        of_exact = {seed: run.after["all"] for (seed, tokens), run in exact.items() if tokens == kind[1]}
        if kind[::2] == (EXACT, 0) or not of_exact:
            gaps = []
        elif losses.keys() <= of_exact.keys():
            gaps = [100 * (loss / of_exact[seed] - 1) for seed, loss in losses.items()]
        else:
            gaps = [100 * (mean(losses.values()) / mean(of_exact.values()) - 1)]
        kinds.append(Kind(of_kind, speed, exact_speed, gaps))
    return kinds


def read_compared() -> tuple[Kind, Kind, Kind]:
    """Exact training, the default, and the default with a last tenth of exact updates, on the same tokens."""
    kinds = group(read_runs())
    tokens = next(kind.runs[0].tokens for kind in kinds if kind.runs[0].attention == EXACT)
    exact, default, with_tail = (
        next(kind for kind in kinds if kind.runs[0].kind == (attention, tokens, tail))
        for attention, tail in ((EXACT, 0), (DEFAULT, 0), (DEFAULT, 0.1))
    )
    return exact, default, with_tail
