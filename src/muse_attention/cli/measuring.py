"""What commands that measure share: their options, the file of their results, tables on the terminal, and reports."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
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


def results_file(kind: type[StoredResults], output: Path, name: str, *, overwrite: bool) -> Path:
    """Where results go; a ValueError if they cannot, or if what is there is broken: before a model is loaded."""
    path = output / f"{name}.json"
    file_stem(name)
    kind.check_readable(path, overwrite=overwrite)
    return path


@contextlib.contextmanager
def measuring(path: Path, again: str, *, overwrite: bool = False) -> Iterator[Callable[[], str]]:
    """Errors and warnings are one line each; what ends a run says how to go on. Gives the function that says it.

    Args:
        again: the command that continues the run, so without --overwrite
    """
    replaced = _file_number(path) if overwrite else None

    def how_to_continue() -> str:
        if not path.exists():
            return f"nothing was written; continue with: {again}"
        if _file_number(path) == replaced:
            return f"the earlier results in {path} were not replaced; start again with: {again} --overwrite"
        return f"what is finished is in {path}; continue with: {again}"

    with run_errors(how_to_continue), user_errors(), short_warnings():
        yield how_to_continue


def _file_number(path: Path) -> tuple[int, int] | None:
    """Changes when the file is replaced; None if there is no file."""
    if not path.exists():
        return None
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


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
