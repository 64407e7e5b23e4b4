"""`muse eval needles --lookups`: measuring, and the files that lookups become for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from muse_attention.cli.app import console, new_table, progress_bar
from muse_attention.evaluation.lookups.report import as_csv, html_report, markdown_report, summary_table
from muse_attention.evaluation.lookups.results import Results, measure, start_results
from muse_attention.evaluation.needles.results import Settings, Task
from muse_attention.evaluation.needles.samples import NeedleSamples
from muse_attention.files import replace_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def measure_lookups(
    model: PreTrainedModel,
    samples: NeedleSamples,
    settings: Settings,
    tasks: Sequence[Task],
    path: Path,
    command: str,
    *,
    resume: bool,
) -> None:
    results = start_results(settings, path, resume=resume)
    missing = results.missing(tasks)
    if missing and command not in results.commands:
        results.commands.append(command)
    with progress_bar(len(missing)) as on_step:
        measure(model, samples, tasks, results, path, on_step=on_step)
    console.print(_table(results))
    write_lookup_reports(results, path)


def write_lookup_reports(results: Results, path: Path) -> None:
    """Beside the file of the results."""
    if not results.lookups:
        raise ValueError("no sample has been read yet; continue the run with --resume")
    title = f"Lookups: {path.stem}"
    files = {
        path.with_suffix(".md"): markdown_report(results, title=title),
        path.with_suffix(".csv"): as_csv(results),
        path.with_suffix(".html"): html_report(results, title=title),
    }
    for file, content in files.items():
        replace_file(file, content)
    typer.echo(f"wrote {', '.join(map(str, [path, *files]))}")


def _table(results: Results) -> Table:
    """What fits a terminal."""
    header, rows = summary_table(results)
    shown = {
        **{name: name for name in ("length", "kind", "samples", "found", "exact", "pairs")},
        **{name: name.replace(" ", "\n") for name in ("strong heads", "found, strong")},
    }
    settings = results.settings
    table = new_table(f"{settings.model}\n{settings.haystack}", *shown.values())
    table.caption = "Share of exact attention's weight on the needle that is retrieved, or in the query's own block."
    for row in rows:
        cells = dict(zip(header, row, strict=True))
        table.add_row(cells["attention"], *(cells[name] for name in shown))
    return table
