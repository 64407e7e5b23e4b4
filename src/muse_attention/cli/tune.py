"""`muse tune`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from muse_attention.benchmark.timing import time_interleaved
from muse_attention.benchmark.workload import DTYPES, Workload, sdpa
from muse_attention.by_name import get_attention
from muse_attention.captured_heads import Captures, LookupAt, capture_heads, load_captures, save_captures
from muse_attention.cli.app import (
    Device,
    Overwrite,
    RepeatCaptures,
    Resume,
    app,
    make_folder,
    progress_bar,
    user_errors,
)
from muse_attention.cli.language_model import Dtype, Model, Place, Text, load_quietly, name_of
from muse_attention.cli.measuring import Output, add_command, measuring, results_file, show, spell, write
from muse_attention.evaluation.settings import check_context, describe_model, longest_context
from muse_attention.evaluation.texts import read_samples
from muse_attention.evaluation.tuning.candidates import (
    EXACT,
    Seconds,
    TuningResults,
    TuningSettings,
    candidates,
    measure,
)
from muse_attention.evaluation.tuning.report import shown, table_of, tuning_report, verdict
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
    groups: Annotated[
        bool,
        typer.Option(
            "--groups", help="With --save-captures: whole groups of heads that share their keys, for muse bench."
        ),
    ] = False,
    needles: Annotated[
        bool,
        typer.Option(
            "--needles", help="Bury a needle in each sample, and tell how much of the weight on it is attended to."
        ),
    ] = False,
    repeat: RepeatCaptures = False,
    device: Device = None,
    dtype: Dtype = None,
    output: Output = Path("out/tune"),
    name: Annotated[
        str | None,
        typer.Option(help="File name, without ending.", show_default="the name of the model or of the captures"),
    ] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
) -> None:
    """Find the fastest configuration below an error, on a model's own queries, keys and values and on this device.

    Measures time (forward and backward) and error of a grid of configurations. Writes NAME.json after each, and
    NAME.md, NAME.csv, NAME.html and NAME.png at the end. Run again, it adds what is missing.
    """
    with user_errors():
        if captures is not None and saved is not None:
            raise ValueError("--captures and --save-captures exclude each other: captures are saved once")
        if groups and saved is None:
            raise ValueError("--groups needs --save-captures FILE: muse tune measures heads with keys of their own")
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
            name=name if name is not None else name_of(model) if captures is None else captures.stem,
        )
        path = results_file(TuningResults, output, asked.name, overwrite=overwrite or saved is not None)
    with measuring(path, asked.spell(str, model, output=output), overwrite=overwrite):
        if saved is not None:
            save_captures(_capture(asked, grouped=groups), saved)
            typer.echo(f"wrote {saved}; measure on it anywhere by: muse tune --captures {shlex.quote(str(saved))}")
            return
        found = _open(asked)
        attentions = candidates(found.length, added=asked.added, only=asked.only)
        settings = TuningSettings.of(found, device=asked.place.device, dtype=asked.place.dtype, repeats=repeats)
        make_folder(output)
        results = TuningResults.start(settings, path, overwrite=overwrite)
        results.error = error
        missing = results.missing(attentions)
        if missing:
            add_command(results, asked.spell(lambda path: path.name, name_of(model)))
        with progress_bar(len(missing) + (results.exact is None)) as on_step:
            measure(found, attentions, results, path, _clock(found, repeats), on_step=on_step)
        _show(results)
        for line in verdict(results):
            typer.echo(line)
        write(tuning_report(results, path.stem), path, path)


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

    def spell(self, path: Callable[[Path], str], model: str, **others: object) -> str:
        """The command with every setting spelled out; `path` says how a path is."""
        of_model = {"text": list(map(path, self.texts)), "samples": self.samples, "needles": self.needles}
        return spell(
            *("tune", *([] if self.captures is not None else [model])),
            **({"captures": path(self.captures)} if self.captures is not None else of_model),
            length=None if self.length is None else format_size(self.length), error=f"{self.error:g}",
            heads=self.heads, repeats=self.repeats, attention=self.added, only=self.only,
            repeat_captures=self.repeat, device=self.place.device, dtype=self.place.dtype, name=self.name, **others,
        )  # fmt: skip


def _open(asked: _Asked) -> Captures:
    """What is measured on, on its device."""
    found = _capture(asked) if asked.captures is None else load_captures(asked.captures).with_heads(asked.heads)
    found = found.to(asked.place.device, DTYPES[asked.place.dtype])
    return found if asked.length is None else found.with_length(asked.length, repeat=asked.repeat)


def _capture(asked: _Asked, *, grouped: bool = False) -> Captures:
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
    captures = capture_heads(model, read.tokens, asked.heads, model_name=described, text=read.source, grouped=grouped)
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
    return _Clock(Workload.of(captures.query, captures.key, captures.value, is_causal=True), repeats)


def _show(results: TuningResults) -> None:
    settings = results.settings
    title = f"{len(settings.heads)} heads of {settings.model}\n{settings.text}, {format_size(settings.length)} tokens"
    show(table_of(results, shown(results)), title, _SHOWN)
