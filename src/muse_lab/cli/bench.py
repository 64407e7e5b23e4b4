"""`muse bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from muse_attention.registry import get_attention
from muse_attention.sizes import format_size, parse_size_list
from muse_lab.benchmark import tables
from muse_lab.benchmark.bench_report import bench_report, retrieval_table, times_table
from muse_lab.benchmark.captured import CapturesFile
from muse_lab.benchmark.packed_documents import (
    DocumentsSettings,
    format_documents,
    measure_documents,
    parse_documents,
)
from muse_lab.benchmark.packed_documents_report import CAPTION, documents_report, documents_table
from muse_lab.benchmark.plan import Plan
from muse_lab.benchmark.request import MATCHED_KINDS
from muse_lab.benchmark.results import BenchmarkResults, BenchmarkSettings
from muse_lab.benchmark.suite import run_plan, start_results
from muse_lab.benchmark.sweeps import SWEEPS, find_sweep, sweep_requests
from muse_lab.cli.app import (
    Device,
    Output,
    Overwrite,
    RepeatCaptures,
    app,
    busy,
    file_stem,
    make_folder,
    progress_bar,
    say,
    user_errors,
)
from muse_lab.cli.language_model import Dtype, Place
from muse_lab.cli.measuring import add_command, measuring, show, spell, write
from muse_lab.cli.options import Words, attentions, listed, option
from muse_lab.records.machine import machine_lines

_LENGTHS = "32k,64k"
_SWEEP = f"Vary one setting at the first length: {', '.join(SWEEPS)}."

_SHOWN = {
    "length": "length",
    "SDPA": "SDPA",
    "forward + backward": "forward +\nbackward",
    "speed-up": "speed-up",
    "spread": "spread",
    "RSE": "RSE",
    "extra memory": "extra\nmemory",
}
"""Columns that fit a terminal, and their titles there; the reports have all."""
_DOCUMENTS = (
    "Lengths of documents packed into one row, as 32k,16k,2k,2k or 1kx64: muse packed, against varlen_attn in the same "
    "run."
)


@app.command()
def bench(
    context: typer.Context,
    device: Device = None,
    length: Annotated[Words, listed("Sequence lengths; k means 1024.", _LENGTHS, "--length", "--lengths")] = None,
    heads: Annotated[
        int | None,
        option(
            "Number of query heads. On a CPU, exact attention needs at least two to keep two threads busy.",
            "1 on cpu, 8 on cuda, or all captured heads",
        ),
    ] = None,
    key_heads: Annotated[
        int | None,
        option("Number of key and value heads (GQA).", "as many as heads, or as captured"),
    ] = None,
    batch: Annotated[int, option("Batch size.")] = 1,
    head_dim: Annotated[int | None, option("Head dimension.", "64, or that of the captured heads")] = None,
    dtype: Dtype = None,
    attention: Annotated[
        Words,
        attentions(
            "Attention to measure (muse is MuSeConfig.for_length, muse:paper the paper's method at each length; "
            "block_diagonal, moba and flex_attention without settings have the paper's sparsity; flex_attention, "
            "nsa and flash_sparse_attn need cuda)",
            ", ".join(MATCHED_KINDS),
        ),
    ] = None,
    sweep: Annotated[str | None, option(_SWEEP, "no sweep")] = None,
    documents: Annotated[str | None, option(_DOCUMENTS, "no packing")] = None,
    captures: Annotated[
        Path | None,
        option("Use heads captured from a model by `muse tune --save-captures`.", "synthetic data"),
    ] = None,
    repeat_captures: RepeatCaptures = False,
    repeats: Annotated[int, option("Number of timed runs per pass; medians are reported.")] = 3,
    causal: Annotated[bool, option("Causal attention.")] = True,
    memory: Annotated[bool, option("Measure peak memory; on a CPU, with one head.")] = True,
    output: Output = Path("out/bench"),
    name: Annotated[
        str | None, option("Base name of the result files.", "the device, the captures and the sweep")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure time, memory and error of attentions, and of scaled_dot_product_attention for comparison.

    All attentions of one length take turns, so that ratios compare the same moments. Before the timed runs there is
    one warm-up, which is not counted; on a CPU a warm-up of more than a few seconds counts as the first repeat. On
    CUDA the share of each stage is measured after all times.

    With --documents it measures packed documents instead, laid out as (tokens, heads, head_dim), and muse_attention
    too if there is one document.

    Writes NAME.json as it goes, and NAME.md, NAME.html and pictures at the end. Run it again to add what
    is missing.
    """
    with user_errors(), busy("looking for a GPU" if captures is None else f"reading {captures}"):
        place = Place.choose(device, dtype)
        if repeat_captures and captures is None:
            raise ValueError("--repeat-captures needs --captures FILE")
        file = None if captures is None else CapturesFile(captures, repeat_captures)
        if heads is None and file is not None:
            heads, key_heads = file.heads, file.key_heads if key_heads is None else key_heads
        heads = heads if heads is not None else 8 if place.device == "cuda" else 1
        settled: dict[str, Any] = {
            "device": place.device,
            "heads": heads,
            "key_heads": heads if key_heads is None else key_heads,
            "head_dim": head_dim if head_dim is not None else 64 if file is None else file.head_dim,
            "dtype": place.dtype,
        }
        if documents is not None:
            if length or sweep or captures or batch != 1:
                raise ValueError("--documents has lengths and data of its own; leave out --length, --sweep, --captures")
            packed = DocumentsSettings(documents=parse_documents(documents), causal=causal, repeats=repeats, **settled)
            configs = _configs(attention or ["muse"])
            stem = name if name is not None else f"{place.device}-documents"
        else:
            settings = BenchmarkSettings(
                batch=batch,
                causal=causal,
                repeats=repeats,
                memory=memory,
                sweep=sweep,
                captures=None if file is None else file.data,
                **settled,
            )
            plan = _plan(settings, length, attention, file)
            stem = name if name is not None else _default_name(plan)
            settled["length"] = None if _has_own_lengths(settings) else ",".join(map(format_size, plan.lengths))
            settled["attention"] = plan.attentions if sweep is None else None
        path = output / f"{file_stem(stem)}.json"
        make_folder(output)
        if documents is None:
            results = start_results(plan, path, overwrite=overwrite)
        elif path.exists() and not overwrite:
            raise ValueError(f"{path} exists; choose another --name, or --overwrite it")
    again, command = (spell(context, {**settled, "name": stem}, is_recorded=short) for short in (False, True))
    with measuring(path, again, overwrite=overwrite):
        if documents is not None:
            _measure_documents(packed, configs, path, command)
        else:
            _measure_plan(plan, results, path, command)


