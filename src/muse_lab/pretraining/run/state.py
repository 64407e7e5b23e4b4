"""What the decisions of a run depend on, beside weights and moments. It is part of every checkpoint.

A run in which nothing went wrong has none of it, and its checkpoints say nothing of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from muse_lab.records.dataclass_json import from_json


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
