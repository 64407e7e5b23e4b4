"""`muse eval tasks`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from torch import Tensor

from muse_attention.registry import config_at, full_name
from muse_attention.sizes import format_size, parse_size_list
from muse_lab.cli.app import busy, console, new_table, phases_bar, say, user_errors
from muse_lab.cli.evaluate import evaluations
from muse_lab.cli.language_model import Model, load_quietly, settings_of_model
from muse_lab.cli.measuring import Measurement, ModelRun
from muse_lab.cli.options import Words, attentions, listed, option, with_option_groups
from muse_lab.evaluation.settings import check_context
from muse_lab.evaluation.tasks.answers import Part, TaskNotOpenedError, TaskResults, TaskSettings, measure
from muse_lab.evaluation.tasks.benchmarks import Benchmark, choose, read_rows, what_is_missing
from muse_lab.evaluation.tasks.tasks_report import format_gap, format_score, tasks_report
from muse_lab.models import DEFAULT_MODEL, find_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_RUN = ModelRun(output=Path("out/tasks"))
_TASKS = "ruler"
_LENGTHS = "4k"


@evaluations.command()
@with_option_groups
def tasks(
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    task: Annotated[Words, listed("arc_easy, sciq, lcc, repobench-p, ruler or one of its niah_ tasks.", _TASKS)] = None,
    length: Annotated[Words, listed("Length of RULER samples in tokens; k means 1024.", _LENGTHS)] = None,
    attention: Annotated[Words, attentions("Attention in prefill, beside exact attention", "exact alone")] = None,
    data: Annotated[Path | None, option("Directory of data sets, laid out as in docs/evaluation.md.", "none")] = None,
    samples: Annotated[int | None, option("Maximum number of samples per task.", "all", "--samples", "--limit")] = None,
    run: ModelRun = _RUN,
) -> None:
    """Run standard tasks on a language model, under one attention after another, through lm-eval.

    Writes NAME.json while samples are answered, and NAME.md, NAME.csv and NAME.html at the end. Run again, it
    adds what is missing, and asks failed samples again. No data are downloaded.
    """
    with user_errors():
        place, asked_for = run.place, task or [_TASKS]
        benchmarks = _with_data(choose(asked_for), data, needed=[word for word in asked_for if word != "ruler"])
        with busy(f"reading {data}"):
            _check_data(benchmarks, data)
        lengths = parse_size_list(length or [_LENGTHS])
        parts = [part for benchmark in benchmarks for part in _parts(benchmark, lengths, attention or [])]
        if samples is not None and samples < 1:
            raise ValueError(f"--samples {samples} leaves nothing to answer; give at least 1, or leave it out for all")
        has_lengths = any(benchmark.is_ruler for benchmark in benchmarks)
        measurement = Measurement(
            *(context, TaskResults, run, run.name_for(model)),
            settled={
                "task": ",".join(benchmark.name for benchmark in benchmarks),
                "length": ",".join(map(format_size, lengths)) if has_lengths else None,
                "attention": attention or ["exact"],
            },
        )
    with measurement.errors() as how_to_continue:
        from muse_lab.evaluation.tasks.harness import Harness, import_harness

        if run.download and importlib.util.find_spec("lm_eval") is not None:
            find_folder(model, download=True)
        with busy("importing lm-eval"):
            harness_name = import_harness()  # from here on the hub is out of reach
        loaded, tokenizer = load_quietly(model, place, download=run.download)
        if has_lengths:
            check_context(loaded, max(lengths))
        about = settings_of_model(model, loaded, place, _some_tokens(tokenizer))
        harness = Harness(loaded, tokenizer)
        results = measurement.start(TaskSettings(harness=harness_name, limit=samples, **about))
        measurement.record(results)
        try:
            with phases_bar() as on_step:
                measure(harness, parts, data, results, measurement.path, on_step=on_step, on_failure=say)
        except TaskNotOpenedError as error:
            raise ValueError(f"{error}; {how_to_continue()}") from error
        _show(results)
        measurement.write(tasks_report(results, measurement.path.stem))
        if failed := results.failed_in(parts):
            say(f"{failed} samples failed, and count in no score; ask them again with: {measurement.again}")
            raise typer.Exit(1)


def _with_data(benchmarks: Sequence[Benchmark], folder: Path | None, *, needed: Sequence[str]) -> list[Benchmark]:
    """Those that can run; a ValueError if one of the `needed` cannot, and if none can. A line names the others."""
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
    """Read all data once, so that broken data are reported before a model is loaded or a task is answered."""
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
    return attention if config_at(attention) is None else name


def _some_tokens(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """How the tokenizer splits a text with all printable ASCII characters."""
    text = "".join(map(chr, range(32, 127))) + " The quick brown fox\n\tjumps over 1234567890"
    return torch.tensor(tokenizer(text).input_ids)


def _show(results: TaskResults) -> None:
    table = new_table(
        f"{results.settings.model}\n{results.settings.harness}", "task", "score", "gap to exact", "of those\npublished"
    )
    for cell in results.cells.values():
        for attention in cell.answers:
            for metric in cell.benchmark.metrics:
                words = [cell.task]
                words += [] if cell.length is None else [format_size(cell.length)]
                words += [metric] if len(cell.benchmark.metrics) > 1 else []
                scored = cell.scored(attention)
                cells = (format_score(scored, metric), format_gap(cell, attention, metric))
                table.add_row(attention, " ".join(words), *cells, f"{len(scored)} of {cell.published}")
    console.print(table)
