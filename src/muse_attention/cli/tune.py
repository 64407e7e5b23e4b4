"""`muse tune`."""

from __future__ import annotations

import functools
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from muse_attention.benchmark.timing import time_interleaved
from muse_attention.benchmark.workload import DTYPES, Workload, sdpa
from muse_attention.by_name import get_attention
from muse_attention.cli.app import (
    Device,
    app,
    console,
    draw_picture,
    file_stem,
    make_folder,
    new_table,
    progress_bar,
    run_errors,
    user_errors,
)
from muse_attention.cli.language_model import (
    Dtype,
    Model,
    Place,
    Text,
    how_to_continue,
    load_quietly,
    name_of,
    short_warnings,
)
from muse_attention.evaluation.captures import Captures, LookupAt, capture_heads, load_captures, save_captures
from muse_attention.evaluation.settings import check_context, describe_model, longest_context
from muse_attention.evaluation.texts import read_samples
from muse_attention.evaluation.tuning.candidates import (
    EXACT,
    Results,
    Seconds,
    Settings,
    candidates,
    choose,
    front,
    measure,
    read_results,
    start_results,
)
from muse_attention.evaluation.tuning.report import (
    as_csv,
    html_report,
    markdown_report,
    points,
    shown,
    table_of,
    verdict,
)
from muse_attention.files import replace_file
from muse_attention.plots import plot_time_against_error
from muse_attention.pretrained import DEFAULT_MODEL
from muse_attention.sizes import format_size, parse_size

_DEFAULT_LENGTH = 8192
_SHOWN = ("ms", "speed-up", "RSE", "RSE 99%", "RSE > 0.1", "keys", "lookup")
"""Columns that fit a terminal; the reports have all."""


