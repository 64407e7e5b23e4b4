"""Means over samples, and how sure they are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Mean(NamedTuple):
    mean: float
    standard_error: float | None
    """over samples; None where there is but one"""

    @classmethod
    def of(cls, samples: Sequence[float]) -> Mean:
        if len(samples) < 2:
            return cls(samples[0], None)
        return cls(statistics.fmean(samples), statistics.stdev(samples) / math.sqrt(len(samples)))

    @classmethod
    def of_differences(cls, samples: Sequence[float], others: Sequence[float]) -> Mean:
        """Of each sample less its other: what the two have in common is in no standard error."""
        return cls.of([sample - other for sample, other in zip(samples, others, strict=True)])

    def __str__(self) -> str:
        return f"{self.mean:.4f}{self._error}"

    def signed(self) -> str:
        return f"{self.mean:+.4f}{self._error}"

    @property
    def _error(self) -> str:
        return "" if self.standard_error is None else f" ± {self.standard_error:.4f}"
