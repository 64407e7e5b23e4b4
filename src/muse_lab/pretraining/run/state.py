"""The state of a run beside weights and moments, and the updates that are skipped.

The state is part of every checkpoint, unless nothing went wrong so far. An update is skipped if its loss or gradient is
not finite, or far above its recent values. A decision depends on the loss, the norm of the gradients and the state,
which all ranks have: a resumed run decides as before.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from muse_lab.records.dataclass_json import from_json

WINDOW = 128
"""Recent updates that a loss and a norm are compared with."""
FEWEST = 32
"""Minimum number of recent updates before one can be an outlier."""


@dataclass(frozen=True)
class RunState:
    skipped: int = 0
    """number of skipped updates"""
    recent: tuple[tuple[float, float], ...] = ()
    """loss and gradient norm of the last updates in which both were finite, if outliers are skipped"""
    levels: dict[int, int] = field(default_factory=dict)
    """of the layers whose attention is tighter than the recipe's, by layer, from 1 on"""

    def to_document(self) -> dict[str, Any]:
        """The state for a checkpoint, without fields that are as at the beginning of a run."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}


def read_state(document: Any) -> RunState:
    """The state from what `to_document` returned, after finite JSON; raises ValueError for anything else."""
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
        sigma: largest number of standard deviations above the mean of the last updates; 0 for no limit
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
    """The state after an update that was made or skipped. It counts outliers, so a new level is soon none."""
    recent = state.recent
    if sigma and math.isfinite(loss) and math.isfinite(norm):
        recent = (*recent, (loss, norm))[-WINDOW:]
    if recent is state.recent and not is_skipped:
        return state
    return dataclasses.replace(state, skipped=state.skipped + is_skipped, recent=recent)
