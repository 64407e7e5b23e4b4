"""What changes while a model trains: the learning rate and the attention, each a pure function of the step."""

from __future__ import annotations

import math

EXACT = "exact"


def learning_rate(step: int, *, steps: int, warmup: int, peak: float, final: float) -> float:
    """That of an update, counted from 0: linear up to `peak`, then half a cosine down to `final * peak`.

    Update `warmup - 1` is the first at the peak. The last update is just above the final rate, as the cosine ends
    where update `steps` would be. Further updates have the final rate: moments are kept, so nothing warms up again.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (final + (1 - final) * (1 + math.cos(math.pi * done)) / 2)


def attention_at(step: int, *, steps: int, attention: str, exact_tail: float, further: str = "") -> str:
    """The name of the attention of the global layers: exact in the last `exact_tail` of the updates, rounded up.

    From update `steps` on it is `further`, or, if that is empty, that of update `steps - 1`.
    """
    if step >= steps and further:
        return further
    return EXACT if min(step, steps - 1) >= steps - exact_steps(steps, exact_tail) else attention


def exact_steps(steps: int, exact_tail: float) -> int:
    return math.ceil(round(steps * exact_tail, 6))  # 0.001 of 1000 is 1, whatever floats say