def _measure_plan(plan: Plan, results: BenchmarkResults, path: Path, command: str) -> None:
    """Measure what is missing, show it and write the report."""
    if plan.steps(results):
        add_command(results, command)
    with progress_bar(plan.steps(results), "warming up exact attention") as on_step:
        run_plan(plan, results, path, on_step=on_step)
    hardware, versions = machine_lines(results.machine)
    show(times_table(results), f"{hardware}\n{versions}", _SHOWN, tables.caption(results))
    if (retrieved := retrieval_table(results)) is not None:
        definitions = (f"{column.title}: {column.definition}" for column in retrieved.columns if column.definition)
        show(retrieved, "", retrieved.titles[1:], " ".join(definitions))
    for line in tables.noise_lines(results):
        say(line)
    write(bench_report(results, path.stem), path, path)


def _configs(attentions: Sequence[str]) -> list[str]:
    """The settings of names like `muse` and `muse:QK32R2`."""
    for name in attentions:
        if name.partition(":")[0] != "muse":
            raise ValueError(f"--documents measures muse and muse:SETTINGS, not {name!r}")
        get_attention(name)  # raises ValueError for an unknown one
    return [name.partition(":")[2] for name in attentions]


def _plan(
    settings: BenchmarkSettings,
    asked_lengths: Sequence[str] | None,
    asked_for: Sequence[str] | None,
    captures: CapturesFile | None,
) -> Plan:
    lengths = parse_size_list(asked_lengths or [_LENGTHS])
    if settings.sweep is None:
        return Plan.at_lengths(settings, lengths, tuple(asked_for or MATCHED_KINDS), captures)
    if asked_for:
        raise ValueError("--sweep has attentions of its own; leave out --attention")
    if asked_lengths and _has_own_lengths(settings):
        raise ValueError(f"--sweep {settings.sweep} has lengths of its own; leave out --length")
    return Plan(settings, sweep_requests(settings, lengths[0]), captures)


def _has_own_lengths(settings: BenchmarkSettings) -> bool:
    return settings.sweep is not None and "length" in find_sweep(settings.sweep).fields


def _default_name(plan: Plan) -> str:
    parts = [plan.settings.device]
    if plan.captures is not None:
        parts.append(plan.captures.path.stem)
    if plan.settings.sweep is not None:
        parts += ["sweep", plan.settings.sweep]
    return "-".join(parts)


def _measure_documents(settings: DocumentsSettings, configs: list[str], path: Path, command: str) -> None:
    """Measure packed documents, show the times and write the report."""
    with progress_bar(settings.repeats + 1) as on_step:
        results = measure_documents(settings, configs, lambda number, _: on_step(f"round {number}", number))
    add_command(results, command)
    results.write(path)
    table = documents_table(results)
    show(table, format_documents(settings.documents), table.titles[1:], CAPTION)
    write(documents_report(results, path.stem), path, path)
