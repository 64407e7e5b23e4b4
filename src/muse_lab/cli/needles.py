"""`muse eval needles`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from muse_attention.registry import full_name
from muse_attention.sizes import format_size, parse_size_list
from muse_lab.cli.app import app, busy, say, user_errors
from muse_lab.cli.language_model import Model, Text, load_quietly, settings_of_model
from muse_lab.cli.measuring import Measurement, ModelRun, show
from muse_lab.cli.needle_comparisons import COMPARED, OVER_TRAININGS
from muse_lab.cli.options import Words, attentions, flag, listed, option, with_option_groups
from muse_lab.evaluation.gradients import gradient_report
from muse_lab.evaluation.gradients.results import GradientResults
from muse_lab.evaluation.gradients.results import measure as measure_gradients
from muse_lab.evaluation.lookups import lookup_report
from muse_lab.evaluation.lookups.results import LookupResults
from muse_lab.evaluation.lookups.results import measure as measure_lookups
from muse_lab.evaluation.needles import needle_report
from muse_lab.evaluation.needles.captures import fast_tokenizer
from muse_lab.evaluation.needles.results import (
    MeasuredSamples,
    NeedleResults,
    NeedleSettings,
    NeedleTask,
    measure,
    plan,
)
from muse_lab.evaluation.settings import check_context
from muse_lab.evaluation.texts import describe_texts, read_texts
from muse_lab.models import DEFAULT_MODEL, PreTrainedModel, PreTrainedTokenizerBase
from muse_lab.pretraining.data.corpus import HELD_OUT, read_corpus
from muse_lab.pretraining.data.tokenizer import Tokenizer, read_tokenizer
from muse_lab.pretraining.needles.haystacks import CorpusHaystack, Haystack, TextHaystack, check_enough
from muse_lab.pretraining.needles.samples import KINDS, NeedleSamples, check_kind
from muse_lab.pretraining.needles.writer import VERSION
from muse_lab.records.stored_results import OnStep
from muse_lab.report.tree import Report, Table

_TEXT_TOKENS = 2**20
"""Tokens of a haystack of texts, unless four times the longest context is more."""
_LOOKUPS_HELP = (
    "Measure how much of exact attention's weight on the needle each attention retrieves, in every head, instead of "
    "asking for answers. Writes NAME-lookups.json, .md and .html."
)
_GRADIENTS_HELP = (
    "Measure how much of exact attention's gradient for the answers each attention keeps, instead of asking for them. "
    "Writes NAME-gradients.json, .md and .html."
)
_RUN = ModelRun(output=Path("out/needles"))
_LENGTHS = "2k,4k,8k"
evaluations = typer.Typer(help="Evaluate a language model under any attention.")
app.add_typer(evaluations, name="eval")


@evaluations.callback(invoke_without_command=True)
def evaluate(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@evaluations.command()
@with_option_groups
def needles(
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    corpus: Annotated[
        Path | None, option("Corpus directory of `muse prepare`; its held-out repositories are the haystack.")
    ] = None,
    text: Text = None,
    length: Annotated[Words, listed("Sample length in tokens; k means 1024.", _LENGTHS)] = None,
    kind: Annotated[Words, listed("Kinds of needles.", ",".join(KINDS))] = None,
    attention: Annotated[
        Words, attentions("Attention that reads the prompt, in addition to exact attention", "MuSeConfig.for_length")
    ] = None,
    samples_per_depth: Annotated[int, option("Samples per kind, length and depth (nine depths).")] = 2,
    lookups: Annotated[bool, flag("--lookups", _LOOKUPS_HELP)] = False,
    gradients: Annotated[bool, flag("--gradients", _GRADIENTS_HELP)] = False,
    seed: Annotated[int, option("Random seed of the samples.")] = 0,
    run: ModelRun = _RUN,
) -> None:
    """Ask a language model for uids that are defined far back in a repository: code needle-in-a-haystack.

    Writes NAME.json as it goes, and NAME.md, pictures and NAME.html at the end. Run it again to add what is
    missing and retry failed samples.
    """
    texts, asked_for, kinds = text or [], attention or ["muse"], kind or list(KINDS)
    with user_errors():
        lengths = parse_size_list(length or [_LENGTHS])
        for name in kinds:
            check_kind(name)
        if lookups and gradients:
            raise ValueError("--lookups and --gradients measure different things; ask for one, then for the other")
        reference = [] if lookups or gradients else ["exact"]
        names = {
            tokens: list(dict.fromkeys([*reference, *(full_name(name, tokens) for name in asked_for)]))
            for tokens in lengths
        }
        if samples_per_depth < 1:
            raise ValueError(f"--samples-per-depth {samples_per_depth} measures nothing; choose at least 1")
        if corpus is not None and texts:
            raise ValueError("a haystack is either a corpus or texts; leave out --corpus or --text")
        stem = run.name_for(model)
        if stem in (COMPARED, OVER_TRAININGS):
            raise ValueError(f"--name {stem} is reserved for comparisons of several models; choose another")
        measured = _LOOKUPS if lookups else _GRADIENTS if gradients else _ANSWERS
        measurement: Measurement[MeasuredSamples] = Measurement(
            *(context, measured.results, run, stem),
            ending=measured.ending,
            settled={"length": ",".join(map(format_size, lengths)), "kind": ",".join(kinds), "attention": asked_for},
        )
    with measurement.errors():
        subject = _open(model, corpus, texts, lengths, kinds, seed, run)
        results = measurement.start(subject.settings)
        tasks = plan(names, subject.kinds, samples_per_depth)
        with measurement.progress(results, len(results.missing(tasks))) as on_step:
            measured.measure(subject, tasks, results, measurement.path, on_step)
        failed = isinstance(results, NeedleResults) and _tell_failures(results, tasks, measurement.again)
        if not failed or any(not outcome.error for outcome in results.measured.values()):
            title = f"{results.settings.model}\n{results.settings.haystack}"
            show(measured.table(results), title, measured.columns, measured.caption)
            measurement.write(measured.report(results, measurement.path.stem))
        if failed:
            raise typer.Exit(1)


@dataclass(frozen=True)
class _Subject:
    """A model, its samples, and the kinds to measure."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    samples: NeedleSamples
    kinds: dict[int, list[str]]
    """that fit, by length"""
    settings: NeedleSettings


