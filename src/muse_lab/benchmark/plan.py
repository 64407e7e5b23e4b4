"""The cases of a run, and those still to do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from muse_attention.baselines.flash_sparse import check_flash_sparse
from muse_attention.baselines.flex import check_flex
from muse_attention.baselines.nsa import check_nsa
from muse_attention.registry import get_attention
from muse_lab.benchmark.captured import CapturesFile, create_workload
from muse_lab.benchmark.request import BenchmarkRequest, Shape
from muse_lab.benchmark.results import BenchmarkResults, BenchmarkSettings
from muse_lab.benchmark.workload import Workload


@dataclass(frozen=True)
class Plan:
    """The cases to run under the same settings; those of one shape are next to each other."""

    settings: BenchmarkSettings
    requests: tuple[BenchmarkRequest, ...]
    captures: CapturesFile | None = None
    """the captured heads that the settings name"""

    @classmethod
    def at_lengths(
        cls,
        settings: BenchmarkSettings,
        lengths: Sequence[int],
        attentions: Sequence[str],
        captures: CapturesFile | None = None,
    ) -> Self:
        """Every attention at every length."""
        shapes = [settings.shape(length) for length in lengths]
        requests = tuple(BenchmarkRequest(attention, shape) for shape in shapes for attention in attentions)
        return cls(settings, requests, captures)

    def __post_init__(self) -> None:
        """Refuse requests that cannot run, before any of them does."""
        settings = self.settings
        for request in self.requests:
            get_attention(request.full_name)
            _check_peer(request, settings.device, is_causal=settings.causal)
            if self.captures is not None:
                self.captures.check(request.shape)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(request.shape.length for request in self.requests))

    @property
    def attentions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(request.attention for request in self.requests))

    def workload(self, shape: Shape) -> Workload:
        settings = self.settings
        place = {"dtype": settings.dtype, "device": settings.device}
        return create_workload(self.captures, shape, **place, is_causal=settings.causal, seed=settings.seed)

    def missing(self, results: BenchmarkResults) -> list[BenchmarkRequest]:
        """The cases that `results` does not have yet."""
        done = {case.request for case in results.cases}
        return [request for request in self.requests if request not in done]

    def without_stages(self, results: BenchmarkResults) -> list[BenchmarkRequest]:
        """The cases whose stages `results` does not have yet; on a CPU they are not measured."""
        if self.settings.device != "cuda":
            return []
        done = {case.request for case in results.cases if case.stage_milliseconds is not None}
        return [request for request in self.requests if request not in done]

    def steps(self, results: BenchmarkResults) -> int:
        """Steps still to do: for each case warm-up, repeats, fidelity and memory, and for each case its stages."""
        steps_per_case = 1 + self.settings.repeats + 1 + int(self.settings.memory)
        return len(self.missing(results)) * steps_per_case + len(self.without_stages(results))


def by_shape(requests: Sequence[BenchmarkRequest]) -> itertools.groupby[Shape, BenchmarkRequest]:
    """Requests in their order, those of one shape together."""
    return itertools.groupby(requests, key=lambda request: request.shape)


def _check_peer(request: BenchmarkRequest, device: str, *, is_causal: bool) -> None:
    """Raise ValueError if an attention of another library cannot serve the request."""
    kind, _, _ = request.attention.partition(":")
    if kind == "flex_attention":
        check_flex(device)
    elif kind == "flash_sparse_attn":
        check_flash_sparse(device)
    elif kind == "nsa":
        check_nsa(device, request.shape.heads, request.shape.key_heads, is_causal=is_causal)
