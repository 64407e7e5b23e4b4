"""What MuSe and two baselines of equal sparsity cost on synthetic data, and where they err."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from muse_attention.baselines import exact_attention
from muse_attention.config import MuSeConfig
from muse_attention.fidelity.error import compare, future_influence, position_error
from muse_attention.registry import get_attention
from muse_lab.benchmark.matched import MATCHED_KINDS, at_matched_sparsity
from muse_lab.benchmark.timing import time_interleaved
from muse_lab.benchmark.workload import Workload, sdpa
from muse_lab.records.earlier_results import WAY_OUT
from muse_lab.records.stored_results import OnStep, StoredResults

REPEATS = 3
BINS = 128
STEPS = 1 + REPEATS + 1 + len(MATCHED_KINDS)
"""Warm-up, repeats, and the errors of exact attention and of each other."""


@dataclass(frozen=True)
class ErrorSettings:
    length: int = 16384
    heads: int = 2
    head_dim: int = 64
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse what could not run, or would show nothing."""
        if self.heads < 1:
            raise ValueError(f"heads is {self.heads}; it must be at least 1")
        if self.length < 2 * self.block_size:
            raise ValueError(
                f"a length of {self.length} gives too few blocks to show anything; use at least {2 * self.block_size}"
            )

    @property
    def config(self) -> MuSeConfig:
        """MuSe with the paper's sizes: the baselines have its own block, and retrieve as much."""
        return MuSeConfig.paper_sizes(self.length)

    @property
    def block_size(self) -> int:
        return self.config.block_size


@dataclass(frozen=True)
class Line:
    """Of one attention."""

    kind: str
    attention: str
    """its name, with settings"""
    forward_backward_seconds: float
    speedup: float
    """time of `scaled_dot_product_attention` over its own"""
    relative_squared_error: float
    cosine: float
    future_influence: float
    """at three quarters of the length"""
    error_by_position: list[float]
    """relative squared error, averaged over heads and over each bin of positions"""


@dataclass
class Errors(StoredResults):
    command = "muse errors"
    way_out = WAY_OUT
    packages = ()

    settings: ErrorSettings
    bin_centres: list[float] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    @property
    def named(self) -> list[str]:
        return [line.attention for line in self.lines]


def measure_errors(results: Errors, *, on_step: OnStep = lambda description, finished: None) -> None:
    """Compare causal attentions with exact attention on clustered synthetic data, in float32, and add what is found."""
    settings = results.settings
    length = settings.length
    work = Workload.create(
        batch=1,
        heads=settings.heads,
        length=length,
        head_dim=settings.head_dim,
        dtype=torch.float32,
        device=settings.device,
        is_causal=True,
    )
    names = {"exact": "exact"} | {kind: at_matched_sparsity(kind, length) for kind in MATCHED_KINDS}
    names["muse"] = f"muse:{settings.config}"
    attentions = {kind: get_attention(name) for kind, name in names.items()}
    steps = itertools.count()

    def begin_round(number: int) -> None:
        on_step(f"times: repeat {number} of {REPEATS}" if number else "times: warm-up", next(steps))

    timed = [sdpa if kind == "exact" else attention for kind, attention in attentions.items()]
    times = time_interleaved(timed, work, REPEATS, begin_round)
    seconds = {kind: measured.forward_backward_median for kind, measured in zip(attentions, times, strict=True)}
    bins = torch.arange(length) * min(BINS, length) // length
    with torch.no_grad():
        exact_out, exact_lse = exact_attention(work.query, work.key, work.value, is_causal=True, return_lse=True)
    for kind, attention in attentions.items():
        on_step(f"error of {names[kind]}", next(steps))
        with torch.no_grad():
            out, lse = attention(work.query, work.key, work.value, is_causal=True, return_lse=True)
        fidelity = compare(out, exact_out, lse, exact_lse).pooled()
        results.lines.append(
            Line(
                kind=kind,
                attention=names[kind],
                forward_backward_seconds=seconds[kind],
                speedup=seconds["exact"] / seconds[kind],
                relative_squared_error=fidelity["relative_squared_error"],
                cosine=fidelity["cosine"],
                future_influence=future_influence(attention, work.query, work.key, work.value, 3 * length // 4),
                error_by_position=_mean_in_bins(position_error(out, exact_out).mean((0, 1)).cpu(), bins),
            )
        )
    results.bin_centres = _mean_in_bins(torch.arange(length).double(), bins)


def _mean_in_bins(series: Tensor, bins: Tensor) -> list[float]:
    totals = torch.zeros(int(bins[-1]) + 1, dtype=series.dtype).index_add_(0, bins, series)
    means: list[float] = (totals / torch.bincount(bins)).tolist()
    return means
