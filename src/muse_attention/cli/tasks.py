"""`muse eval tasks`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.table import Table

from muse_attention.by_name import full_name, has_settings_of_length
from muse_attention.cli.app import (
    Device,
    console,
    file_stem,
    make_folder,
    new_table,
    phases_bar,
    run_errors,
    say,
    user_errors,
)
from muse_attention.cli.evaluate import evaluations
from muse_attention.cli.language_model import (
    Dtype,
    Model,
    Place,
    how_to_continue,
    load_quietly,
    name_of,
    short_warnings,
)
from muse_attention.evaluation.settings import check_context, describe_model, take_fingerprint
from muse_attention.evaluation.tasks.answers import (
    Part,
    Results,
    TaskNotOpenedError,
    TaskSettings,
    measure,
    read_results,
    start_results,
)
from muse_attention.evaluation.tasks.benchmarks import Benchmark, choose, read_rows, what_is_missing
from muse_attention.evaluation.tasks.report import (
    as_csv,
    format_score,
    gap_to_exact,
    html_report,
    markdown_report,
    mean_score,
)
from muse_attention.files import replace_file
from muse_attention.pretrained import DEFAULT_MODEL
from muse_attention.sizes import format_size, parse_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@evaluations.command()
def tasks(
    model: Model = DEFAULT_MODEL,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="arc_easy, sciq, lcc, repobench-p, ruler or one of its niah_ tasks; several with commas, or repeated.",
            show_default="ruler",
        ),
    ] = None,
    length: Annotated[str, typer.Option(help="Tokens of RULER's samples; several with commas; k means 1024.")] = "4k",
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="Attention in prefill, by name, as muse:paper; may be repeated. Exact attention is always measured.",
            show_default="exact",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of data sets, laid out as in docs/evaluation.md.", show_default="none")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Samples of every task, at most.", show_default="all")] = None,
    device: Device = None,
    dtype: Dtype = None,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("out/tasks"),
    name: Annotated[str, typer.Option(help="File name, without ending.")] = "tasks",
    resume: Annotated[bool, typer.Option("--resume", help="Keep the answers that the file has already.")] = False,
) -> None:
    """Run standard tasks on a language model, under one attention after another, through lm-eval.

    Writes NAME.json while samples are answered, and NAME.md, NAME.csv and NAME.html at the end. Nothing is downloaded.
    """
    with user_errors():
        place = Place.choose(device, dtype)
        asked_for = [word.strip() for words in task or ["ruler"] for word in words.split(",")]
        benchmarks = _with_data(choose(asked_for), data, needed=[word for word in asked_for if word != "ruler"])
        _check_data(benchmarks, data)
        lengths = parse_sizes(length)
        parts = [part for benchmark in benchmarks for part in _parts(benchmark, lengths, attention or [])]
        if limit is not None and limit < 1:
            raise ValueError(f"--limit {limit} leaves nothing to answer; give at least 1, or leave it out for all")
        path = output / f"{file_stem(name)}.json"
        if resume and path.exists():
            read_results(path)  # what is broken should be known before a model is loaded
        options = _spell_options(benchmarks, lengths, attention or ["exact"], limit, place, name)
        command = shlex.join(["muse", "eval", "tasks", name_of(model), *options])
    local = [] if data is None else ["--data", str(data)]
    again = shlex.join(["muse", "eval", "tasks", model, *options, *local, "--output", str(output), "--resume"])
    with run_errors(lambda: how_to_continue(path, again)), user_errors(), short_warnings():
        from muse_attention.evaluation.tasks.harness import Harness, import_harness

        harness_name = import_harness()
        loaded, tokenizer = load_quietly(model, place)
        if any(benchmark.is_ruler for benchmark in benchmarks):
            check_context(loaded, max(lengths))
        settings = TaskSettings(
            model=describe_model(name_of(model), loaded),
            harness=harness_name,
            limit=limit,
            device=place.device,
            dtype=place.dtype,
            fingerprint=_fingerprint(loaded, tokenizer),
        )
        harness = Harness(loaded, tokenizer)
        make_folder(output)
        results = start_results(settings, path, resume=resume)
        if command not in results.commands:
            results.commands.append(command)
        try:
            with phases_bar() as on_step:
                measure(harness, parts, data, results, path, on_step=on_step, on_failure=say)
        except TaskNotOpenedError as error:
            raise ValueError(f"{error}; {how_to_continue(path, again)}") from error
        console.print(_scores_table(results))
        write_tasks_reports(results, path)
        if failed := results.failed_in(parts):
            say(f"{failed} samples failed, and count in no score; ask them again with: {again}")
            raise typer.Exit(1)


def _spell_options(
    benchmarks: Sequence[Benchmark],
    lengths: Sequence[int],
    attentions: Sequence[str],
    limit: int | None,
    place: Place,
    name: str,
) -> list[str]:
    """Every setting of the command, save the model and the folders."""
    words = ["--task", ",".join(benchmark.name for benchmark in benchmarks)]
    if any(benchmark.is_ruler for benchmark in benchmarks):
        words += ["--length", ",".join(map(format_size, lengths))]
    for attention in attentions:
        words += ["--attention", attention]
    if limit is not None:
        words += ["--limit", str(limit)]
    return [*words, "--device", place.device, "--dtype", place.dtype, "--name", name]


def _with_data(benchmarks: Sequence[Benchmark], folder: Path | None, *, needed: Sequence[str]) -> list[Benchmark]:
    """Those that can run; a ValueError if one of the `needed` cannot, and if none can. The others are told."""
    if folder is not None and not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}; --data is the folder of data sets")
    missing = {benchmark: what_is_missing(benchmark, folder) for benchmark in benchmarks}
    for benchmark, what in missing.items():
        if what is not None and benchmark.name in needed:
            raise ValueError(f"{benchmark.name} has no data here: {what}")
    left_out = [benchmark for benchmark, what in missing.items() if what is not None]
    if left_out:
        names = ", ".join(benchmark.name for benchmark in left_out)
        say(f"left out: {names}; to run them, {missing[left_out[0]]}")
    return [benchmark for benchmark in benchmarks if benchmark not in left_out]


def _check_data(benchmarks: Sequence[Benchmark], folder: Path | None) -> None:
    """Read all data once: what is broken should be known before a model is loaded, or other tasks were answered."""
    for data in dict.fromkeys(benchmark.data for benchmark in benchmarks):
        if data is not None:
            assert folder is not None
            read_rows(data, folder)


def _parts(benchmark: Benchmark, lengths: Sequence[int], attentions: Sequence[str]) -> list[Part]:
    """Exact attention first: the others are compared with it."""
    if not benchmark.is_ruler:
        return [Part(benchmark, None, _each_once([_checked(attention) for attention in attentions]))]
    return [
        Part(benchmark, length, _each_once([full_name(attention, length) for attention in attentions]))
        for length in lengths
    ]


def _each_once(attentions: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(["exact", *attentions]))


def _checked(attention: str) -> str:
    """In one spelling; `muse` and `muse:paper` stay as they are: their settings are those of each sample's length."""
    name = full_name(attention, 1)
    return attention if has_settings_of_length(attention) else name


