"""What the decisions of a run depend on, beside weights and moments. It is part of every checkpoint.

A run in which nothing went wrong has none of it, and its checkpoints say nothing of it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any


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


def read_state(document: object) -> RunState:
    """From what `to_document` gave, by way of JSON; a ValueError if it is something else."""
    if not isinstance(document, dict) or not document.keys() <= {"skipped", "recent", "levels"}:
        raise ValueError("no state of a run")
    skipped, recent, levels = document.get("skipped", 0), document.get("recent", []), document.get("levels", {})
    if type(skipped) is not int or skipped < 0 or not isinstance(recent, list) or not isinstance(levels, dict):
        raise ValueError("no state of a run")
    for pair in recent:
        if not isinstance(pair, list) or len(pair) != 2 or not all(_is_finite_float(number) for number in pair):
            raise ValueError("no losses and norms of a run")
    if not all(layer.isdecimal() and type(level) is int and level > 0 for layer, level in levels.items()):
        raise ValueError("no levels of layers")
    return RunState(
        skipped,
        tuple((float(loss), float(norm)) for loss, norm in recent),
        {int(layer): level for layer, level in levels.items()},
    )


def _is_finite_float(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
