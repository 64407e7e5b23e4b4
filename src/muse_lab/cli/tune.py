"""`muse tune`."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from muse_attention.registry import get_attention
from muse_attention.sizes import format_size, parse_size
from muse_lab.benchmark.tuning import (
    TuningResults,
    TuningSettings,
    candidates,
    clock_on,
    measure,
    measure_costs,
    paper_sizes,
)
from muse_lab.benchmark.tuning_report import shown, table_of, tuning_report, verdict
from muse_lab.benchmark.workload import DTYPES
from muse_lab.cli.app import RepeatCaptures, app, busy, make_folder, user_errors
from muse_lab.cli.language_model import Model, Text, load_quietly, name_of
from muse_lab.cli.measuring import Measurement, ModelRun, show
from muse_lab.cli.options import Words, attentions, flag, option, with_option_groups
from muse_lab.evaluation.loss.positions import Cost, cost_on
from muse_lab.evaluation.settings import check_context, describe_model, longest_context
from muse_lab.evaluation.texts import describe_texts, read_samples
from muse_lab.models import DEFAULT_MODEL
from muse_lab.records.captured_heads import Captures, LookupAt, capture_heads, load_captures, save_captures
from muse_lab.report.provenance import count

_RUN = ModelRun(output=Path("out/tune"))
_DEFAULT_LENGTH = 8192
_COST = "Maximum rise of the model's loss on the samples, in nats: choose by loss instead of RSE."
_GROUPS = "With --save-captures: capture whole groups of heads that share keys, for `muse bench`."
_COMPACT = "With --save-captures: round to eight bits, for a file a quarter of the size."
_NEEDLES = "Hide a needle in each sample and report how much of the attention on it is computed exactly."
_NOT_WITH_COST = {
    "captures": "--captures exclude each other: the loss needs the model; name it in place of the captures",
    "saved": "--save-captures exclude each other: nothing is measured when captures are saved; leave --cost out",
    "error": "--error exclude each other: choose by loss or by RSE",
    "repeat": "--repeat-captures exclude each other: the loss needs whole texts; choose a shorter --length",
    "needles": "--needles exclude each other: the loss is that of ordinary text; look for needles in another run",
}
"""What is wrong with each field of the options beside a cost."""
_SHOWN = ("ms", "speed-up", "cost", "RSE", "RSE 99%", "RSE > 0.1", "keys", "found", "leak", "lookup")
"""Columns that fit a terminal; the reports have all."""


@dataclass(frozen=True)
class _Options:
    """What to measure, and on which heads."""

    model: Model = DEFAULT_MODEL
    text: Text = None
    length: Annotated[str | None, option("Sample length in tokens; k means 1024.", "8k, or that of the captures")] = (
        None
    )
    error: Annotated[
        float | None,
        option(
            "Maximum relative squared error, pooled over heads.",
            "that of the paper's sizes, at no fewer single keys found",
        ),
    ] = None
    cost: Annotated[float | None, option(_COST, "not measured")] = None
    heads: Annotated[int, option("Number of heads to measure, spread over the layers.")] = 12
    samples: Annotated[int, option("Number of consecutive samples of the text to capture.")] = 1
    attention: Annotated[Words, attentions("Additional attention to measure", "none")] = None
    only: Annotated[Words, attentions("Attention to measure instead of the grid", "none")] = None
    repeats: Annotated[int, option("Number of timed runs; medians are reported.")] = 3
    captures: Annotated[Path | None, option("Use heads captured by --save-captures instead of running the model.")] = (
        None
    )
    saved: Annotated[
        Path | None, flag("--save-captures", "Write the captured heads to a .safetensors file and exit.")
    ] = None
    groups: Annotated[bool, flag("--groups", _GROUPS)] = False
    compact: Annotated[bool, flag("--compact", _COMPACT)] = False
    needles: Annotated[bool, flag("--needles", _NEEDLES)] = False
    repeat: RepeatCaptures = False

    def check(self) -> None:
        if self.captures is not None and self.saved is not None:
            raise ValueError("--captures and --save-captures exclude each other: captures are saved once")
        if self.groups and self.saved is None:
            raise ValueError("--groups needs --save-captures FILE: muse tune measures heads with keys of their own")
        if self.compact and self.saved is None:
            raise ValueError("--compact needs --save-captures FILE: it makes that file smaller")
        if self.saved is not None and self.saved.is_dir():
            raise ValueError(f"--save-captures {self.saved} is a folder; name a file")
        if self.error is not None and not self.error >= 0:
            raise ValueError(f"--error {self.error} must be a number of at least 0")
        if self.cost is not None:
            if not 0 <= self.cost < math.inf:
                raise ValueError(f"--cost {self.cost} must be a finite number of at least 0")
            for name, fault in _NOT_WITH_COST.items():
                if getattr(self, name) != getattr(_Options, name):
                    raise ValueError(f"--cost and {fault}")
        for named in [*(self.attention or []), *(self.only or [])]:
            get_attention(named)

    @property
    def tokens(self) -> int | None:
        """Tokens of a sample; None without --length."""
        return None if self.length is None else parse_size(self.length)


_OPTIONS = _Options()


@app.command()
@with_option_groups
def tune(context: typer.Context, options: _Options = _OPTIONS, run: ModelRun = _RUN) -> None:
    """Find the fastest configuration that is as good as the paper's sizes, on a model's own queries, keys and values
    and on this device.

    Measures time (forward and backward) and error of a grid of configurations; with --cost also the model's loss, from
    the fastest on, until one costs little enough. Writes NAME.json after each, and NAME.md, NAME.html and NAME.png at
    the end. Run it again to add what is missing.
    """
    with user_errors():
        options.check()
        captures, saved = options.captures, options.saved
        unused = () if captures is None else ("model", "text", "samples", "needles")
        writes = replace(run, overwrite=run.overwrite or saved is not None)
        name = captures.stem if captures is not None and run.name is None else run.name_for(options.model)
        measurement = Measurement(context, TuningResults, writes, name, settled=dict.fromkeys(unused))
    with measurement.errors():
        if saved is not None:
            make_folder(saved.parent)
            captured, _ = _capture(options, run)
            with busy(f"writing {saved}"):
                save_captures(captured, saved, compact=options.compact)
            typer.echo(f"wrote {saved}; measure on it anywhere with: muse tune --captures {shlex.quote(str(saved))}")
            return
        captured, cost_of = _open(options, run)
        only = list(options.only or ())
        if only and options.error is None and options.cost is None:
            only.append(paper_sizes(captured.length))
        chosen = candidates(captured.length, added=options.attention or (), only=only)
        settings = TuningSettings.of(captured, device=run.place.device, dtype=run.place.dtype, repeats=options.repeats)
        results = measurement.start(settings)
        results.error, results.cost = options.error, options.cost
        steps = len(results.missing(chosen)) + (results.exact is None)
        with measurement.progress(results, steps) as on_step:
            measure(captured, chosen, results, measurement.path, clock_on(captured, options.repeats), on_step=on_step)
        if options.cost is not None and cost_of is not None:
            with measurement.progress(results, len(results.faster)) as on_step:
                measure_costs(results, options.cost, measurement.path, cost_of, on_step=on_step)
        results.write(measurement.path)
        _show(results)
        for line in verdict(results):
            typer.echo(line)
        measurement.write(tuning_report(results, measurement.path.stem))


def _open(options: _Options, run: ModelRun) -> tuple[Captures, Cost | None]:
    """The captured heads to measure on, on their device, and what `_capture` returns with them."""
    captures, tokens, cost_of = options.captures, options.tokens, None
    if captures is None:
        captured, cost_of = _capture(options, run)
    else:
        with busy(f"reading {captures}"):
            captured = load_captures(captures).with_heads(options.heads)
    captured = captured.to(run.place.device, DTYPES[run.place.dtype])
    return captured if tokens is None else captured.with_length(tokens, repeat=options.repeat), cost_of


def _capture(options: _Options, run: ModelRun) -> tuple[Captures, Cost | None]:
    """Capture heads on samples of --length, or of the model's context if it is shorter and samples may be repeated.

    With --cost also the function that measures costs on the same samples, which keeps the model.
    """
    texts, length = options.text or [], options.tokens or _DEFAULT_LENGTH
    model, tokenizer = load_quietly(options.model, run.place, download=run.download)
    if options.repeat:
        length = min(length, longest_context(model) or length)
    check_context(model, length)
    lookups: tuple[LookupAt, ...] = ()
    with busy(f"reading {describe_texts(texts)}"):
        if options.needles:
            from muse_lab.evaluation.needles.captures import read_needle_samples  # here: it needs tokenizers

            read, lookups = read_needle_samples(tokenizer, texts, length, options.samples)
        else:
            read = read_samples(tokenizer, texts, length, options.samples)
    named = {"model_name": describe_model(name_of(options.model), model), "text": read.source}
    heads = f"{options.heads} heads of {name_of(options.model)}"
    with busy(f"capturing {heads} on {count(options.samples, 'sample')} of {format_size(length)} tokens"):
        captured = capture_heads(model, read.tokens, options.heads, grouped=options.groups, **named)
    return replace(captured, lookups=lookups), None if options.cost is None else cost_on(model, read.tokens)


def _show(results: TuningResults) -> None:
    settings = results.settings
    title = f"{len(settings.heads)} heads of {settings.model}\n{settings.text}, {format_size(settings.length)} tokens"
    show(table_of(results, shown(results)), title, _SHOWN)
