"""`muse tune`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from muse_attention.benchmark.timing import time_interleaved
from muse_attention.benchmark.workload import DTYPES, Workload, sdpa
from muse_attention.by_name import get_attention
from muse_attention.captured_heads import Captures, LookupAt, capture_heads, load_captures, save_captures
from muse_attention.cli.app import RepeatCaptures, app, user_errors
from muse_attention.cli.language_model import Model, Text, load_quietly, name_of
from muse_attention.cli.measuring import Measurement, ModelRun, show
from muse_attention.cli.options import Words, attentions, with_option_groups
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

_RUN = ModelRun(output=Path("out/tune"))
_DEFAULT_LENGTH = 8192
_SHOWN = ("ms", "speed-up", "RSE", "RSE 99%", "RSE > 0.1", "keys", "lookup")
"""Columns that fit a terminal; the reports have all."""


@app.command()
@with_option_groups
def tune(
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    text: Text = None,
    length: Annotated[
        str | None, typer.Option(help="Tokens of a sample; k means 1024.", show_default="8k, or that of the captures")
    ] = None,
    error: Annotated[float, typer.Option(help="Largest relative squared error, pooled over heads.")] = 0.005,
    heads: Annotated[int, typer.Option(help="Heads to measure on, spread over the layers.")] = 12,
    samples: Annotated[int, typer.Option(help="Samples to capture, one after another in the text.")] = 1,
    attention: Annotated[Words, attentions("Attention to measure too", "none")] = None,
    only: Annotated[Words, attentions("Attention to measure in place of the grid", "none")] = None,
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
    run: ModelRun = _RUN,
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
            model,
            captures,
            text or [],
            None if length is None else parse_size(length),
            heads,
            samples,
            needles,
            repeat,
            run,
        )
        unused = () if captures is None else ("model", "text", "samples", "needles")
        writes = replace(run, overwrite=run.overwrite or saved is not None)
        name = captures.stem if captures is not None and run.name is None else run.name_for(model)
        measurement = Measurement(context, TuningResults, writes, name, settled=dict.fromkeys(unused))
    with measurement.errors():
        if saved is not None:
            save_captures(_capture(asked, grouped=groups), saved)
            typer.echo(f"wrote {saved}; measure on it anywhere by: muse tune --captures {shlex.quote(str(saved))}")
            return
        found = _open(asked)
        chosen = candidates(found.length, added=attention or (), only=only or ())
        settings = TuningSettings.of(found, device=run.place.device, dtype=run.place.dtype, repeats=repeats)
        results = measurement.start(settings)
        results.error = error
        steps = len(results.missing(chosen)) + (results.exact is None)
        with measurement.progress(results, steps) as on_step:
            measure(found, chosen, results, measurement.path, _clock(found, repeats), on_step=on_step)
        _show(results)
        for line in verdict(results):
            typer.echo(line)
        measurement.write(tuning_report(results, measurement.path.stem))


@dataclass(frozen=True)
class _Asked:
    """What is to be measured on."""

    model: str
    captures: Path | None
    texts: Sequence[Path]
    length: int | None
    heads: int
    samples: int
    needles: bool
    repeat: bool
    run: ModelRun


def _open(asked: _Asked) -> Captures:
    """What is measured on, on its device."""
    found = _capture(asked) if asked.captures is None else load_captures(asked.captures).with_heads(asked.heads)
    found = found.to(asked.run.place.device, DTYPES[asked.run.place.dtype])
    return found if asked.length is None else found.with_length(asked.length, repeat=asked.repeat)


def _capture(asked: _Asked, *, grouped: bool = False) -> Captures:
    """Samples of the length, or of the model's context where that is shorter and they may be repeated."""
    model, tokenizer = load_quietly(asked.model, asked.run.place, download=asked.run.download)
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
