"""Means and shares over samples, with their standard errors and intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Mean(NamedTuple):
    mean: float
    standard_error: float | None
    """over samples; None for a single sample"""

    @classmethod
    def of(cls, samples: Sequence[float]) -> Mean:
        if len(samples) < 2:
            return cls(samples[0], None)
        return cls(statistics.fmean(samples), statistics.stdev(samples) / math.sqrt(len(samples)))

    @classmethod
    def of_differences(cls, samples: Sequence[float], others: Sequence[float]) -> Mean:
        """The mean of paired differences: variation that both share is not in the standard error."""
        return cls.of([sample - other for sample, other in zip(samples, others, strict=True)])

    @classmethod
    def of_ratio(cls, totals: Sequence[float], numbers: Sequence[float]) -> Mean:
        """The sum of totals over the sum of numbers, with one of each for every sample.

        The standard error is that of a ratio, linearised: the items of one sample need not be independent.
        """
        mean, samples = sum(totals) / sum(numbers), len(totals)
        if samples < 2:
            return cls(mean, None)
        rest = sum((total - mean * number) ** 2 for total, number in zip(totals, numbers, strict=True))
        return cls(mean, math.sqrt(rest * samples / (samples - 1)) / sum(numbers))

    def __str__(self) -> str:
        return self.shown(".4f")

    def signed(self) -> str:
        return self.shown("+.4f")

    def shown(self, form: str, *, scale: float = 1) -> str:
        """`scale` times the mean, ± its standard error."""
        error = "" if self.standard_error is None else f" ± {scale * self.standard_error:{form.lstrip('+')}}"
        return f"{scale * self.mean:{form}}{error}"


def mean_of_each(measured: Collection[Mapping[str, float]]) -> dict[str, float]:
    """Each measure by name, averaged over those that have it."""
    names = dict.fromkeys(name for measures in measured for name in measures)
    return {name: statistics.fmean(measures[name] for measures in measured if name in measures) for name in names}


WILSON = "In parentheses: the 95% Wilson interval, for independent questions."


class Share(NamedTuple):
    """The share of right answers."""

    right: int
    number: int

    @property
    def value(self) -> float:
        return self.right / self.number

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% Wilson interval, which has a width even if all are right or none is."""
        z = statistics.NormalDist().inv_cdf(0.975)
        centre = (self.right + z * z / 2) / (self.number + z * z)
        half = z / (self.number + z * z) * math.sqrt(self.right * (1 - self.value) + z * z / 4)
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f}% ({100 * low:.1f} to {100 * high:.1f})"
