"""The report of `muse bench`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields

from muse_lab.benchmark.request import Shape
from muse_lab.benchmark.results import BenchmarkResults, Case
from muse_lab.benchmark.stages import PROFILED_RUNS, STAGES
from muse_lab.benchmark.sweeps import axis_label, curve_and_size, format_shape
from muse_lab.benchmark.tables import (
    caption,
    format_error,
    format_memory,
    format_ratio,
    format_seconds,
    format_share,
    format_spread,
    noise_lines,
    retrieval_columns,
    settings_line,
    sorted_cases,
)
from muse_lab.records.attention_names import short_names
from muse_lab.report.fidelity_columns import ERROR
from muse_lab.report.markup import csv_text
from muse_lab.report.plots import PALETTE, Axis, Line, Rule, line_figure
from muse_lab.report.provenance import names_table, provenance_of
from muse_lab.report.tree import Card, Column, Figure, Report, Section, Table, number, text

_STAGES = (
    f"Times of the GPU's kernels in one forward and backward pass, the mean of {PROFILED_RUNS} runs under "
    "torch.profiler, and their share of the sum, without the gaps between kernels. The own block is all that cuDNN or "
    "FlashAttention does; what is no kernel of the library is other."
)
_PASSES = {"forward": "speedup_forward", "forward + backward": "speedup_forward_backward"}


def bench_report(results: BenchmarkResults, file_name: str) -> Report:
    cases = sorted_cases(results)
    if not cases:
        raise ValueError("no case has been measured yet; run the command again to continue")
    settings = results.settings
    last = [case for case in cases if case.shape == cases[-1].shape]
    best = next((case for case in last if case.attention.startswith("muse")), last[0])
    name = best.request.attention  # as it was asked for: the table has its settings at each length
    error, where = best.fidelity["relative_squared_error"], format_shape(best.shape, settings.sweep)
    sections = [
        Section(
            "Time, error and memory",
            figures=[_figure(results, title, ratio) for title, ratio in _PASSES.items()],
            tables=[times_table(results)],
            notes=[*noise_lines(results), caption(results)],
        )
    ]
    if retrieval_columns(cases):
        title = "The tail of the error, and what was retrieved"
        sections.append(Section(title, tables=[retrieval_table(results)]))
    if staged := [case for case in cases if case.stage_milliseconds]:
        rows = (_stages(case.stage_milliseconds or {}) for case in staged)
        stages = _table(results, staged, list(map(number, (*STAGES, "sum"))), rows)
        sections.append(Section("Share of each stage", tables=[stages], notes=[_STAGES]))
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
        csv=_csv(cases),
    )  # fmt: skip


def times_table(results: BenchmarkResults) -> Table:
    """Time, error and memory."""
    cases = sorted_cases(results)
    titles = ("forward", "forward, SDPA", "forward, speed-up", "forward + backward", "SDPA", "speed-up", "spread")
    errors = [number(column.title, column.definition) for column in ERROR[:2]]
    columns = [*map(number, titles), *errors, number("extra memory"), number("extra memory, SDPA")]
    return _table(results, cases, columns, map(_cells, cases))


def retrieval_table(results: BenchmarkResults) -> Table:
    """The tail of the error, and what was retrieved."""
    cases = sorted_cases(results)
    known = retrieval_columns(cases)
    columns = [number(column.title, column.definition) for column in known]
    return _table(results, cases, columns, ([column.cell(case.fidelity) for column in known] for case in cases))


def _cells(case: Case) -> list[str]:
    times, exact = case.times, case.sdpa_times
    return [
        *(format_seconds(times.forward_median), format_seconds(exact.forward_median)),
        format_ratio(case.speedup_forward),
        *(format_seconds(times.forward_backward_median), format_seconds(exact.forward_backward_median)),
        *(format_ratio(case.speedup_forward_backward), format_spread(case.spread)),
        *(format_error(case.fidelity["relative_squared_error"]), f"{case.fidelity['cosine']:.4f}"),
        *(format_memory(case.extra_memory_bytes), format_memory(case.sdpa_extra_memory_bytes)),
    ]


def _stages(milliseconds: dict[str, float]) -> list[str]:
    whole = sum(milliseconds.values())
    return [*(format_share(milliseconds[stage], whole) for stage in STAGES), format_seconds(whole / 1000)]


def _table(
    results: BenchmarkResults, cases: Sequence[Case], columns: Sequence[Column], rows: Iterable[Sequence[str]]
) -> Table:
    """A case in each row, which begins with its attention and its shape."""
    names = short_names(case.attention for case in results.cases)
    about = [(names[case.attention], format_shape(case.shape, results.settings.sweep)) for case in cases]
    cells = [(*begin, *row) for begin, row in zip(about, rows, strict=True)]
    return Table((text("attention"), number("length"), *columns), cells)


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


def _csv(cases: Sequence[Case]) -> str:
    measures = list(dict.fromkeys(name for case in cases for name in case.fidelity))
    rows = [
        [
            *(case.attention, *astuple(case.shape), case.times.forward_median, case.times.forward_backward_median),
            *(case.sdpa_times.forward_median, case.sdpa_times.forward_backward_median),
            *(case.extra_memory_bytes, case.sdpa_extra_memory_bytes),
            *(case.fidelity.get(name, "") for name in measures),
        ]
        for case in cases
    ]
    times = ("forward_seconds", "forward_backward_seconds", "sdpa_forward_seconds", "sdpa_forward_backward_seconds")
    memory = ("extra_memory_bytes", "sdpa_extra_memory_bytes")
    return csv_text(["attention", *(one.name for one in fields(Shape)), *times, *memory, *measures], rows)
