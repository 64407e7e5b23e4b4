"""The commands of `muse`: `info`, `bench` and `demo`."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

from muse_attention.backends import BACKENDS
from muse_attention.benchmark.machine import describe_machine
from muse_attention.benchmark.matched import MATCHED_KINDS
from muse_attention.benchmark.plan import Plan
from muse_attention.benchmark.results import Case, Results, Settings, replace_file
from muse_attention.benchmark.suite import run_plan, start_results
from muse_attention.benchmark.sweeps import BASE, SWEEPS, Sweep, find_sweep, format_shape
from muse_attention.benchmark.tables import (
    caption,
    format_error,
    format_memory,
    format_ratio,
    format_seconds,
    machine_lines,
    markdown_report,
    sorted_cases,
)
from muse_attention.config import MuSeConfig
from muse_attention.demo import STEPS, Demo, DemoSettings, run_demo
from muse_attention.plots import MatplotlibMissingError, plot_error_by_position, plot_speedup
from muse_attention.sizes import format_size, parse_size, parse_sizes

_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]  # typer has its own copy of click, or depends on it


class _OneLineErrors(TyperGroup):
    """Wrong arguments are answered by one line on stderr and exit code 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except _USAGE_ERROR as error:
            if not standalone_mode:
                raise
            _say(" ".join(error.format_message().split()))  # type: ignore[attr-defined]
            code = 2
        return sys.exit(code or 0) if standalone_mode else code


app = typer.Typer(
    cls=_OneLineErrors, add_completion=False, rich_markup_mode="markdown", help="Multipole Semantic Attention."
)
console = Console()

Device = Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda where there is one, else cpu")]


