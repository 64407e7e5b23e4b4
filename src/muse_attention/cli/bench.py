"""`muse bench`."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from muse_attention.benchmark.captured import CapturesFile
from muse_attention.benchmark.matched import MATCHED_KINDS
from muse_attention.benchmark.plan import Plan
from muse_attention.benchmark.results import Results, Settings
from muse_attention.benchmark.suite import run_plan, start_results
from muse_attention.benchmark.sweeps import SWEEPS, axis_label, curve_and_size, find_sweep, format_shape
from muse_attention.benchmark.tables import (
    caption,
    format_error,
    format_memory,
    format_ratio,
    format_seconds,
    format_spread,
    markdown_report,
    noise_lines,
    retrieval_columns,
    sorted_cases,
)
from muse_attention.by_name import split_names
from muse_attention.cli.app import (
    Device,
    Overwrite,
    RepeatCaptures,
    Resume,
    app,
    console,
    default_device,
    file_stem,
    make_folder,
    new_table,
    progress_bar,
    report_written,
    run_errors,
    say,
    user_errors,
)
from muse_attention.fidelity_columns import meaning
from muse_attention.files import replace_file
from muse_attention.machine import machine_lines
from muse_attention.plots import plot_speedup
from muse_attention.sizes import format_size, parse_size_list

_DEFAULT_LENGTHS = "32k,64k"


@app.command()
def bench(
    device: Device = None,
    length: Annotated[
        list[str] | None,
        typer.Option(
            "--length",
            "--lengths",
            help="Sequence lengths, like 32k,64k,1m; may be repeated. k means 1024.",
            show_default=_DEFAULT_LENGTHS,
        ),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(
            help="Heads. On a CPU, exact attention keeps two threads equally busy only from two heads on.",
            show_default="1 on cpu, 8 on cuda, or all that were captured",
        ),
    ] = None,
    key_heads: Annotated[
        int | None,
        typer.Option(
            help="Heads of keys and values, shared by equal groups of heads (GQA).",
            show_default="as many as heads, or as captured",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 1,
    head_dim: Annotated[
        int | None, typer.Option(help="Dimension of a head.", show_default="64, or that of the captured heads")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16.", show_default="float32 on cpu, bfloat16 on cuda"),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="Attention to measure, by name, like muse,moba; may be repeated. muse is MuSeConfig.for_length, "
            "muse:paper the paper's method at each length; block_diagonal, moba and flex_attention without "
            "settings have the paper's sparsity; flex_attention and nsa need cuda.",
            show_default=", ".join(MATCHED_KINDS),
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help=f"Vary one choice of the method or of the inputs at the first of the lengths: {', '.join(SWEEPS)}.",
            show_default="no sweep",
        ),
    ] = None,
    captures: Annotated[
        Path | None,
        typer.Option(
            help="Measure on heads of a model that muse tune --save-captures wrote.", show_default="synthetic data"
        ),
    ] = None,
    repeat_captures: RepeatCaptures = False,
    repeats: Annotated[int, typer.Option(help="Timed runs of each pass; medians are reported.")] = 3,
    causal: Annotated[bool, typer.Option(help="Causal attention.")] = True,
    memory: Annotated[bool, typer.Option(help="Measure peak memory; on a CPU, with one head.")] = True,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("out/bench"),
    name: Annotated[
        str | None,
        typer.Option(help="File name, without ending.", show_default="the device, the captures and the sweep"),
    ] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
) -> None:
    """Measure time, memory and error of attentions, and of scaled_dot_product_attention beside them.

    All attentions of one length take turns, so that ratios compare the same moments. Before the timed runs there is
    one warm-up, which is not counted; on a CPU a warm-up of more than a few seconds counts as the first repeat. On
    CUDA the share of each stage is measured too, when all times are known.

    Writes NAME.json on the way, and NAME.md and NAME.png at the end. Run again, it adds what is missing.
    """
    with user_errors():
        device = device or default_device()
        if repeat_captures and captures is None:
            raise ValueError("--repeat-captures needs --captures FILE")
        file = None if captures is None else CapturesFile(captures, repeat_captures)
        if heads is None and file is not None:
            heads, key_heads = file.heads, file.key_heads if key_heads is None else key_heads
        if heads is None:
            heads = 8 if device == "cuda" else 1
        if head_dim is None:
            head_dim = file.head_dim if file is not None else 64
        settings = Settings(
            device=device,
            batch=batch,
            heads=heads,
            key_heads=heads if key_heads is None else key_heads,
            head_dim=head_dim,
            dtype=dtype or ("bfloat16" if device == "cuda" else "float32"),
            causal=causal,
            repeats=repeats,
            memory=memory,
            sweep=sweep,
            captures=None if file is None else file.data,
        )
        plan = _plan(settings, length, attention, file)
        stem = file_stem(name if name is not None else _default_name(plan))
        make_folder(output)
        path = output / f"{stem}.json"
        results = start_results(plan, path, overwrite=overwrite)
    command = _command_line(plan, stem, captures=lambda path: path.name)
    if plan.steps(results) and command not in results.commands:
        results.commands.append(command)
    with run_errors(lambda: _how_to_continue(results, path, _command_line(plan, stem, captures=str))):
        with progress_bar(plan.steps(results)) as on_step:
            run_plan(plan, results, path, on_step=on_step)
        console.print(_bench_table(results))
        if retrieval_columns(results.cases):
            console.print(_retrieval_table(results))
        for line in noise_lines(results):
            say(line)
        report = output / f"{stem}.md"
        replace_file(report, markdown_report(results, title=f"Benchmark: {stem}", picture=f"{stem}.png"))
        report_written([path, report], output / f"{stem}.png", lambda picture: _plot_speedup(results, picture))


def _plan(
    settings: Settings,
    asked_lengths: Sequence[str] | None,
    attentions: Sequence[str] | None,
    captures: CapturesFile | None,
) -> Plan:
    lengths = parse_size_list(asked_lengths or [_DEFAULT_LENGTHS])
    if settings.sweep is None:
        return Plan.at_lengths(settings, lengths, tuple(split_names(attentions or MATCHED_KINDS)), captures)
    if attentions:
        raise ValueError("--sweep has attentions of its own; leave out --attention")
    if asked_lengths and _has_own_lengths(settings):
        raise ValueError(f"--sweep {settings.sweep} has lengths of its own; leave out --length")
    return Plan.of_sweep(settings, lengths[0], captures)


def _has_own_lengths(settings: Settings) -> bool:
    return settings.sweep is not None and "length" in find_sweep(settings.sweep).fields


def _default_name(plan: Plan) -> str:
    parts = [plan.settings.device]
    if plan.captures is not None:
        parts.append(plan.captures.path.stem)
    if plan.settings.sweep is not None:
        parts += ["sweep", plan.settings.sweep]
    return "-".join(parts)


def _command_line(plan: Plan, name: str, *, captures: Callable[[Path], str]) -> str:
    """The command with every setting spelled out, save the folder of the results; `captures` spells their path."""
    settings = plan.settings
    words = ["muse", "bench", "--device", settings.device]
    if not _has_own_lengths(settings):
        words += ["--length", ",".join(map(format_size, plan.lengths))]
    for option in ("heads", "key_heads", "batch", "head_dim", "dtype", "repeats"):
        words += [f"--{option.replace('_', '-')}", str(getattr(settings, option))]
    if settings.sweep is None:
        for attention in plan.attentions:
            words += ["--attention", attention]
    else:
        words += ["--sweep", settings.sweep]
    if plan.captures is not None:
        words += ["--captures", captures(plan.captures.path)]
        words += ["--repeat-captures"] if plan.captures.repeat else []
    words.append("--causal" if settings.causal else "--no-causal")
    words.append("--memory" if settings.memory else "--no-memory")
    return shlex.join([*words, "--name", name])


def _how_to_continue(results: Results, path: Path, command: str) -> str:
    if not results.cases:
        return "no case was finished, and nothing was written"
    continued = f"{command} --output {shlex.quote(str(path.parent))}"
    return f"finished cases are in {path} ({len(results.cases)}); continue with: {continued}"


def _bench_table(results: Results) -> Table:
    hardware, versions = machine_lines(results.machine)
    columns = ("forward", "forward +\nbackward", "spread", "RSE", "extra\nmemory")
    table = new_table(f"{hardware}\n{versions}", *columns)
    table.caption = caption(results).replace("`", "")
    for (shape, sdpa), cases in itertools.groupby(
        sorted_cases(results), key=lambda case: (case.shape, case.sdpa_times)
    ):
        together = list(cases)
        table.add_section()
        table.add_row(
            f"SDPA at {format_shape(shape, results.settings.sweep)}",
            _time_cell(sdpa.forward_median),
            _time_cell(sdpa.forward_backward_median),
            format_spread(sdpa.spread),
            "",
            format_memory(together[0].sdpa_extra_memory_bytes),
        )
        for case in together:
            table.add_row(
                case.attention,
                _time_cell(case.times.forward_median, case.speedup_forward),
                _time_cell(case.times.forward_backward_median, case.speedup_forward_backward),
                format_spread(case.spread),
                format_error(case.fidelity["relative_squared_error"]),
                format_memory(case.extra_memory_bytes),
            )
    return table


def _retrieval_table(results: Results) -> Table:
    """The tail of the error, and what was retrieved."""
    cases = sorted_cases(results)
    columns = retrieval_columns(cases)
    table = new_table("", "length", *(column.narrow_title for column in columns))
    table.caption = meaning(case.fidelity for case in cases)
    for case in cases:
        cells = [column.cell(case.fidelity) for column in columns]
        shape = format_shape(case.shape, results.settings.sweep).replace(", ", ",\n")  # leaves room for the name
        table.add_row(case.attention, shape, *cells)
    return table


def _time_cell(seconds: float, speedup: float | None = None) -> str:
    return f"{format_seconds(seconds)} {'' if speedup is None else format_ratio(speedup):>5}"


def _plot_speedup(results: Results, path: Path) -> None:
    sweep = results.settings.sweep
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {"forward": {}, "forward + backward": {}}
    for case in sorted_cases(results):
        curve, size = curve_and_size(case.request, sweep)
        panels["forward"].setdefault(curve, []).append((size, case.speedup_forward))
        panels["forward + backward"].setdefault(curve, []).append((size, case.speedup_forward_backward))
    plot_speedup(panels, path, against=axis_label(sweep))