@app.command()
def tune(
    model: Model = DEFAULT_MODEL,
    text: Text = None,
    length: Annotated[
        str | None, typer.Option(help="Tokens of a sample; k means 1024.", show_default="8k, or that of the captures")
    ] = None,
    error: Annotated[float, typer.Option(help="Largest relative squared error, pooled over heads.")] = 0.005,
    heads: Annotated[int, typer.Option(help="Heads to measure on, spread over the layers.")] = 12,
    samples: Annotated[int, typer.Option(help="Samples to capture, one after another in the text.")] = 1,
    attention: Annotated[
        list[str] | None, typer.Option(help="Attention to measure too, by name, as muse:QK64R4B1k; may be repeated.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Attention to measure in place of the grid, by name; may be repeated.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each; medians are reported.")] = 3,
    captures: Annotated[
        Path | None, typer.Option(help="Measure on what --save-captures wrote, without the model and its text.")
    ] = None,
    saved: Annotated[
        Path | None,
        typer.Option("--save-captures", help="Write the captured heads, .safetensors or .pt, and measure nothing."),
    ] = None,
    needles: Annotated[
        bool,
        typer.Option(
            "--needles", help="Bury a needle in each sample, and tell how much of the weight on it is attended to."
        ),
    ] = False,
    repeat: Annotated[
        bool,
        typer.Option(
            "--repeat-captures", help="Lay captured samples end to end where they are shorter than --length: hard."
        ),
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("out/tune"),
    name: Annotated[
        str | None,
        typer.Option(help="File name, without ending.", show_default="the name of the model or of the captures"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the file has already.")] = False,
) -> None:
    """Find the fastest configuration below an error, on a model's own queries, keys and values and on this device.

    Measures time (forward and backward) and error of a grid of configurations. Writes NAME.json after each, and
    NAME.md, NAME.csv, NAME.html and NAME.png at the end.
    """
    with user_errors():
        if captures is not None and saved is not None:
            raise ValueError("--captures and --save-captures exclude each other: captures are saved once")
        if not error >= 0:
            raise ValueError(f"--error {error} must be a number of at least 0")
        for named in [*(attention or []), *(only or [])]:
            get_attention(named)
        asked = _Asked(
            model=model,
            captures=captures,
            texts=tuple(text or ()),
            length=None if length is None else parse_size(length),
            error=error,
            heads=heads,
            samples=samples,
            needles=needles,
            added=tuple(attention or ()),
            only=tuple(only or ()),
            repeats=repeats,
            repeat=repeat,
            place=Place.choose(device, dtype),
            name=file_stem(name if name is not None else name_of(model) if captures is None else captures.stem),
        )
        path = output / f"{asked.name}.json"
        if resume and path.exists():
            read_results(path)  # what is broken should be known before a model is loaded
    again = f"{asked.spell(with_folders=True)} --output {shlex.quote(str(output))} --resume"
    with run_errors(lambda: how_to_continue(path, again)), user_errors(), short_warnings():
        if saved is not None:
            save_captures(_capture(asked), saved)
            typer.echo(f"wrote {saved}; measure on it anywhere by: muse tune --captures {shlex.quote(str(saved))}")
            return
        found = _open(asked)
        attentions = candidates(found.length, added=asked.added, only=asked.only)
        settings = Settings.of(found, device=asked.place.device, dtype=asked.place.dtype, repeats=repeats)
        make_folder(output)
        results = start_results(settings, path, resume=resume)
        results.error = error
        missing = results.missing(attentions)
        if missing and (command := asked.spell(with_folders=False)) not in results.commands:
            results.commands.append(command)
        with progress_bar(len(missing) + (results.exact is None)) as on_step:
            measure(found, attentions, results, path, _clock(found, repeats), on_step=on_step)
        console.print(_tuning_table(results))
        for line in verdict(results):
            typer.echo(line)
        write_tuning_reports(results, path)


@dataclass(frozen=True)
class _Asked:
    """What the user has asked for."""

    model: str
    captures: Path | None
    texts: tuple[Path, ...]
    length: int | None
    error: float
    heads: int
    samples: int
    needles: bool
    added: tuple[str, ...]
    only: tuple[str, ...]
    repeats: int
    repeat: bool
    place: Place
    name: str

    def spell(self, *, with_folders: bool) -> str:
        """The command with every setting spelled out, save the folder of the results."""
        words = ["muse", "tune"]
        if self.captures is not None:
            words += ["--captures", str(self.captures) if with_folders else self.captures.name]
        else:
            words += [self.model if with_folders else name_of(self.model)]
            words += [word for file in self.texts for word in ("--text", str(file) if with_folders else file.name)]
            words += ["--samples", str(self.samples), *["--needles"] * self.needles]
        words += [] if self.length is None else ["--length", format_size(self.length)]
        words += ["--error", f"{self.error:g}", "--heads", str(self.heads), "--repeats", str(self.repeats)]
        words += [word for named in self.added for word in ("--attention", named)]
        words += [word for named in self.only for word in ("--only", named)]
        words += ["--repeat-captures"] * self.repeat
        return shlex.join([*words, "--device", self.place.device, "--dtype", self.place.dtype, "--name", self.name])


def _open(asked: _Asked) -> Captures:
    """What is measured on, on its device."""
    found = _capture(asked) if asked.captures is None else load_captures(asked.captures).with_heads(asked.heads)
    found = found.to(asked.place.device, DTYPES[asked.place.dtype])
    return found if asked.length is None else found.with_length(asked.length, repeat=asked.repeat)


def _capture(asked: _Asked) -> Captures:
    """Samples of the length, or of the model's context where that is shorter and they may be repeated."""
    model, tokenizer = load_quietly(asked.model, asked.place)
    length = asked.length or _DEFAULT_LENGTH
    if asked.repeat:
        length = min(length, longest_context(model) or length)
    check_context(model, length)
    lookups: tuple[LookupAt, ...] = ()
    if asked.needles:
        from muse_attention.evaluation.needles.captures import read_needle_samples  # here: it needs tokenizers

        read, lookups = read_needle_samples(tokenizer, asked.texts, length, asked.samples)
    else:
        read = read_samples(tokenizer, asked.texts, length, asked.samples)
    described = describe_model(name_of(asked.model), model)
    captures = capture_heads(model, read.tokens, asked.heads, model_name=described, text=read.source)
    return replace(captures, lookups=lookups)


class _Clock:
    """Times attentions on captured heads, forward and backward, as `muse bench` does."""

    def __init__(self, workload: Workload, repeats: int) -> None:
        self.workload = workload
        self.repeats = repeats

    def __call__(self, attention: str) -> Seconds:
        function = sdpa if attention == EXACT else get_attention(attention)
        (times,) = time_interleaved([function], self.workload, self.repeats)
        return Seconds(list(times.forward), list(times.forward_backward))


def _clock(captures: Captures, repeats: int) -> _Clock:
    generator = torch.Generator().manual_seed(0)
    grad_out = torch.randn(captures.value.shape, generator=generator).to(captures.value)
    query, key, value = (
        tensor.detach().clone().requires_grad_() for tensor in (captures.query, captures.key, captures.value)
    )
    return _Clock(Workload(query, key, value, grad_out, is_causal=True), repeats)


def _tuning_table(results: Results) -> Table:
    header, rows = table_of(results, shown(results))
    settings = results.settings
    title = f"{len(settings.heads)} heads of {settings.model}\n{settings.text}, {format_size(settings.length)} tokens"
    kept = [header.index(name) for name in _SHOWN if name in header]
    table = new_table(title, *(header[index].replace(" ", "\n", 1) for index in kept))
    for row in rows:
        table.add_row(row[0].removeprefix("muse:"), *(row[index] for index in kept))
    return table


def write_tuning_reports(results: Results, path: Path) -> None:
    if not results.measured:
        raise ValueError("no configuration has been measured yet; continue the run with --resume")
    title = f"Time against error: {path.stem}"
    picture = path.with_suffix(".png")
    is_drawn = draw_picture(picture, functools.partial(_draw, results))
    files = {
        path.with_suffix(".md"): markdown_report(results, title=title),
        path.with_suffix(".csv"): as_csv(results),
        path.with_suffix(".html"): html_report(
            results, title=title, picture=picture.read_bytes() if is_drawn else None
        ),
    }
    for file, content in files.items():
        replace_file(file, content)
    typer.echo(f"wrote {', '.join(map(str, [path, *files, *[picture] * is_drawn]))}")


def _draw(results: Results, picture: Path) -> None:
    chosen = choose(results.measured, results.error)
    plot_time_against_error(
        points(results.measured),
        points(front(results.measured)),
        picture,
        chosen=None if chosen is None else (chosen.attention, points([chosen])[0]),
        exact_milliseconds=None if results.exact is None else 1000 * results.exact.median,
        error=results.error,
    )
