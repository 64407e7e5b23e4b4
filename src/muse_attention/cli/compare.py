"""`muse compare`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muse_attention.attention_names import forward_name
from muse_attention.cli.app import (
    Device,
    Overwrite,
    app,
    console,
    make_folder,
    new_table,
    progress_bar,
    say,
    user_errors,
)
from muse_attention.cli.language_model import Place, silence_transformers
from muse_attention.cli.measuring import Output, add_command, measuring, spell, write
from muse_attention.cli.options import Words, attentions, option
from muse_attention.evaluation.comparison.report import comparison_report, headline, matrix_table, warnings
from muse_attention.evaluation.comparison.results import ComparisonResults, ComparisonSettings
from muse_attention.evaluation.loss.curves import SHORTEST
from muse_attention.pretraining.data.corpus import read_corpus
from muse_attention.pretraining.recipes import PRECISIONS
from muse_attention.pretraining.schedule import EXACT
from muse_attention.sizes import format_size, parse_size

if TYPE_CHECKING:
    from muse_attention.evaluation.comparison.runs import StoredRun

RESULTS = "compare.json"
_CORPUS = Path("out/corpus")


@app.command()
def compare(
    context: typer.Context,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders that muse train wrote.")],
    corpus: Annotated[Path, option("Folder that muse prepare wrote, and that the runs learnt from.")] = _CORPUS,
    attention: Annotated[
        Words, attentions("Attention to test with, beside exact attention", "those that the runs were trained with")
    ] = None,
    samples: Annotated[int, option("Held-out windows, evenly spaced; all, if there are fewer.")] = 16,
    length: Annotated[str | None, option("Tokens of a window; k means 1024.", "that of the runs")] = None,
    checkpoints: Annotated[
        int, option("Earlier checkpoints of each run, at most, whose loss against position is measured.")
    ] = 3,
    device: Device = None,
    dtype: Annotated[
        str | None,
        option("float32 or bfloat16.", "float32 on cpu, bfloat16 on cuda", "--dtype", "--precision"),
    ] = None,
    output: Output = Path("out/compare"),
    overwrite: Overwrite = False,
) -> None:
    """Compare training runs: held-out loss under their own and other attentions, by position, speed, scaling law.

    Writes compare.json after every sample, goes on from it where it was interrupted, and writes reports at the end.
    """
    with user_errors():
        request = ComparisonRequest(
            runs,
            corpus,
            Place.choose(device, dtype),
            attentions=attention or [],
            samples=samples,
            length=None if length is None else parse_size(length),
            checkpoints=checkpoints,
        )
    path, place = output / RESULTS, {"device": request.place.device, "dtype": request.place.dtype}

    def command(names: Sequence[str]) -> str:
        return spell(context, {**place, "runs": names}, is_recorded=True)

    with measuring(path, spell(context, place), overwrite=overwrite):
        results = compare_runs(request, output, command, overwrite=overwrite)
        show_comparison(results)
        write(comparison_report(results), path, path)


@dataclass(frozen=True)
class ComparisonRequest:
    """What is to be compared, and how."""

    runs: Sequence[Path]
    corpus: Path
    place: Place
    attentions: Sequence[str] = ()
    """besides exact attention; those that the runs were trained with, if there are none"""
    samples: int = 16
    length: int | None = None
    """that of the runs, if None"""
    checkpoints: int = 3

    def __post_init__(self) -> None:
        if self.place.dtype not in PRECISIONS:
            raise ValueError(f"--dtype {self.place.dtype} must be one of {', '.join(PRECISIONS)}")
        if self.samples < 1 or self.checkpoints < 0:
            raise ValueError("--samples must be at least 1, and --checkpoints at least 0")


def compare_runs(
    request: ComparisonRequest, output: Path, command: Callable[[Sequence[str]], str], *, overwrite: bool = False
) -> ComparisonResults:
    """Measure what is missing, with a bar; a ValueError if something cannot be.

    Args:
        command: what was called to compare runs of these names, for the file of the results
    """
    import muse_attention.huggingface  # noqa: F401 - where transformers is missing, it says what to install
    from muse_attention.evaluation.comparison.matrix import attentions_of, measure, open_windows, weights_to_measure
    from muse_attention.evaluation.comparison.runs import open_runs

    silence_transformers()
    corpus = read_corpus(request.corpus)
    runs = open_runs(request.runs, corpus, device=request.place.device, on_refused=say)
    length = _length(runs, request.length)
    windows = open_windows(corpus, length)
    settings = ComparisonSettings(
        corpus=corpus.manifest.source,
        fingerprint=corpus.fingerprint,
        length=length,
        samples=min(request.samples, len(windows)),
        windows=len(windows),
        device=request.place.device,
        precision=request.place.dtype,
    )
    asked_for = request.attentions or [run.recipe.attention for run in runs]
    tested = list(dict.fromkeys([EXACT, *(forward_name(name, length) for name in asked_for)]))
    if request.samples > len(windows):
        say(f"the held-out split has {len(windows)} windows of {format_size(length)}: all of them are used")
    make_folder(output)
    path = output / RESULTS
    results = ComparisonResults.start(settings, path, overwrite=overwrite)
    missing = sum(
        len(results.missing(run.name, step, attentions_of(run, step, tested)))
        for run in runs
        for step in weights_to_measure(run, request.checkpoints)
    )
    if missing:
        add_command(results, command([run.name for run in runs]))
    with progress_bar(missing) as on_step:
        measure(
            runs,
            corpus,
            tested,
            results,
            path,
            checkpoints=request.checkpoints,
            on_step=on_step,
            on_refused=say,
        )
    return results


def show_comparison(results: ComparisonResults) -> None:
    """The matrix, with an attention in each row, as their names are long, and what it says."""
    settings, matrix = results.settings, matrix_table(results)
    title = f"held-out loss, {settings.samples} x {format_size(settings.length)} tokens"
    table = new_table(f"{title}; rows: tested with, columns: run", *results.runs)
    for place, name in enumerate(results.attentions, start=2):
        table.add_row(name, *matrix.column(matrix.titles[place]))
    console.print(table)
    for line in [*headline(results), *warnings(results)]:
        typer.echo(line)


def _length(runs: Sequence[StoredRun], asked_for: int | None) -> int:
    lengths = sorted({run.recipe.length for run in runs})
    if asked_for is None and len(lengths) > 1:
        raise ValueError(
            f"the runs were trained on {' and '.join(map(format_size, lengths))} tokens; choose one length by --length"
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
