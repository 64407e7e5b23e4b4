"""The results of a benchmark, and their JSON file."""

from __future__ import annotations

from dataclasses import dataclass, field

from muse_lab.benchmark.captured import CapturedData
from muse_lab.benchmark.request import BenchmarkRequest, Shape
from muse_lab.benchmark.timing import Times
from muse_lab.benchmark.workload import CallSettings
from muse_lab.records.stored_results import StoredResults


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings(CallSettings):
    """Settings that all cases of a file share, except what the sweep varies."""

    batch: int
    memory: bool
    sweep: str | None = None
    """its name in `SWEEPS`, where the cases are those of a sweep"""
    captures: CapturedData | None = None
    """the captured heads that are measured on; None: synthetic data"""

    def shape(self, length: int) -> Shape:
        return Shape(length, self.heads, self.key_heads, self.head_dim, self.batch)


@dataclass(frozen=True)
class Case:
    """One attention on one shape, and the baseline, whose runs took turns with those of all attentions."""

    request: BenchmarkRequest
    attention: str
    """the name with the settings it had at this length: `moba:L4kB256R1`"""
    times: Times
    sdpa_times: Times
    fidelity: dict[str, float]
    """measures of `fidelity.Fidelity` and `fidelity.gradients.GradientErrors`, against exact attention in the same
    dtype, averaged over heads. Those of retrieval are absent if the attention retrieves nothing, the lse gap if it
    returns no lse, and those of gradients in records of earlier versions."""
    extra_memory_bytes: int | None
    sdpa_extra_memory_bytes: int | None
    sdpa_backend: str
    """the operator of PyTorch that the baseline ran through"""
    stage_milliseconds: dict[str, float] | None = None
    """of one forward and backward pass, by `STAGES`, where they were measured"""

    @property
    def shape(self) -> Shape:
        return self.request.shape

    @property
    def spread(self) -> float | None:
        """The spread of the times or of the baseline's, whichever is larger; None for one repeat."""
        known = [spread for spread in (self.times.spread, self.sdpa_times.spread) if spread is not None]
        return max(known, default=None)

    @property
    def speedup_forward(self) -> float:
        return self.sdpa_times.forward_median / self.times.forward_median

    @property
    def speedup_forward_backward(self) -> float:
        return self.sdpa_times.forward_backward_median / self.times.forward_backward_median


@dataclass
class BenchmarkResults(StoredResults):
    command = "a benchmark"
    packages = ()

    settings: BenchmarkSettings
    cases: list[Case] = field(default_factory=list)

    @property
    def named(self) -> list[str]:
        return [case.attention for case in self.cases]
