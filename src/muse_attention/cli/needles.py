"""`muse eval needles`."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
import typer
from rich.table import Table

from muse_attention.cli.app import (
    Device,
    console,
    file_stem,
    make_folder,
    new_table,
    progress_bar,
    run_errors,
    say,
    user_errors,
)
from muse_attention.cli.evaluate import evaluations
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
from muse_attention.cli.needle_lookups import measure_lookups
from muse_attention.cli.needle_reports import COMPARED, write_needle_reports
from muse_attention.evaluation.attentions import full_name
from muse_attention.evaluation.lookup_results import read_results as read_lookups
from muse_attention.evaluation.needle_report import summary_table
from muse_attention.evaluation.needle_results import (
    Results,
    Settings,
    Task,
    measure,
    plan,
    read_results,
    start_results,
)
from muse_attention.evaluation.needles import KINDS, NeedleSamples, check_kind
from muse_attention.evaluation.settings import check_context, describe_model, take_fingerprint
from muse_attention.evaluation.texts import describe_texts, read_texts
from muse_attention.pretrained import DEFAULT_MODEL
from muse_attention.pretraining.data.corpus import HELD_OUT, read_corpus
from muse_attention.pretraining.data.tokenizer import read_tokenizer
from muse_attention.pretraining.needles.haystacks import CorpusHaystack, Haystack, TextHaystack, check_enough
from muse_attention.pretraining.needles.writer import VERSION
from muse_attention.sizes import format_size, parse_sizes

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TEXT_TOKENS = 2**20
"""Of a haystack of texts, unless four times the longest context is more."""


@evaluations.command()
def needles(
    model: Model = DEFAULT_MODEL,
    corpus: Annotated[
        Path | None,
        typer.Option(help="Folder that muse prepare wrote: its held-out repositories are the haystack."),
    ] = None,
    text: Text = None,
    length: Annotated[
        str, typer.Option(help="Tokens of a sample, one or several by commas; k means 1024.")
    ] = "2k,4k,8k",
    kind: Annotated[str, typer.Option(help="Kinds of samples, by commas.")] = ",".join(KINDS),
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="Attention that reads the prompt, by name, as muse:paper; may be repeated. Exact always does.",
            show_default="MuSeConfig.for_length",
        ),
    ] = None,
    samples_per_depth: Annotated[int, typer.Option(help="Of each kind and length, in each of nine depths.")] = 10,
    lookups: Annotated[
        bool,
        typer.Option(
            "--lookups",
            help="Ask nothing: measure how much of exact attention's weight on the needle each attention retrieves, in "
            "every head. Writes NAME-lookups.json, .md, .csv and .html.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("out/needles"),
    name: Annotated[
        str | None, typer.Option(help="File name, without ending.", show_default="the name of the model")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the samples that the file has already.")] = False,
) -> None:
    """Ask a language model for uids that are defined far back in a repository: code needle-in-a-haystack.

    Writes NAME.json on the way, and NAME.md, NAME.csv, pictures and NAME.html at the end. Samples that fail are listed,
    and tried again with --resume.
    """
    texts = text or []
    asked_for = attention or ["muse"]
    with user_errors():
        place = Place.choose(device, dtype)
        lengths = parse_sizes(length)
        kinds = _kinds(kind)
        attentions = {tokens: _attentions(asked_for, tokens) for tokens in lengths}
        if samples_per_depth < 1:
            raise ValueError(f"--samples-per-depth {samples_per_depth} measures nothing; choose at least 1")
        if corpus is not None and texts:
            raise ValueError("a haystack is either a corpus or texts; leave out --corpus or --text")
        stem = file_stem(name if name is not None else name_of(model))
        if stem == COMPARED:
            raise ValueError(f"--name {COMPARED} is that of the comparison of several models; choose another")
        path = output / f"{stem}{'-lookups' if lookups else ''}.json"
        if resume and path.exists():
            (read_lookups if lookups else read_results)(path)  # what is broken should be known before a model is loaded
    spell = functools.partial(_spell, length, kinds, asked_for, samples_per_depth, lookups, seed, place, stem)
    again = f"{spell(model, corpus, texts)} --output {shlex.quote(str(output))} --resume"
    with run_errors(lambda: how_to_continue(path, again)), user_errors(), short_warnings():
        subject = _open(model, corpus, texts, lengths, kinds, seed, place)
        make_folder(output)
        command = spell(name_of(model), corpus and Path(corpus.name), [Path(file.name) for file in texts])
        if lookups:
            names = {tokens: [full_name(name, tokens) for name in dict.fromkeys(asked_for)] for tokens in lengths}
            tasks = plan(names, subject.kinds, samples_per_depth)
            measure_lookups(subject.model, subject.samples, subject.settings, tasks, path, command, resume=resume)
            return
        results = start_results(subject.settings, path, resume=resume)
        tasks = plan(attentions, subject.kinds, samples_per_depth)
        missing = results.missing(tasks)
        if missing and command not in results.commands:
            results.commands.append(command)
        with progress_bar(len(missing)) as on_step:
            measure(subject.model, subject.tokenizer, subject.samples, tasks, results, path, on_step=on_step)
        failed = _tell_failures(results, tasks, again)
        if any(not outcome.error for outcome in results.outcomes.values()):
            console.print(_table(results))
            write_needle_reports(results, path)
        if failed:
            raise typer.Exit(1)


@dataclass(frozen=True)
class _Subject:
    """What is measured."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    samples: NeedleSamples
    kinds: dict[int, list[str]]
    """that have room, by length"""
    settings: Settings


