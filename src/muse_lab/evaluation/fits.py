"""Curves through measurements: power laws, the clusters one method needs for the error of another, and the loss that
no context removes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PowerLaw:
    """`factor * x ** exponent`"""

    factor: float
    exponent: float

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> PowerLaw:
        """Least squares of the logarithms."""
        if len(points) < 2:
            raise ValueError(f"a power law needs two points, not {len(points)}")
        x, y = np.log(np.array(points, dtype=float)).T
        exponent, logarithm = np.polyfit(x, y, 1)
        return cls(float(np.exp(logarithm)), float(exponent))

    def __call__(self, x: float) -> float:
        return self.factor * x**self.exponent

    def r_squared(self, points: Sequence[tuple[float, float]]) -> float:
        """The share of the variance of the logarithms that it explains."""
        logarithms = np.log([y for _, y in points])
        unexplained = logarithms - np.log([self(x) for x, _ in points])
        variance = float(np.square(logarithms - logarithms.mean()).sum())
        return 1 - float(np.square(unexplained).sum()) / variance if variance else 1.0

    def where(self, y: float) -> float:
        """The `x` at which it has the value `y`."""
        return float((y / self.factor) ** (1 / self.exponent))


@dataclass(frozen=True)
class Decay:
    """`irreducible + factor * x ** -exponent`: how a mean loss falls with the context."""

    irreducible: float
    factor: float
    exponent: float

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Decay:
        """Least squares: linear in two of the parameters, and a search over the exponent."""
        if len(points) < 3:
            raise ValueError(f"a decay needs three points, not {len(points)}")
        x, y = np.array(points, dtype=float).T
        best: tuple[float, Decay] | None = None
        for exponent in np.geomspace(0.02, 2, 200):
            columns = np.stack([np.ones_like(x), x**-exponent], axis=1)
            (irreducible, factor), *_ = np.linalg.lstsq(columns, y, rcond=None)
            error = float(np.square(columns @ (irreducible, factor) - y).sum())
            if irreducible >= 0 and factor >= 0 and (best is None or error < best[0]):
                best = error, cls(float(irreducible), float(factor), float(exponent))
        if best is None:
            return cls(float(y.min()), 0.0, 1.0)
        return best[1]
