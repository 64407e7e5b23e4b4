"""The learning rate of an update, and the number of updates with exact attention."""

from __future__ import annotations

import math


def learning_rate(step: int, *, steps: int, warmup: int, peak: float, final: float) -> float:
    """The learning rate of an update, counted from 0: linear up to `peak`, then half a cosine down to `final * peak`.

    Update `warmup - 1` is the first at the peak. The last update is just above the final rate, as the cosine ends
    where update `steps` would be. Further updates have the final rate: moments are kept, so nothing warms up again.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)


def exact_steps(steps: int, share: float) -> int:
    return math.ceil(round(steps * share, 6))  # 0.001 of 1000 is 1, despite rounding errors
