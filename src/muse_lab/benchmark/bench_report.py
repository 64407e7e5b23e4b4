"""The report of `muse bench`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from muse_attention.sizes import format_size
from muse_lab.benchmark.results import BenchmarkResults, Case
from muse_lab.benchmark.stages import PROFILED_RUNS, STAGES
from muse_lab.benchmark.sweeps import axis_label, curve_and_size, format_shape
from muse_lab.benchmark.tables import (
    caption,
    format_error,
    format_memory,
    format_ratio,
    format_seconds,
    format_spread,
    noise_lines,
    settings_line,
    sorted_cases,
)
from muse_lab.records.attention_names import short_names
from muse_lab.report.fidelity_columns import ERROR, GRADIENTS, RETRIEVAL, TAIL, measure_columns
from muse_lab.report.plots import PALETTE, Axis, Line, Rule, line_figure
from muse_lab.report.provenance import names_table, provenance_of
from muse_lab.report.tree import Card, Column, Figure, Note, Report, Section, Table, number, text

_STAGES = (
    f"Times of the GPU's kernels in one forward and backward pass, the mean of {PROFILED_RUNS} runs under "
    "torch.profiler, and their share of the sum, without the gaps between kernels. Own block is the time in cuDNN or "
    "FlashAttention; other is the time in kernels that are not the library's."
)
_PASSES = {"forward": "speedup_forward", "forward + backward": "speedup_forward_backward"}


def bench_report(results: BenchmarkResults, file_name: str) -> Report:
    cases = sorted_cases(results)
    if not cases:
        raise ValueError("no case has been measured yet; run the command again to continue")
    settings = results.settings
    last = [case for case in cases if case.shape == cases[-1].shape]
    best = next((case for case in last if case.attention.startswith("muse")), last[0])
    name = best.request.attention  # as requested: the table has its settings at each length
    error, where = best.fidelity["relative_squared_error"], format_shape(best.shape, settings.sweep)
    sections = [
        Section(
            "Time, error and memory",
            *(_figure(results, title, ratio) for title, ratio in _PASSES.items()),
            times_table(results),
            *map(Note, [*noise_lines(results), caption(results)]),
        )
    ]
    if (retrieved := retrieval_table(results)) is not None:
        sections.append(Section("The tail of the error, and what was retrieved", retrieved, *_found_note(cases)))
    if (gradients := gradient_table(results)) is not None:
        sections.append(Section("The error of gradients", gradients))
    if any(case.stage_milliseconds for case in cases):
        sections.append(Section("Share of each stage", _stages_table(results), Note(_STAGES)))
    return Report(
        f"Benchmark: {file_name}",
        verdict=[
            f"{name} is {format_ratio(best.speedup_forward_backward)} as fast as exact attention at {where}, forward "
            f"and backward, with a relative squared error of {format_error(error)}."
        ],
        cards=[
            Card("speed-up", format_ratio(best.speedup_forward_backward), f"{name}, forward + backward, {where}"),
            Card("RSE", format_error(error), "on synthetic data" if settings.captures is None else "on captured heads"),
            Card("extra memory", format_memory(best.extra_memory_bytes),
                 f"exact: {format_memory(best.sdpa_extra_memory_bytes)}"),
        ],
        sections=sections,
        names=names_table(case.attention for case in cases),
        provenance=provenance_of(results, f"Data: {settings_line(settings)}"),
    )  # fmt: skip


def times_table(results: BenchmarkResults) -> Table:
    """Time, error and memory."""
    return _table(
        results,
        sorted_cases(results),
        (number("forward"), lambda case: format_seconds(case.times.forward_median)),
        (number("forward, SDPA"), lambda case: format_seconds(case.sdpa_times.forward_median)),
        (number("forward, speed-up"), lambda case: format_ratio(case.speedup_forward)),
        (number("forward + backward"), lambda case: format_seconds(case.times.forward_backward_median)),
        (number("SDPA"), lambda case: format_seconds(case.sdpa_times.forward_backward_median)),
        (number("speed-up"), lambda case: format_ratio(case.speedup_forward_backward)),
        (number("spread"), lambda case: format_spread(case.spread)),
        (number("RSE", ERROR[0].definition), lambda case: format_error(case.fidelity["relative_squared_error"])),
        *measure_columns(ERROR[1:3], results.cases, lambda case: case.fidelity),
        (number("extra memory"), lambda case: format_memory(case.extra_memory_bytes)),
        (number("extra memory, SDPA"), lambda case: format_memory(case.sdpa_extra_memory_bytes)),
    )


def retrieval_table(results: BenchmarkResults) -> Table | None:
    """The tail of the error, and what was retrieved; None where neither is known."""
    cases = sorted_cases(results)
    columns = measure_columns((*TAIL, *RETRIEVAL), cases, lambda case: case.fidelity)
    return _table(results, cases, *columns) if columns else None


def gradient_table(results: BenchmarkResults) -> Table | None:
    """The error of the gradients; None where it is not known."""
    cases = sorted_cases(results)
    columns = measure_columns(GRADIENTS, cases, lambda case: case.fidelity)
    return _table(results, cases, *columns) if columns else None


def _found_note(cases: Sequence[Case]) -> list[Note]:
    """A note if *found* was measured on only some of the queries."""
    sampled = {case.shape.length: case.fidelity["found_queries"] for case in cases if "found_queries" in case.fidelity}
    counts = [f"{count:,.0f} at {format_size(length)}" for length, count in sampled.items()]
    return [Note(f"Found is measured on evenly spaced queries of each head: {', '.join(counts)}.")] if counts else []


def _stages_table(results: BenchmarkResults) -> Table:
    def share(stage: str, case: Case) -> str:
        milliseconds = case.stage_milliseconds or {}
        part, total = milliseconds[stage], sum(milliseconds.values())
        return f"{format_seconds(part / 1000)} ({part / total:.0%})" if part else "-"

    return _table(
        results,
        [case for case in sorted_cases(results) if case.stage_milliseconds],
        *((number(stage), functools.partial(share, stage)) for stage in STAGES),
        (number("sum"), lambda case: format_seconds(sum((case.stage_milliseconds or {}).values()) / 1000)),
    )


def _table(
    results: BenchmarkResults, cases: Sequence[Case], *columns: tuple[Column, Callable[[Case], object]]
) -> Table:
    """A table with a case in each row, which begins with its attention and its shape."""
    names = short_names(case.attention for case in results.cases)
    return Table.of(
        cases,
        (text("attention"), lambda case: names[case.attention]),
        (number("length"), lambda case: format_shape(case.shape, results.settings.sweep)),
        *columns,
    )


def _figure(results: BenchmarkResults, title: str, ratio: str) -> Figure:
    """Speed-up against the length, or against what a sweep varies: a line for each attention that was asked for."""
    sweep = results.settings.sweep
    curves: dict[str, list[tuple[float, float]]] = {}
    for case in sorted_cases(results):
        name, size = curve_and_size(case.request, sweep)
        curves.setdefault(name, []).append((size, getattr(case, ratio)))
    lines = [Line(name, curve, PALETTE[place % 7], "o") for place, (name, curve) in enumerate(curves.items())]
    x, y = Axis(axis_label(sweep), log=2, is_size=True), Axis("speed-up over SDPA", log=2)
    rules = [Rule("SDPA", 1, "#999999")]
    return line_figure(title.replace(" + ", "-"), f"Speed-up, {title}", lines, x, y, rules=rules)
