"""What the decisions of a run depend on, beside weights and moments, and which updates are skipped by it.

The state is part of every checkpoint. A run in which nothing went wrong has none of it, and its checkpoints say nothing
of it. Skipped are updates whose loss or gradient is not finite, or far above what it was of late. A decision depends on
the loss, the norm of the gradients and the state, which all ranks have: a run that goes on decides as before.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from muse_lab.records.dataclass_json import from_json

WINDOW = 128
"""Updates that a loss and a norm are compared with."""
FEWEST = 32
"""Before there are so many, nothing is an outlier."""


@dataclass(frozen=True)
class RunState:
    skipped: int = 0
    """updates that were left out"""
    recent: tuple[tuple[float, float], ...] = ()
    """loss and gradient norm of the last updates whose were finite, where outliers are looked for"""
    levels: dict[int, int] = field(default_factory=dict)
    """of the layers whose attention is tighter than the recipe's, by layer, from 1 on"""

    def to_document(self) -> dict[str, Any]:
        """Without what is as at the beginning of a run."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}


def read_state(document: Any) -> RunState:
    """From what `to_document` gave, by way of finite JSON; a ValueError if it is something else."""
    try:
        state: RunState = from_json(RunState, document)
        if state.skipped < 0 or any(level < 1 for level in state.levels.values()) or document.keys() - vars(state):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError("no state of a run") from None
    return state


def why_skipped(loss: float, norm: float, state: RunState, sigma: float) -> str | None:
    """Why an update is to be skipped, in words; None if it is not.

    Args:
        sigma: standard deviations above the mean of the last updates that are too many; 0 for no limit
    """
    for what, value in (("loss", loss), ("gradient", norm)):
        if not math.isfinite(value):
            return f"its {what} is {value}"
    if not sigma or len(state.recent) < FEWEST:
        return None
    for what, value, before in zip(
        ("loss", "gradient norm"), (loss, norm), zip(*state.recent, strict=True), strict=True
    ):
        mean, deviation = statistics.fmean(before), statistics.pstdev(before)
        if value > mean + sigma * deviation:
            return f"its {what} is {value:.4g}, more than {sigma:g} sigma ({deviation:.2g}) above the mean {mean:.4g}"
    return None


def after_update(state: RunState, loss: float, norm: float, *, is_skipped: bool, sigma: float) -> RunState:
    """The state behind an update that was made or skipped. An outlier counts: a new level is no outlier for long."""
    recent = state.recent
    if sigma and math.isfinite(loss) and math.isfinite(norm):
        recent = (*recent, (loss, norm))[-WINDOW:]
    if recent is state.recent and not is_skipped:
        return state
    return dataclasses.replace(state, skipped=state.skipped + is_skipped, recent=recent)