def _fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Of the weights, and of how the tokenizer splits something of everything."""
    ids = tokenizer("".join(map(chr, range(32, 127))) + " The quick brown fox\n\tjumps over 1234567890").input_ids
    return take_fingerprint(model, torch.tensor(ids))


def _scores_table(results: Results) -> Table:
    headers = ("task", "score", "gap to exact", "of those\npublished")
    table = new_table(f"{results.settings.model}\n{results.settings.harness}", *headers)
    for cell in results.cells.values():
        for attention in cell.answers:
            for metric in cell.benchmark.metrics:
                words = [cell.task]
                words += [] if cell.length is None else [format_size(cell.length)]
                words += [metric] if len(cell.benchmark.metrics) > 1 else []
                score = format_score(mean_score(cell.scored(attention), metric), signed=False)
                gap = "" if attention == "exact" else format_score(gap_to_exact(cell, attention, metric), signed=True)
                samples = f"{len(cell.scored(attention))} of {cell.benchmark.published}"
                table.add_row(attention, " ".join(words), score, gap, samples)
    return table


def write_tasks_reports(results: Results, path: Path) -> None:
    if not results.cells:
        raise ValueError("no sample has been answered yet; continue the run with --resume")
    title = f"Standard tasks: {path.stem}"
    files = {
        path.with_suffix(".md"): markdown_report(results, title=title),
        path.with_suffix(".csv"): as_csv(results),
        path.with_suffix(".html"): html_report(results, title=title),
    }
    for file, content in files.items():
        replace_file(file, content)
    typer.echo(f"wrote {', '.join(map(str, [path, *files]))}")
