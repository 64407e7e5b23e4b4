"""Go through the cases of a plan, writing the results down after each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from muse_attention.baselines import exact_attention
from muse_attention.fidelity.error import measure
from muse_attention.registry import Attention, get_attention
from muse_lab.benchmark.captured import create_workload
from muse_lab.benchmark.memory import MemoryCase, extra_memory_on_cuda, measure_extra_memory
from muse_lab.benchmark.plan import Plan, by_shape
from muse_lab.benchmark.request import BenchmarkRequest, Shape
from muse_lab.benchmark.results import BenchmarkResults, BenchmarkSettings, Case
from muse_lab.benchmark.stages import measure_stages
from muse_lab.benchmark.sweeps import format_shape
from muse_lab.benchmark.timing import Times, time_interleaved
from muse_lab.benchmark.workload import SDPA, Workload, sdpa
from muse_lab.records.earlier_results import REMEDY_BY_NAME, check_same
from muse_lab.records.stored_results import OnStep


def start_results(plan: Plan, path: Path, *, overwrite: bool = False, remedy: str = REMEDY_BY_NAME) -> BenchmarkResults:
    """Those of the file if there is one, else empty ones; a ValueError if they cannot be continued."""
    results = BenchmarkResults.start(plan.settings, path, overwrite=overwrite, remedy=remedy)
    for case in results.cases:
        asked = case.request
        check_same(path, {asked.attention: case.attention}, {asked.attention: asked.full_name}, remedy=remedy)
    return results


def run_plan(
    plan: Plan, results: BenchmarkResults, path: Path, *, on_step: OnStep = lambda description, finished: None
) -> None:
    """Add each case that `results` does not have yet, then the stages of each, and write the file after each.

    The stages come last: nothing is timed in a process that was profiled.
    """
    steps = itertools.count()

    def begin(request: BenchmarkRequest, what: str) -> None:
        on_step(f"{request.attention} at {format_shape(request.shape, plan.settings.sweep)}: {what}", next(steps))

    _measure_cases(plan, results, path, begin)
    _measure_stages(plan, results, path, begin)


def _measure_cases(
    plan: Plan, results: BenchmarkResults, path: Path, begin: Callable[[BenchmarkRequest, str], None]
) -> None:
    for shape, of_shape in by_shape(plan.missing(results)):
        requests = list(of_shape)
        shared = _SharedByShape(plan, shape)
        sdpa_times, *times = _time_together(plan.settings, requests, shared.workload, begin)
        for request, own_times in zip(requests, times, strict=True):
            case = _finish_case(
                plan, request, shared, results, functools.partial(begin, request), own_times, sdpa_times
            )
            results.cases.append(case)
            results.write(path)


def _time_together(
    settings: BenchmarkSettings,
    requests: Sequence[BenchmarkRequest],
    workload: Workload,
    begin: Callable[[BenchmarkRequest, str], None],
) -> list[Times]:
    """Of exact attention, and of each request: all of one shape take turns, so that their ratios are of one time."""

    def begin_turn(round_number: int, turn: int) -> None:
        if turn:  # exact attention comes first, and is no request
            what = f"repeat {round_number} of {settings.repeats}" if round_number else "warm-up"
            begin(requests[turn - 1], what)

    attentions = [sdpa, *(get_attention(request.full_name) for request in requests)]
    return time_interleaved(attentions, workload, settings.repeats, begin_turn)


def _measure_stages(
    plan: Plan, results: BenchmarkResults, path: Path, begin: Callable[[BenchmarkRequest, str], None]
) -> None:
    for shape, requests in by_shape(plan.without_stages(results)):
        workload = _create_workload(plan, shape)
        for request in requests:
            begin(request, "stages")
            stages = measure_stages(get_attention(request.full_name), workload)
            place = next(place for place, case in enumerate(results.cases) if case.request == request)
            results.cases[place] = dataclasses.replace(results.cases[place], stage_milliseconds=stages)
            results.write(path)


class _SharedByShape:
    """What the attentions compared on one shape have in common: the data, and exact attention on it."""

    def __init__(self, plan: Plan, shape: Shape) -> None:
        self.workload = _create_workload(plan, shape)

    @functools.cached_property
    def exact(self) -> tuple[Tensor, Tensor]:
        work = self.workload
        with torch.no_grad():
            out, lse = exact_attention(work.query, work.key, work.value, return_lse=True, **work.arguments)
        return out, lse

    def measure_fidelity(self, attention: Attention) -> dict[str, float]:
        work = self.workload
        found = measure(attention, work.query, work.key, work.value, exact=self.exact, **work.arguments)
        return found.pooled()


def _create_workload(plan: Plan, shape: Shape) -> Workload:
    settings = plan.settings
    named = {"dtype": settings.dtype, "device": settings.device}
    return create_workload(plan.captures, shape, **named, is_causal=settings.causal, seed=settings.seed)


def _finish_case(
    plan: Plan,
    request: BenchmarkRequest,
    shared: _SharedByShape,
    results: BenchmarkResults,
    begin: Callable[[str], None],
    times: Times,
    sdpa_times: Times,
) -> Case:
    """What is measured one attention after another: fidelity and memory."""
    settings, name = plan.settings, request.full_name
    attention = get_attention(name)
    begin("fidelity")
    fidelity = shared.measure_fidelity(attention)
    memory, sdpa_memory = None, None
    if settings.memory:
        begin("memory")
        if settings.device == "cuda":
            memory = extra_memory_on_cuda(attention, shared.workload)
            sdpa_memory = extra_memory_on_cuda(sdpa, shared.workload)
        else:
            memory = _extra_memory(plan, name, request.shape)
            measured = [case for case in results.cases if _has_same_memory(case.shape, request.shape)]
            sdpa_memory = measured[0].sdpa_extra_memory_bytes if measured else _extra_memory(plan, SDPA, request.shape)
    backend = shared.workload.sdpa_backend
    return Case(request, name, times, sdpa_times, fidelity, memory, sdpa_memory, backend)


def _has_same_memory(shape: Shape, other: Shape) -> bool:
    """On a CPU, memory is that of one head, however many there are."""
    return (shape.length, shape.head_dim) == (other.length, other.head_dim)


def _extra_memory(plan: Plan, name: str, shape: Shape) -> int | None:
    settings, captures = plan.settings, plan.captures
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
