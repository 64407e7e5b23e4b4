"""Go through the cases of a plan, writing the results down after each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from muse_attention.baselines import exact_attention
from muse_attention.fidelity.error import measure
from muse_attention.fidelity.gradients import ExactGradients, measure_gradients
from muse_attention.registry import get_attention
from muse_lab.benchmark.memory import MemoryCase, extra_memory_on_cuda, measure_extra_memory
from muse_lab.benchmark.plan import Plan, by_shape
from muse_lab.benchmark.request import BenchmarkRequest, Shape
from muse_lab.benchmark.results import BenchmarkResults, Case
from muse_lab.benchmark.stages import measure_stages
from muse_lab.benchmark.sweeps import format_shape
from muse_lab.benchmark.timing import Times, time_interleaved
from muse_lab.benchmark.workload import SDPA, Workload, sdpa
from muse_lab.records.earlier_results import REMEDY_BY_NAME, check_same
from muse_lab.records.stored_results import OnStep


def start_results(plan: Plan, path: Path, *, overwrite: bool = False, remedy: str = REMEDY_BY_NAME) -> BenchmarkResults:
    """The results in the file if there is one, else empty ones; raises ValueError if they cannot be continued."""
    results = BenchmarkResults.start(plan.settings, path, overwrite=overwrite, remedy=remedy)
    for case in results.cases:
        asked = case.request
        check_same(path, {asked.attention: case.attention}, {asked.attention: asked.full_name}, remedy=remedy)
    return results


def run_plan(
    plan: Plan, results: BenchmarkResults, path: Path, *, on_step: OnStep = lambda description, finished: None
) -> None:
    """Add each case that `results` does not have yet, then the stages of each, and write the file after each.

    The stages come last, so that nothing is timed after profiling. They begin with the last shape, whose data are still
    in memory: for a long sequence they take a minute to make.
    """
    run = _Run(plan, results, path, on_step)
    for shape, requests in by_shape(plan.missing(results)):
        run.measure_cases(shape, list(requests))
    for shape, requests in by_shape(plan.without_stages(results)[::-1]):
        run.measure_stages(shape, list(requests))


class _Run:
    """State that the steps of one run share."""

    def __init__(self, plan: Plan, results: BenchmarkResults, path: Path, on_step: OnStep) -> None:
        self._plan, self._settings, self._results, self._path = plan, plan.settings, results, path
        self._on_step, self._steps = on_step, itertools.count()
        self._workload_of = functools.lru_cache(maxsize=1)(plan.workload)

    def measure_cases(self, shape: Shape, requests: Sequence[BenchmarkRequest]) -> None:
        workload = self._workload_of(shape)
        sdpa_times, *times = self._time_together(requests, workload)
        with torch.no_grad():
            exact: Any = exact_attention(*workload.tensors, return_lse=True, **workload.arguments)
        exact_gradients = ExactGradients.of(*workload.tensors, **workload.arguments)
        for request, own_times in zip(requests, times, strict=True):
            name = request.full_name
            self._begin(request, "fidelity")
            call = get_attention(name), *workload.tensors
            fidelity = measure(*call, exact=exact, **workload.arguments).pooled()
            fidelity |= measure_gradients(*call, exact=exact_gradients, **workload.arguments).pooled()
            memory, sdpa_memory = self._measure_memory(request, workload) if self._settings.memory else (None, None)
            case = Case(*(request, name, own_times, sdpa_times, fidelity, memory, sdpa_memory, workload.sdpa_backend))
            self._results.cases.append(case)
            self._results.write(self._path)

    def measure_stages(self, shape: Shape, requests: Sequence[BenchmarkRequest]) -> None:
        workload = self._workload_of(shape)
        for request in requests:
            self._begin(request, "stages")
            stages = measure_stages(get_attention(request.full_name), workload)
            place = next(place for place, case in enumerate(self._results.cases) if case.request == request)
            self._results.cases[place] = dataclasses.replace(self._results.cases[place], stage_milliseconds=stages)
            self._results.write(self._path)

    def _begin(self, request: BenchmarkRequest, step: str) -> None:
        shape = format_shape(request.shape, self._settings.sweep)
        self._on_step(f"{request.attention} at {shape}: {step}", next(self._steps))

    def _time_together(self, requests: Sequence[BenchmarkRequest], workload: Workload) -> list[Times]:
        """Times of exact attention and of each request, which take turns, so that ratios compare the same moments."""

        def begin_turn(round_number: int, number: int) -> None:
            if number:  # number 0 is exact attention, which is no request
                step = f"repeat {round_number} of {self._settings.repeats}" if round_number else "warm-up"
                self._begin(requests[number - 1], step)

        attentions = [sdpa, *(get_attention(request.full_name) for request in requests)]
        return time_interleaved(attentions, workload, self._settings.repeats, begin_turn)

    def _measure_memory(self, request: BenchmarkRequest, workload: Workload) -> tuple[int | None, int | None]:
        """Extra memory of the attention, and of exact attention, which is measured once per shape on a CPU."""
        self._begin(request, "memory")
        if self._settings.device == "cuda":
            attentions = (get_attention(request.full_name), sdpa)
            memory, sdpa_memory = (extra_memory_on_cuda(attention, workload) for attention in attentions)
            return memory, sdpa_memory
        place = (request.shape.length, request.shape.head_dim)  # measured for one head, however many there are
        known = [case for case in self._results.cases if (case.shape.length, case.shape.head_dim) == place]
        sdpa_extra = known[0].sdpa_extra_memory_bytes if known else self._memory_on_cpu(SDPA, request.shape)
        return self._memory_on_cpu(request.full_name, request.shape), sdpa_extra

    def _memory_on_cpu(self, name: str, shape: Shape) -> int | None:
        settings, captures = self._settings, self._plan.captures
        return measure_extra_memory(
            MemoryCase(
                attention=name,
                length=shape.length,
                head_dim=shape.head_dim,
                dtype=settings.dtype,
                device=settings.device,
                is_causal=settings.causal,
                seed=settings.seed,
                captures=None if captures is None else str(captures.path),
                repeat_captures=captures is not None and captures.repeat,
            )
        )