def _open(
    model: str,
    corpus: Path | None,
    texts: Sequence[Path],
    lengths: Sequence[int],
    kinds: Sequence[str],
    seed: int,
    place: Place,
) -> _Subject:
    """Load a model and its haystack; a ValueError or ImportError of one line if samples cannot be made of them."""
    loaded, tokenizer = load_quietly(model, place)
    check_context(loaded, max(lengths))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} does not say where its tokens are; use a fast tokenizer")
    if corpus is None:
        haystack = _text_haystack(backend, texts, max(_TEXT_TOKENS, 4 * max(lengths)))
    else:
        haystack = _corpus_haystack(backend, corpus)
    check_enough(haystack, max(lengths))
    samples = NeedleSamples(backend, haystack, begin=tokenizer("").input_ids, seed=seed)
    # The words for a corpus have its fingerprint; those for texts do not say what is in them.
    looked_at = np.concatenate(haystack.files) if isinstance(haystack, TextHaystack) else np.empty(0, np.int64)
    settings = Settings(
        model=describe_model(name_of(model), loaded),
        haystack=haystack.source,
        seed=seed,
        device=place.device,
        dtype=place.dtype,
        fingerprint=take_fingerprint(loaded, torch.from_numpy(looked_at)),
        version=VERSION,
    )
    return _Subject(loaded, tokenizer, samples, _with_room(samples, lengths, kinds), settings)


def _with_room(samples: NeedleSamples, lengths: Sequence[int], kinds: Sequence[str]) -> dict[int, list[str]]:
    """The kinds that can be made at each length. The others are told; a ValueError if there are no other ones."""
    shortest = {kind: samples.shortest(kind) for kind in kinds}
    found = {length: [kind for kind in kinds if shortest[kind] <= length] for length in lengths}
    if not any(found.values()):
        samples.make(min(kinds, key=shortest.__getitem__), max(lengths), 0, 0)  # raises, and says what it needs
    left_out = [
        f"{kind} at {format_size(length)}, which needs {shortest[kind]} tokens"
        for length in lengths
        for kind in kinds
        if kind not in found[length]
    ]
    if left_out:
        say(f"left out: {'; '.join(left_out)}")
    return found


def _text_haystack(tokenizer: Tokenizer, texts: Sequence[Path], enough: int) -> Haystack:
    source = f"the first {enough:,} tokens, or all, of {describe_texts(texts)}"
    return TextHaystack.encode(tokenizer, read_texts(texts), enough=enough, source=source)


def _corpus_haystack(tokenizer: Tokenizer, folder: Path) -> Haystack:
    corpus = read_corpus(folder)
    if read_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the model has another tokenizer than the corpus in {folder}; leave out --corpus, or use --text"
        )
    return CorpusHaystack(corpus, HELD_OUT)


def _kinds(text: str) -> list[str]:
    kinds = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for kind in kinds:
        check_kind(kind)
    return kinds


def _attentions(asked_for: Sequence[str], length: int) -> list[str]:
    """Exact attention first: the others are compared with it."""
    return list(dict.fromkeys(["exact", *(full_name(attention, length) for attention in asked_for)]))


def _spell(
    length: str,
    kinds: Sequence[str],
    attentions: Sequence[str],
    samples_per_depth: int,
    lookups: bool,
    seed: int,
    place: Place,
    name: str,
    model: str,
    corpus: Path | None,
    texts: Sequence[Path],
) -> str:
    """The command with every setting spelled out, save the folder of the results."""
    words = ["muse", "eval", "needles", model]
    words += [] if corpus is None else ["--corpus", str(corpus)]
    for text in texts:
        words += ["--text", str(text)]
    words += ["--length", ",".join(map(format_size, parse_sizes(length))), "--kind", ",".join(kinds)]
    for attention in attentions:
        words += ["--attention", attention]
    words += ["--samples-per-depth", str(samples_per_depth), *(["--lookups"] if lookups else []), "--seed", str(seed)]
    return shlex.join([*words, "--device", place.device, "--dtype", place.dtype, "--name", name])


def _table(results: Results) -> Table:
    _, rows = summary_table(results)
    settings = results.settings
    headers = ("length", "kind", "n", "exact\nmatch", "against\nexact", "right\nof 8")
    table = new_table(f"{settings.model}\n{settings.haystack}", *headers)
    table.caption = "± standard error; against exact attention on the same samples."
    for row in rows:
        table.add_row(*row[: 1 + len(headers)])
    return table


def _tell_failures(results: Results, tasks: Sequence[Task], again: str) -> bool:
    """Whether there are any among the samples that were asked for."""
    failed = [task for task in tasks if results.outcomes[task].error]
    if failed:
        task, error = failed[0], results.outcomes[failed[0]].error
        say(
            f"{len(failed)} samples failed, one of {task.length} tokens under {task.attention} among them: {error}; "
            f"ask them again with: {again}"
        )
    return bool(failed)
