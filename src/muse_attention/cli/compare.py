"""`muse compare`."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muse_attention.cli.app import (
    Device,
    app,
    console,
    make_folder,
    new_table,
    progress_bar,
    run_errors,
    say,
    user_errors,
)
from muse_attention.cli.compare_reports import write_comparison_reports
from muse_attention.cli.language_model import Place, how_to_continue, short_warnings, silence_transformers
from muse_attention.evaluation.attentions import full_name
from muse_attention.evaluation.comparison import Results, Settings, start_results
from muse_attention.evaluation.comparison_report import (
    headline,
    matrix_table,
    warnings,
)
from muse_attention.evaluation.loss_curves import SHORTEST
from muse_attention.pretraining.corpus import read_corpus
from muse_attention.pretraining.recipes import PRECISIONS
from muse_attention.pretraining.schedule import EXACT
from muse_attention.sizes import format_size, parse_size

if TYPE_CHECKING:
    from muse_attention.evaluation.runs import StoredRun

RESULTS = "compare.json"


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that muse train wrote.")],
    corpus: Annotated[Path, typer.Option(help="Folder that muse prepare wrote, and that the runs learnt from.")] = Path(
        "out/corpus"
    ),
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="Attention to test with, by name; may be repeated. Exact attention always is one.",
            show_default="those that the runs were trained with",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Held-out windows, evenly spaced; all, if there are fewer.")] = 16,
    length: Annotated[
        str | None, typer.Option(help="Tokens of a window; k means 1024.", show_default="that of the runs")
    ] = None,
    checkpoints: Annotated[
        int, typer.Option(help="Earlier checkpoints of each run, at most, whose loss against position is measured.")
    ] = 3,
    device: Device = None,
    precision: Annotated[
        str | None, typer.Option(help="float32 or bfloat16.", show_default="float32 on cpu, bfloat16 on cuda")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("out/compare"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Measure anew what the folder has already.")] = False,
) -> None:
    """Compare training runs: held-out loss under their own and other attentions, by position, speed, scaling law.

    Writes compare.json after every sample, goes on from it where it was interrupted, and writes reports at the end.
    """
    with user_errors():
        place = Place.choose(device, precision)
        if place.dtype not in PRECISIONS:
            raise ValueError(f"--precision {place.dtype} must be one of {', '.join(PRECISIONS)}")
        if samples < 1 or checkpoints < 0:
            raise ValueError("--samples must be at least 1, and --checkpoints at least 0")
        window = None if length is None else parse_size(length)
        chosen = list(attention or [])
    command = functools.partial(_spell, corpus, window, chosen, samples, checkpoints, place)
    path = output / RESULTS
    again = f"{command(map(str, runs))} --output {shlex.quote(str(output))}"
    with run_errors(lambda: how_to_continue(path, again)), user_errors(), short_warnings():
        results = compare_runs(
            runs,
            corpus,
            output,
            attentions=chosen,
            samples=samples,
            length=window,
            checkpoints=checkpoints,
            place=place,
            overwrite=overwrite,
            command=command,
        )
        show_comparison(results)
        write_comparison_reports(results, path)


def compare_runs(
    folders: Sequence[Path],
    corpus: Path,
    output: Path,
    *,
    attentions: Sequence[str],
    samples: int,
    length: int | None,
    checkpoints: int,
    place: Place,
    overwrite: bool,
    command: Callable[[Iterable[str]], str],
) -> Results:
    """Measure what is missing, with a bar; a ValueError if something cannot be.

    Args:
        command: spells the command that this is, given the names of the runs
    """
    import muse_attention.huggingface  # noqa: F401 - where transformers is missing, it says what to install
    from muse_attention.evaluation.matrix import attentions_of, measure, open_windows, weights_to_measure
    from muse_attention.evaluation.runs import open_runs

    silence_transformers()
    data = read_corpus(corpus)
    stored = open_runs(folders, data, on_refused=say)
    length = _length(stored, length)
    windows = open_windows(data, length)
    settings = Settings(
        corpus=data.manifest.source,
        fingerprint=data.fingerprint,
        length=length,
        samples=min(samples, len(windows)),
        windows=len(windows),
        device=place.device,
        precision=place.dtype,
    )
    asked_for = attentions or [run.recipe.attention for run in stored]
    tested = list(dict.fromkeys([EXACT, *(full_name(name, length) for name in asked_for)]))
    if samples > len(windows):
        say(f"the held-out split has {len(windows)} windows of {format_size(length)}, not {samples}: all are used")
    make_folder(output)
    path = output / RESULTS
    results = start_results(settings, path, overwrite=overwrite)
    missing = sum(
        len(results.missing(run.name, step, attentions_of(run, step, tested)))
        for run in stored
        for step in weights_to_measure(run, checkpoints)
    )
    spelled = command(run.name for run in stored)
    if missing and spelled not in results.commands:
        results.commands.append(spelled)
    with progress_bar(missing) as on_step:
        measure(stored, data, tested, results, path, checkpoints=checkpoints, on_step=on_step, on_refused=say)
    return results


def show_comparison(results: Results) -> None:
    """The matrix, with an attention in each row, as their names are long, and what it says."""
    settings = results.settings
    title = f"held-out loss, {settings.samples} x {format_size(settings.length)} tokens"
    table = new_table(f"{title}; rows: tested with, columns: run", *results.runs)
    header, rows = matrix_table(results)
    for number, name in enumerate(results.attentions, start=header.index(f"tested: {EXACT}")):
        table.add_row(name, *(row[number] for row in rows))
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
            f"the runs were trained on {' and '.join(map(format_size, lengths))} tokens; --length {length} is more"
        )
    if length < SHORTEST:
        raise ValueError(f"--length {length} is too short for a curve; choose at least {SHORTEST}")
    return length


def _spell(
    corpus: Path,
    length: int | None,
    attentions: Sequence[str],
    samples: int,
    checkpoints: int,
    place: Place,
    runs: Iterable[str],
) -> str:
    """The command, save the folder of the results."""
    words = ["muse", "compare", *runs, "--corpus", str(corpus), "--samples", str(samples)]
    if length is not None:
        words += ["--length", format_size(length)]
    for name in attentions:
        words += ["--attention", name]
    words += ["--checkpoints", str(checkpoints)]
    return shlex.join([*words, "--device", place.device, "--precision", place.dtype])
