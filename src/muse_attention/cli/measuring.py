"""What commands that measure share: their options, the file of their results, tables on the terminal, and reports."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from muse_attention.cli.app import console, file_stem, new_table, run_errors, say, user_errors
from muse_attention.cli.language_model import short_warnings
from muse_attention.evaluation.stored import StoredResults
from muse_attention.report.files import write_report
from muse_attention.report.tree import Report, Table

Samples = Annotated[int, typer.Option(help="Samples, one after another in the text.")]
Output = Annotated[Path, typer.Option(help="Folder of the results.")]
Name = Annotated[str | None, typer.Option(help="File name, without ending.", show_default="the name of the model")]
Resume = Annotated[bool, typer.Option("--resume", help="Keep what the file has already.")]


def results_file(kind: type[StoredResults], output: Path, name: str, *, resume: bool) -> Path:
    """Where results go; a ValueError if they cannot, or if what is there is broken: before a model is loaded."""
    path = output / f"{name}.json"
    file_stem(name)
    if resume and path.exists():
        kind.read(path)
    return path


@contextlib.contextmanager
def measuring(path: Path, again: str) -> Iterator[None]:
    """Errors and warnings are one line each; what ends a run says how to go on."""
    with run_errors(lambda: how_to_continue(path, again)), user_errors(), short_warnings():
        yield


def how_to_continue(path: Path, command: str) -> str:
    kept = f"what is finished is in {path}" if path.exists() else "nothing was written"
    return f"{kept}; continue with: {command}"


def spell(*words: object, **options: Any) -> str:
    """A command with its options in order: lists are repeated, a truth is a flag, and what is None is left out."""
    found = ["muse", *map(str, words)]
    for name, given in options.items():
        option = f"--{name.replace('_', '-')}"
        if given is True:
            found.append(option)
        elif given is not None and given is not False:
            for value in given if isinstance(given, list | tuple) else [given]:
                found += [option, str(value)]
    return shlex.join(found)


def add_command(results: StoredResults, command: str) -> None:
    if command not in results.commands:
        results.commands.append(command)


def show(table: Table, title: str, columns: Mapping[str, str] | Iterable[str], caption: str = "") -> None:
    """On the terminal: the first column, and those of these titles, by what they are called there."""
    called = dict(columns) if isinstance(columns, Mapping) else {name: name.replace(" ", "\n", 1) for name in columns}
    shown = {name: short for name, short in called.items() if name in table.titles}
    printed = new_table(title, *shown.values())
    printed.caption = caption or None
    for first, *cells in zip(table.column(table.titles[0]), *map(table.column, shown), strict=True):
        printed.add_row(first, *cells)
    console.print(printed)


def write(report: Report, path: Path, *others: Path) -> None:
    """The files of a report beside those of its results, and a line that names them."""
    typer.echo(f"wrote {', '.join(map(str, [*others, *write_report(report, path, say)]))}")
