"""`muse compare`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muse_attention.registry import full_name
from muse_attention.sizes import format_size, parse_size
from muse_lab.cli.app import (
    Device,
    Output,
    Overwrite,
    app,
    busy,
    console,
    make_folder,
    new_table,
    progress_bar,
    say,
    user_errors,
)
from muse_lab.cli.language_model import Place, silence_transformers
from muse_lab.cli.measuring import add_command, measuring, spell, write
from muse_lab.cli.options import Words, attentions, flag, option, with_option_groups
from muse_lab.evaluation.comparison.comparison_report import comparison_report, matrix_table
from muse_lab.evaluation.comparison.results import ComparisonResults, ComparisonSettings
from muse_lab.evaluation.loss.curves import SHORTEST
from muse_lab.pretraining.batches import Windows
from muse_lab.pretraining.data.corpus import HELD_OUT, Corpus, read_corpus
from muse_lab.pretraining.recipes import PRECISIONS
from muse_lab.records.attention_names import EXACT, without_freezing

if TYPE_CHECKING:
    from muse_lab.evaluation.comparison.runs import StoredRun

RESULTS = "compare.json"
_CORPUS = Path("out/corpus")


@dataclass(frozen=True)
class ComparisonRequest:
    """How to compare runs."""

    corpus: Annotated[Path, option("Corpus directory of `muse prepare` that the runs were trained on.")] = _CORPUS
    attention: Annotated[
        Words,
        attentions("Attention to test with, in addition to exact attention", "those that the runs were trained with"),
    ] = None
    samples: Annotated[
        int,
        option(
            "Maximum number of evenly spaced held-out windows. 0 measures nothing: the report has what runs recorded "
            "during training, and needs only their run.json and metrics.jsonl."
        ),
    ] = 16
    length: Annotated[str | None, option("Window length in tokens; k means 1024.", "that of the runs")] = None
    checkpoints: Annotated[
        int, option("Maximum number of earlier checkpoints per run whose loss by position is measured.")
    ] = 3
    device: Device = None
    dtype: Annotated[
        str | None,
        option("float32 or bfloat16.", "float32 on cpu, bfloat16 on cuda", "--dtype", "--precision"),
    ] = None
    shared_gpu: Annotated[
        bool, flag("--shared-gpu", "Leave out training speeds, because the GPU was shared with other programs.")
    ] = False
    output: Output = Path("out/compare")
    overwrite: Overwrite = False

    @cached_property
    def place(self) -> Place:
        return Place.choose(self.device, self.dtype)

    @property
    def path(self) -> Path:
        return self.output / RESULTS

    def check(self) -> None:
        if self.place.dtype not in PRECISIONS:
            raise ValueError(f"--dtype {self.place.dtype} must be one of {', '.join(PRECISIONS)}")
        if self.samples < 0 or self.checkpoints < 0:
            raise ValueError("--samples and --checkpoints must be at least 0")
        if not self.samples and (self.attention or self.length):
            raise ValueError("--samples 0 measures nothing: leave --attention and --length out, or ask for samples")


_REQUEST = ComparisonRequest()


@app.command()
@with_option_groups
def compare(
    context: typer.Context,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Output directories of `muse train`.")],
    request: ComparisonRequest = _REQUEST,
) -> None:
    """Compare training runs: held-out loss under their own and other attentions, by position, speed, scaling law.

    Writes compare.json after every measured sample, and reports at the end. Run it again to add what is missing.
    """
    with user_errors():
        request.check()
        place = {"device": request.place.device, "dtype": request.place.dtype}
    with measuring(request.path, spell(context, place), overwrite=request.overwrite):
        compare_runs(runs, request, lambda names: spell(context, {**place, "runs": names}, is_recorded=True))


def compare_runs(
    folders: Sequence[Path], request: ComparisonRequest, command: Callable[[Sequence[str]], str]
) -> ComparisonResults:
    """Measure what is missing, show it and write the report. Raises ValueError if runs cannot be compared.

    Args:
        command: the command that compares runs of these names, for the file of results
    """
    asked_length = None if request.length is None else parse_size(request.length)
    with busy(f"importing transformers, and reading the corpus {request.corpus} and the runs"):
        import muse_attention.huggingface  # noqa: F401 - where transformers is missing, it says what to install
        from muse_lab.evaluation.comparison.matrix import (
            attentions_of,
            measure,
            take_records,
            weights_to_measure,
        )
        from muse_lab.evaluation.comparison.runs import open_runs
        from muse_lab.pretraining.run.folder import run_recipe

        silence_transformers()
        for folder in folders:
            run_recipe(folder)  # a missing run is reported before a missing corpus
        corpus = read_corpus(request.corpus)
        needs_weights = request.samples > 0
        runs = open_runs(folders, corpus, needs_weights=needs_weights, on_refused=say)
    if not request.samples:
        results = _start(request, corpus, length=0, windows=0)
        add_command(results, command([run.name for run in runs]))
        take_records(runs, corpus, results, request.path)
        return _report(results, request)
    length = _length(runs, asked_length)
    windows = Windows(corpus, length, split=HELD_OUT)
    asked_for = request.attention or [run.recipe.attention for run in runs]
    tested = list(dict.fromkeys([EXACT, *(without_freezing(full_name(name, length)) for name in asked_for)]))
    if request.samples > len(windows):
        say(f"the held-out split has {len(windows)} windows of {format_size(length)}: all of them are used")
    results = _start(request, corpus, length, len(windows))
    missing = sum(
        len(results.missing(run.name, step, attentions_of(run, step, tested)))
        for run in runs
        for step in weights_to_measure(run, request.checkpoints)
    )
    if missing:
        add_command(results, command([run.name for run in runs]))
    with progress_bar(missing) as on_step:
        measure(
            *(runs, corpus, tested, results, request.path),
            checkpoints=request.checkpoints,
            on_step=on_step,
            on_refused=say,
        )
    return _report(results, request)


def _start(request: ComparisonRequest, corpus: Corpus, length: int, windows: int) -> ComparisonResults:
    """Earlier results under the same settings, or none yet. Without samples there are no windows and no length."""
    settings = ComparisonSettings(
        corpus=corpus.manifest.source,
        fingerprint=corpus.fingerprint,
        length=length,
        samples=min(request.samples, windows),
        windows=windows,
        device=request.place.device,
        precision=request.place.dtype,
    )
    make_folder(request.output)
    results = ComparisonResults.start(settings, request.path, overwrite=request.overwrite)
    if request.shared_gpu:
        results.settings = replace(results.settings, shared_gpu=True)
    return results


def _report(results: ComparisonResults, request: ComparisonRequest) -> ComparisonResults:
    """Show the results on the terminal and write the report."""
    if results.settings.samples:
        _show_matrix(results)
    report = comparison_report(results)
    for line in report.verdict:
        typer.echo(line)
    write(report, request.path, request.path)
    return results


def _show_matrix(results: ComparisonResults) -> None:
    """Show an attention in each row, as their names are long."""
    settings, matrix = results.settings, matrix_table(results)
    title = f"held-out loss, {settings.samples} x {format_size(settings.length)} tokens"
    table = new_table(f"{title}; rows: tested with, columns: run", "attention", *results.runs)
    for place, name in enumerate(results.attentions, start=2):
        table.add_row(name, *matrix.column(matrix.titles[place]))
    console.print(table)


def _length(runs: Sequence[StoredRun], asked_for: int | None) -> int:
    lengths = sorted({run.recipe.length for run in runs})
    if asked_for is None and len(lengths) > 1:
        raise ValueError(
            f"the runs were trained on {' and '.join(map(format_size, lengths))} tokens; choose one with --length"
        )
    length = asked_for or lengths[0]
    if length > lengths[0]:
        raise ValueError(
            f"the runs were trained on {' and '.join(map(format_size, lengths))} tokens; --length {length} is more, "
            f"choose at most {format_size(lengths[0])}"
        )
    if length < SHORTEST:
        raise ValueError(f"--length {length} is too short for a curve; choose at least {SHORTEST}")
    return length