@app.callback(invoke_without_command=True)
def muse(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show versions, hardware, the backends that work here, and the default configurations."""
    machine = describe_machine()
    backends = {backend: _backend_state(backend) for backend in BACKENDS if backend != "auto"}
    configs = {format_size(length): str(MuSeConfig.for_length(length)) for length in (4096 * 4**n for n in range(5))}
    if as_json:
        typer.echo(json.dumps({"machine": machine, "backends": backends, "configs": configs}, indent=2))
        return
    for title, entries in (("machine", machine), ("backends", backends), ("MuSeConfig.for_length", configs)):
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name, entry in entries.items():
            table.add_row(name, "none" if entry is None else str(entry))
        console.print(table)
        console.print()


@app.command()
def bench(
    device: Device = None,
    lengths: Annotated[str, typer.Option(help="Sequence lengths; k means 1024.")] = "32k,64k",
    heads: Annotated[
        int | None,
        typer.Option(
            help="Heads. On a CPU, exact attention keeps two threads equally busy only from two heads on.",
            show_default="1 on cpu, 8 on cuda",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 1,
    head_dim: Annotated[int, typer.Option(help="Dimension of a head.")] = 64,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16.", show_default="float32 on cpu, bfloat16 on cuda"),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="Attention to measure, by name; may be repeated. muse, block_diagonal and moba without settings are "
            "taken at the sparsity of MuSeConfig.for_length.",
            show_default=", ".join(MATCHED_KINDS),
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help=f"Vary one of {', '.join(SWEEPS)} at the first of the lengths, with muse:{BASE} for the rest.",
            show_default="no sweep",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each pass; medians are reported.")] = 3,
    causal: Annotated[bool, typer.Option(help="Causal attention.")] = True,
    memory: Annotated[bool, typer.Option(help="Measure peak memory; on a CPU, with one head.")] = True,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks"),
    name: Annotated[
        str | None,
        typer.Option(help="File name, without ending.", show_default="the device, and the sweep if there is one"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the cases that the file has already.")] = False,
) -> None:
    """Measure time, memory and fidelity against scaled_dot_product_attention, in the same run.

    Writes NAME.json after every case, and NAME.md and NAME.png at the end. Before the timed runs there is one warm-up,
    which is not counted; on a CPU a warm-up of more than a few seconds counts as the first repeat. On CUDA the share
    of each stage is measured too, when all times are known.
    """
    with _user_errors():
        device = device or _default_device()
        settings = Settings(
            device=device,
            batch=batch,
            heads=heads if heads is not None else 8 if device == "cuda" else 1,
            head_dim=head_dim,
            dtype=dtype or ("bfloat16" if device == "cuda" else "float32"),
            causal=causal,
            repeats=repeats,
            memory=memory,
            sweep=sweep,
        )
        plan = _plan(settings, parse_sizes(lengths), attention)
        stem = _file_stem(name if name is not None else device if sweep is None else f"{device}-sweep-{sweep}")
        _make_folder(output)
        path = output / f"{stem}.json"
        results = start_results(plan, path, resume=resume)
    command = _command_line(plan, stem)
    if plan.steps(results) and command not in results.commands:
        results.commands.append(command)
    try:
        with _progress(plan.steps(results)) as on_step:
            run_plan(plan, results, path, on_step=on_step)
    except KeyboardInterrupt:
        _say(f"interrupted; {_how_to_continue(results, path, command)}")
        raise typer.Exit(130) from None
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        _say(f"out of memory; {_how_to_continue(results, path, command)}")
        raise typer.Exit(1) from None
    console.print(_bench_table(results))
    report = output / f"{stem}.md"
    replace_file(report, markdown_report(results, title=f"Benchmark: {stem}"))
    _report_written([path, report], output / f"{stem}.png", lambda picture: _plot_speedup(results, picture))


@app.command()
def demo(
    length: Annotated[str, typer.Option(help="Sequence length; k means 1024.")] = "16k",
    heads: Annotated[int, typer.Option(help="Heads.")] = 2,
    device: Device = None,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("out/demo"),
) -> None:
    """Compare MuSe, MoBA and block-diagonal attention of equal sparsity with exact attention, on synthetic data."""
    with _user_errors():
        settings = DemoSettings(parse_size(length), heads=heads, device=device or _default_device())
        _make_folder(output)
    try:
        with _progress(STEPS) as on_step:
            result = run_demo(settings, on_step=on_step)
    except KeyboardInterrupt:
        _say("interrupted; nothing was written")
        raise typer.Exit(130) from None
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        _say("out of memory; choose a smaller --length or fewer --heads")
        raise typer.Exit(1) from None
    console.print(_demo_table(result))
    path = output / "demo.json"
    result.write(path)
    _report_written([path], output / "error_by_position.png", lambda picture: _plot_error(result, picture))


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _backend_state(backend: str) -> str:
    if backend == "triton" and not torch.cuda.is_available():
        return "needs a CUDA device"
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return "needs the package triton"
    return "available"


def _plan(settings: Settings, lengths: Sequence[int], attentions: Sequence[str] | None) -> Plan:
    if settings.sweep is None:
        return Plan.at_lengths(settings, lengths, tuple(dict.fromkeys(attentions or MATCHED_KINDS)))
    if attentions:
        raise ValueError("--sweep has attentions of its own; leave out --attention")
    return Plan.of_sweep(settings, lengths[0])


def _file_stem(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ValueError(f"--name {name!r} must be a plain file name: letters, digits, '_', '-' and '.'")
    return name


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write to the folder {folder}")


def _command_line(plan: Plan, name: str) -> str:
    """The command with every setting spelled out, save the folder, which is nobody else's business."""
    settings = plan.settings
    words = ["muse", "bench", "--device", settings.device, "--lengths", ",".join(map(format_size, plan.lengths))]
    for option in ("heads", "batch", "head_dim", "dtype", "repeats"):
        words += [f"--{option.replace('_', '-')}", str(getattr(settings, option))]
    if settings.sweep is None:
        for attention in plan.attentions:
            words += ["--attention", attention]
    else:
        words += ["--sweep", settings.sweep]
    words.append("--causal" if settings.causal else "--no-causal")
    words.append("--memory" if settings.memory else "--no-memory")
    return shlex.join([*words, "--name", name])


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _how_to_continue(results: Results, path: Path, command: str) -> str:
    if not results.cases:
        return "no case was finished, and nothing was written"
    continued = f"{command} --output {shlex.quote(str(path.parent))} --resume"
    return f"finished cases are in {path} ({len(results.cases)}); continue with: {continued}"


def _bench_table(results: Results) -> Table:
    hardware, versions = machine_lines(results.machine)
    table = _new_table(f"{hardware}\n{versions}", "forward", "forward +\nbackward", "RSE", "cosine", "extra\nmemory")
    table.caption = caption(results.settings).replace("`", "")
    for shape, cases in itertools.groupby(sorted_cases(results), key=lambda case: case.shape):
        of_shape = list(cases)
        table.add_section()
        sdpa = [case.sdpa_times for case in of_shape]
        table.add_row(
            f"SDPA at {format_shape(shape, results.settings.sweep)}",
            _time_cell(statistics.median(times.forward_median for times in sdpa)),
            _time_cell(statistics.median(times.forward_backward_median for times in sdpa)),
            "",
            "",
            format_memory(of_shape[0].sdpa_extra_memory_bytes),
        )
        for case in of_shape:
            table.add_row(
                case.attention,
                _time_cell(case.times.forward_median, case.speedup_forward),
                _time_cell(case.times.forward_backward_median, case.speedup_forward_backward),
                format_error(case.fidelity["relative_squared_error"]),
                f"{case.fidelity['cosine']:.4f}",
                format_memory(case.extra_memory_bytes),
            )
    return table


def _time_cell(seconds: float, speedup: float | None = None) -> str:
    return f"{format_seconds(seconds)} {'' if speedup is None else format_ratio(speedup):>5}"


def _plot_speedup(results: Results, path: Path) -> None:
    sweep = None if results.settings.sweep is None else find_sweep(results.settings.sweep)
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {"forward": {}, "forward + backward": {}}
    for case in sorted_cases(results):
        curve, size = _curve_and_size(case, sweep)
        panels["forward"].setdefault(curve, []).append((size, case.speedup_forward))
        panels["forward + backward"].setdefault(curve, []).append((size, case.speedup_forward_backward))
    plot_speedup(panels, path, against="sequence length" if sweep is None else sweep.label)


def _curve_and_size(case: Case, sweep: Sweep | None) -> tuple[str, int]:
    if sweep is None:
        return case.request.attention, case.shape.length
    return f"MuSe at {format_size(case.shape.length)}", sweep.value_of(case.request)


def _demo_table(demo: Demo) -> Table:
    settings = demo.settings
    hardware, _ = machine_lines(demo.machine)
    title = f"{hardware}\ncausal, length {format_size(settings.length)}, {settings.heads} heads, on {settings.device}"
    table = _new_table(title, "forward +\nbackward", "speed-up", "RSE", "cosine", "future\ninfluence")
    for line in demo.lines:
        table.add_row(
            line.attention,
            f"{line.forward_backward_seconds * 1000:,.0f} ms",
            format_ratio(line.speedup),
            format_error(line.relative_squared_error),
            f"{line.cosine:.4f}",
            format_error(line.future_influence),
        )
    return table


def _plot_error(demo: Demo, path: Path) -> None:
    curves = {
        line.kind: list(zip(demo.bin_centres, line.error_by_position, strict=True))
        for line in demo.lines
        if line.kind != "exact"
    }
    plot_error_by_position(curves, path, length=demo.settings.length, block_size=demo.settings.block_size)


def _new_table(title: str, *headers: str) -> Table:
    """An attention in each row; narrow enough for a terminal of 80 columns."""
    looks: dict[str, Any] = {"title_style": "", "title_justify": "left", "caption_justify": "left"}
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, **looks)
    table.add_column("attention", no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _report_written(files: list[Path], picture: Path, draw: Callable[[Path], None]) -> None:
    """Draw the picture if that is possible, and print what there is now."""
    try:
        draw(picture)
        files = [*files, picture]
    except MatplotlibMissingError as error:
        _say(f"{picture.name} was not drawn: {error}")
    typer.echo(f"wrote {', '.join(map(str, files))}")


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Callable[[str, int], None]]:
    """A bar on stderr, gone when it is full, and the function that moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=steps)
        yield lambda description, finished: progress.update(task, description=description, completed=finished)


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """While arguments are read: a ValueError is the user's to mend."""
    try:
        yield
    except ValueError as error:
        _say(str(error))
        raise typer.Exit(2) from None


def _say(message: str) -> None:
    typer.echo(f"muse: {message}", err=True)