@dataclass(frozen=True)
class _Measured:
    """A measurement on needle samples, and the columns of it that are shown on the terminal."""

    results: type[MeasuredSamples]
    ending: str
    """suffix of the base name of the files"""
    measure: Callable[[_Subject, Sequence[NeedleTask], Any, Path, OnStep], None]
    report: Callable[[Any, str], Report]
    table: Callable[[Any], Table]
    columns: Mapping[str, str] | Sequence[str]
    caption: str


_ANSWERS = _Measured(
    NeedleResults,
    "",
    lambda subject, *rest: measure(subject.model, subject.tokenizer, subject.samples, *rest),
    needle_report.needle_report,
    needle_report.summary_table,
    {name: name for name in ("length", "kind", "n")}
    | {
        "exact match": "exact\nmatch",
        "exact match: against exact": "against\nexact",
        "right of 8": "right\nof 8",
    },
    "In parentheses: 95% Wilson interval; against exact attention on the same samples, ± standard error.",
)
_LOOKUPS = _Measured(
    LookupResults,
    "-lookups",
    lambda subject, *rest: measure_lookups(subject.model, subject.samples, *rest),
    lookup_report.lookup_report,
    lookup_report.summary_table,
    ("length", "kind", "samples", "found", "exact", "pairs", "strong heads", "found, strong"),
    "Share of exact attention's weight on the needle that is retrieved, or in the query's own block.",
)
_GRADIENTS = _Measured(
    GradientResults,
    "-gradients",
    lambda subject, *rest: measure_gradients(subject.model, subject.samples, *rest),
    gradient_report.gradient_report,
    gradient_report.summary_table,
    ("length", "samples", "kept", "cosine", "kept, q and k", "cosine, q and k"),
    "Component of the answers' gradient along exact attention's, as a share of it; q and k: projections.",
)


def _open(
    model: str,
    corpus: Path | None,
    texts: Sequence[Path],
    lengths: Sequence[int],
    kinds: Sequence[str],
    seed: int,
    run: ModelRun,
) -> _Subject:
    """Load a model and its haystack; raises a ValueError or ImportError of one line if they give no samples."""
    loaded, tokenizer = load_quietly(model, run.place, download=run.download)
    check_context(loaded, max(lengths))
    backend = fast_tokenizer(tokenizer)
    haystack: Haystack
    if corpus is None:
        enough = max(_TEXT_TOKENS, 4 * max(lengths))
        source = f"the first {enough:,} tokens, or all, of {describe_texts(texts)}"
        with busy(f"encoding {source}"):
            haystack = TextHaystack.encode(backend, read_texts(texts), enough=enough, source=source)
    else:
        with busy(f"reading {corpus}"):
            haystack = _corpus_haystack(backend, corpus)
    check_enough(haystack, max(lengths))
    samples = NeedleSamples(backend, haystack, begin=tokenizer("").input_ids, seed=seed)
    # The description of a corpus has its fingerprint; that of texts does not depend on their contents.
    text_tokens = np.concatenate(haystack.files) if isinstance(haystack, TextHaystack) else np.empty(0, np.int64)
    model_settings = settings_of_model(model, loaded, run.place, torch.from_numpy(text_tokens))
    settings = NeedleSettings(haystack=haystack.source, seed=seed, version=VERSION, **model_settings)
    return _Subject(loaded, tokenizer, samples, _with_room(samples, lengths, kinds), settings)


def _with_room(samples: NeedleSamples, lengths: Sequence[int], kinds: Sequence[str]) -> dict[int, list[str]]:
    """The kinds that fit into each length; a line names those that do not. Raises ValueError if none fits."""
    shortest = {kind: samples.shortest(kind) for kind in kinds}
    fitting = {length: [kind for kind in kinds if shortest[kind] <= length] for length in lengths}
    if not any(fitting.values()):
        samples.make(min(kinds, key=shortest.__getitem__), max(lengths), 0, 0)  # raises, with the length it needs
    left_out = [
        f"{kind} at {format_size(length)}, which needs {shortest[kind]} tokens"
        for length in lengths
        for kind in kinds
        if kind not in fitting[length]
    ]
    if left_out:
        say(f"left out: {'; '.join(left_out)}")
    return fitting


def _corpus_haystack(tokenizer: Tokenizer, folder: Path) -> Haystack:
    corpus = read_corpus(folder)
    if read_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the model has another tokenizer than the corpus in {folder}; leave out --corpus, or use --text"
        )
    return CorpusHaystack(corpus, HELD_OUT)


def _tell_failures(results: NeedleResults, tasks: Sequence[NeedleTask], again: str) -> bool:
    """Report failures among the requested samples. Returns whether there are any."""
    failed = [task for task in tasks if results.measured[task].error]
    if failed:
        task, error = failed[0], results.measured[failed[0]].error
        say(
            f"{len(failed)} samples failed, one of {task.length} tokens under {task.attention} among them: {error}; "
            f"ask them again with: {again}"
        )
    return bool(failed)
