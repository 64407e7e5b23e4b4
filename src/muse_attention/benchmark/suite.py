"""Go through lengths and attentions, writing the results down after each case."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from muse_attention.baselines import exact_attention
from muse_attention.benchmark.machine import describe_machine
from muse_attention.benchmark.matched import at_matched_sparsity
from muse_attention.benchmark.memory import MemoryCase, measure_extra_memory
from muse_attention.benchmark.results import Case, Results, Settings, read_results, write_results
from muse_attention.benchmark.timing import time_interleaved
from muse_attention.benchmark.workload import DTYPES, SDPA, Workload, check_device, sdpa
from muse_attention.by_name import Attention, get_attention
from muse_attention.fidelity import compare
from muse_attention.sizes import format_size

OnStep = Callable[[str, int], None]
"""Told what begins, and how many steps are finished."""


@dataclass(frozen=True)
class Plan:
    """The cases to run: every attention at every length, under the same settings."""

    settings: Settings
    lengths: tuple[int, ...]
    attentions: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse what could not run, before anything does."""
        settings = self.settings
        check_device(settings.device)
        if settings.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {settings.dtype!r}; use one of {', '.join(DTYPES)}")
        for name in ("batch", "heads", "head_dim", "repeats"):
            if getattr(settings, name) < 1:
                raise ValueError(f"{name} is {getattr(settings, name)}; it must be at least 1")
        if not self.lengths or not self.attentions:
            raise ValueError("there is nothing to measure; name at least one length and one attention")
        for length in self.lengths:
            for requested in self.attentions:
                get_attention(at_matched_sparsity(requested, length))

    def missing(self, results: Results) -> list[tuple[int, str]]:
        """Length and attention of the cases that `results` does not have yet."""
        done = {(case.length, case.requested) for case in results.cases}
        return [case for case in itertools.product(self.lengths, self.attentions) if case not in done]

    @property
    def steps_per_case(self) -> int:
        """Warm-up, repeats, fidelity, memory."""
        return 1 + self.settings.repeats + 1 + int(self.settings.memory)


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
    return earlier


def run_plan(plan: Plan, results: Results, path: Path, *, on_step: OnStep = lambda description, finished: None) -> None:
    """Add each case that `results` does not have yet, and write the file after each."""
    steps = itertools.count()
    for length, cases in itertools.groupby(plan.missing(results), key=lambda case: case[0]):
        shared = _SharedByLength(plan.settings, length)
        for _, requested in cases:

            def begin(what: str, requested: str = requested, length: int = length) -> None:
                on_step(f"{requested} at {format_size(length)}: {what}", next(steps))

            results.cases.append(_run_case(plan.settings, requested, shared, results, begin))
            write_results(results, path)


class _SharedByLength:
    """What the attentions compared at one length have in common: the data, and exact attention on it."""

    def __init__(self, settings: Settings, length: int) -> None:
        self.length = length
        self.workload = Workload.create(
            batch=settings.batch,
            heads=settings.heads,
            length=length,
            head_dim=settings.head_dim,
            dtype=DTYPES[settings.dtype],
            device=settings.device,
            is_causal=settings.causal,
            seed=settings.seed,
        )

    @functools.cached_property
    def exact(self) -> tuple[Tensor, Tensor]:
        return self.output_and_lse(exact_attention)

    def output_and_lse(self, attention: Attention) -> tuple[Tensor, Tensor]:
        work = self.workload
        with torch.no_grad():
            out, lse = attention(work.query, work.key, work.value, is_causal=work.is_causal, return_lse=True)
        return out, lse


def _run_case(
    settings: Settings,
    requested: str,
    shared: _SharedByLength,
    results: Results,
    begin: Callable[[str], None],
) -> Case:
    name = at_matched_sparsity(requested, shared.length)
    attention = get_attention(name)

    def begin_round(number: int) -> None:
        begin(f"repeat {number} of {settings.repeats}" if number else "warm-up")

    sdpa_times, times = time_interleaved([sdpa, attention], shared.workload, settings.repeats, begin_round)
    begin("fidelity")
    exact_out, exact_lse = shared.exact
    out, lse = shared.output_and_lse(attention)
    fidelity = compare(out, exact_out, lse, exact_lse).pooled()
    memory, sdpa_memory = None, None
    if settings.memory:
        begin("memory")
        memory = _extra_memory(settings, name, shared.length)
        measured = [case for case in results.cases if case.length == shared.length]
        sdpa_memory = measured[0].sdpa_extra_memory_bytes if measured else _extra_memory(settings, SDPA, shared.length)
    return Case(requested, name, shared.length, times, sdpa_times, fidelity, memory, sdpa_memory)


def _extra_memory(settings: Settings, name: str, length: int) -> int | None:
    return measure_extra_memory(
        MemoryCase(
            attention=name,
            length=length,
            head_dim=settings.head_dim,
            dtype=settings.dtype,
            device=settings.device,
            is_causal=settings.causal,
            seed=settings.seed,
        )
    )
