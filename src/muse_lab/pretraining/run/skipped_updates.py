"""Which updates are skipped: those whose loss or gradient is not finite, or far above what it was of late.

A decision depends on the loss, the norm of the gradients and the state of the run, which all ranks have and every
checkpoint keeps: a run that goes on decides as before. The state is that of `state.py`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

from muse_lab.pretraining.run.state import RunState

WINDOW = 128
"""Updates that a loss and a norm are compared with."""
FEWEST = 32
"""Before there are so many, nothing is an outlier."""


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
