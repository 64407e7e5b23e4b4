"""Go through the cases of a plan, writing the results down after each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from muse_attention.baselines import exact_attention
from muse_attention.benchmark.memory import MemoryCase, extra_memory_on_cuda, measure_extra_memory
from muse_attention.benchmark.plan import Plan, by_shape
from muse_attention.benchmark.request import Request, Shape
from muse_attention.benchmark.results import Case, Results, Settings, read_results, write_results
from muse_attention.benchmark.stages import measure_stages
from muse_attention.benchmark.sweeps import format_shape
from muse_attention.benchmark.timing import time_interleaved
from muse_attention.benchmark.workload import DTYPES, SDPA, Workload, sdpa
from muse_attention.by_name import Attention, get_attention
from muse_attention.fidelity import measure
from muse_attention.machine import describe_machine

OnStep = Callable[[str, int], None]
"""Told what begins, and how many steps are finished."""


def start_results(plan: Plan, path: Path, *, resume: bool) -> Results:
    """Empty results, or with `resume` those of the file if there is one; a ValueError if they cannot be continued."""
    machine = describe_machine()
    if not (resume and path.exists()):
        return Results(machine, plan.settings)
    earlier = read_results(path)
    differences = [
        name for name, setting in vars(plan.settings).items() if getattr(earlier.settings, name) != setting
    ] + [name for name in machine if name != "date" and earlier.machine.get(name) != machine[name]]
    if differences:
        raise ValueError(
            f"cannot resume {path.name}: it was measured with other settings or on another machine "
            f"({', '.join(differences)} differ); choose another --name, or drop --resume to start over"
        )
    for case in earlier.cases:
        if case.attention != case.request.full_name:
            raise ValueError(
                f"cannot resume {path.name}: {case.request.attention} was measured as {case.attention}, and now is "
                f"{case.request.full_name}; choose another --name, or drop --resume to start over"
            )
    return earlier


def run_plan(plan: Plan, results: Results, path: Path, *, on_step: OnStep = lambda description, finished: None) -> None:
    """Add each case that `results` does not have yet, then the stages of each, and write the file after each.

    The stages come last: nothing is timed in a process that was profiled.
    """
    steps = itertools.count()

    def begin(request: Request, what: str) -> None:
        on_step(f"{request.attention} at {format_shape(request.shape, plan.settings.sweep)}: {what}", next(steps))

    _measure_cases(plan, results, path, begin)
    _measure_stages(plan, results, path, begin)


def _measure_cases(plan: Plan, results: Results, path: Path, begin: Callable[[Request, str], None]) -> None:
    for shape, requests in by_shape(plan.missing(results)):
        shared = _SharedByShape(plan.settings, shape)
        for request in requests:
            case = _run_case(plan.settings, request, shared, results, functools.partial(begin, request))
            results.cases.append(case)
            write_results(results, path)


def _measure_stages(plan: Plan, results: Results, path: Path, begin: Callable[[Request, str], None]) -> None:
    for shape, requests in by_shape(plan.without_stages(results)):
        workload = _create_workload(plan.settings, shape)
        for request in requests:
            begin(request, "stages")
            _add_stages(results, request, measure_stages(get_attention(request.full_name), workload))
            write_results(results, path)


class _SharedByShape:
    """What the attentions compared on one shape have in common: the data, and exact attention on it."""

    def __init__(self, settings: Settings, shape: Shape) -> None:
        self.workload = _create_workload(settings, shape)

    @functools.cached_property
    def exact(self) -> tuple[Tensor, Tensor]:
        work = self.workload
        with torch.no_grad():
            out, lse = exact_attention(work.query, work.key, work.value, is_causal=work.is_causal, return_lse=True)
        return out, lse

    def measure_fidelity(self, attention: Attention) -> dict[str, float]:
        work = self.workload
        found = measure(attention, work.query, work.key, work.value, exact=self.exact, is_causal=work.is_causal)
        return found.pooled()


def _create_workload(settings: Settings, shape: Shape) -> Workload:
    return Workload.create(
        batch=settings.batch,
        heads=shape.heads,
        length=shape.length,
        head_dim=shape.head_dim,
        dtype=DTYPES[settings.dtype],
        device=settings.device,
        is_causal=settings.causal,
        seed=settings.seed,
    )


def _run_case(
    settings: Settings,
    request: Request,
    shared: _SharedByShape,
    results: Results,
    begin: Callable[[str], None],
) -> Case:
    name = request.full_name
    attention = get_attention(name)

    def begin_round(number: int) -> None:
        begin(f"repeat {number} of {settings.repeats}" if number else "warm-up")

    sdpa_times, times = time_interleaved([sdpa, attention], shared.workload, settings.repeats, begin_round)
    begin("fidelity")
    fidelity = shared.measure_fidelity(attention)
    memory, sdpa_memory = None, None
    if settings.memory:
        begin("memory")
        if settings.device == "cuda":
            memory = extra_memory_on_cuda(attention, shared.workload)
            sdpa_memory = extra_memory_on_cuda(sdpa, shared.workload)
        else:
            memory = _extra_memory(settings, name, request.shape)
            measured = [case for case in results.cases if _has_same_memory(case.shape, request.shape)]
            sdpa_memory = (
                measured[0].sdpa_extra_memory_bytes if measured else _extra_memory(settings, SDPA, request.shape)
            )
    return Case(request, name, times, sdpa_times, fidelity, memory, sdpa_memory)


def _has_same_memory(shape: Shape, other: Shape) -> bool:
    """On a CPU, memory is that of one head, however many there are."""
    return (shape.length, shape.head_dim) == (other.length, other.head_dim)


def _extra_memory(settings: Settings, name: str, shape: Shape) -> int | None:
    return measure_extra_memory(
        MemoryCase(
            attention=name,
            length=shape.length,
            head_dim=shape.head_dim,
            dtype=settings.dtype,
            device=settings.device,
            is_causal=settings.causal,
            seed=settings.seed,
        )
    )


def _add_stages(results: Results, request: Request, stages: dict[str, float] | None) -> None:
    results.cases[:] = [
        dataclasses.replace(case, stage_milliseconds=stages) if case.request == request else case
        for case in results.cases
    ]
