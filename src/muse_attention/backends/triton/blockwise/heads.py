"""The heads of a call: what every pass over the far field reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from muse_attention.backends.triton.blockwise.geometry import Geometry
from muse_attention.backends.triton.blockwise.sorting import Order
from muse_attention.backends.triton.numbers import accumulator, fitting, padded


@dataclass(frozen=True)
class Heads:
    queries: Tensor
    """(H, N, D), unscaled"""
    keys: Tensor
    """(G, N, D)"""
    values: Tensor
    """(G, N, Dv)"""
    centroids: Tensor
    """(H, S, Q, D), of queries"""
    key_offset: Tensor
    """(G, D), which is subtracted from the means of keys"""
    order: Order
    geometry: Geometry
    scale: float

    @property
    def compiled(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        return {"D": self.keys.shape[-1], "DV": self.values.shape[-1], "ACC": accumulator(self.keys.dtype)}

    def fit(
        self, launch: dict[int, dict[str, int]], by_registers: dict[int, dict[str, int]] | None = None
    ) -> dict[str, int]:
        """The launch settings, with no more columns at a time than there are."""
        fit = fitting(launch, self.keys.shape[-1], self.values.shape[-1], self.keys.dtype, by_registers)
        columns = padded(self.geometry.columns)
        return {name: min(number, columns) if name == "COLUMNS" else number for name, number in fit.items()}
