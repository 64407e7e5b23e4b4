"""Shared by commands that measure: result files, continuing a run, tables on the terminal, and reports."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import typer

from muse_lab.cli.app import (
    Device,
    Output,
    Overwrite,
    busy,
    console,
    file_stem,
    make_folder,
    new_table,
    progress_bar,
    run_errors,
    say,
    user_errors,
)
from muse_lab.cli.language_model import Download, Dtype, Place, name_of, short_warnings
from muse_lab.cli.options import option
from muse_lab.records.stored_results import StoredResults
from muse_lab.report.files import write_report
from muse_lab.report.tree import Report, Table

Samples = Annotated[int, option("Number of consecutive samples of the text.")]
_NOT_SPELLED = ("overwrite",)
_PATHS = ("model", "text", "corpus", "captures", "saved")
"""Options of which results record only the last part of the path."""


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """Options of every command that measures a language model."""

    device: Device = None
    dtype: Dtype = None
    download: Download = False
    name: Annotated[str | None, option("Base name of the result files.", "the name of the model")] = None
    output: Output
    overwrite: Overwrite = False

    @cached_property
    def place(self) -> Place:
        return Place.choose(self.device, self.dtype)

    def name_for(self, model: str) -> str:
        """Base name of the result files."""
        return name_of(model) if self.name is None else self.name


Results = TypeVar("Results", bound=StoredResults)


class Measurement(Generic[Results]):
    """One call of a command: the file of its results, and the command that continues it."""

    def __init__(
        self,
        context: typer.Context,
        kind: type[Results],
        options: ModelRun,
        name: str,
        *,
        ending: str = "",
        settled: Mapping[str, object] | None = None,
    ) -> None:
        """Raises ValueError, before a model is loaded, if the file of results cannot be used or is broken.

        Args:
            name: base name of the files
            ending: suffix of the base name
            settled: values of options that were left out, or given in another form
        """
        self.path = options.output / f"{file_stem(name)}{ending}.json"
        self._kind = kind
        self._overwrite = options.overwrite
        kind.check_readable(self.path, overwrite=options.overwrite)
        place = {"device": options.place.device, "dtype": options.place.dtype}
        self.again = spell(context, {**place, "name": name, **(settled or {})})
        self._recorded = spell(context, {**place, "name": name, **(settled or {})}, is_recorded=True)

    def start(self, settings: Any) -> Results:
        """The results so far; raises ValueError if the file has results of another measurement."""
        make_folder(self.path.parent)
        return self._kind.start(settings, self.path, overwrite=self._overwrite)

    def progress(self, results: Results, steps: int) -> contextlib.AbstractContextManager[Callable[[str, int], None]]:
        """A progress bar for the missing steps. If there are any, the results record the command."""
        if steps:
            add_command(results, self._recorded)
        return progress_bar(steps)

    def errors(self) -> contextlib.AbstractContextManager[Callable[[], str]]:
        return measuring(self.path, self.again, overwrite=self._overwrite)

    def write(self, report: Report) -> None:
        write(report, self.path, self.path)


@contextlib.contextmanager
def measuring(path: Path, again: str, *, overwrite: bool = False) -> Iterator[Callable[[], str]]:
    """Print errors and warnings as one line each, and how to continue. Yields the function that says how.

    Args:
        again: the command that continues the run, without --overwrite
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


def spell(context: typer.Context, settled: Mapping[str, object], *, is_recorded: bool = False) -> str:
    """The command that was called, with every option that has a value, in order.

    Args:
        settled: values that replace those given; None leaves an option out
        is_recorded: for the file of results: without the output folder, and with only the last part of each path
    """
    words = ["muse", *context.command_path.split()[1:]]
    parameter: Any
    for parameter in context.command.params:
        name = parameter.name
        value: Any = settled.get(name, context.params.get(name))
        if value is None or name in _NOT_SPELLED or (is_recorded and name == "output"):
            continue
        if isinstance(value, bool):
            words += (parameter.opts if value else parameter.secondary_opts)[:1]
            continue
        for word in value if isinstance(value, list | tuple) else [value]:
            words += parameter.opts[:1] if parameter.param_type_name == "option" else []
            is_short = is_recorded and name in _PATHS and name not in settled
            words.append(name_of(word) if is_short else str(word))
    return shlex.join(words)


def add_command(results: StoredResults, command: str) -> None:
    if command not in results.commands:
        results.commands.append(command)


def show(table: Table, title: str, columns: Mapping[str, str] | Iterable[str], caption: str = "") -> None:
    """Print a table on the terminal: its first column, and the columns with these titles, under short titles."""
    short_titles = (
        dict(columns) if isinstance(columns, Mapping) else {name: name.replace(" ", "\n", 1) for name in columns}
    )
    shown = {name: short for name, short in short_titles.items() if name in table.titles}
    printed = new_table(title, table.titles[0], *shown.values())
    printed.caption = caption or None
    for first, *cells in zip(table.column(table.titles[0]), *map(table.column, shown), strict=True):
        printed.add_row(first, *cells)
    console.print(printed)


def write(report: Report, path: Path, *others: Path) -> None:
    """Write the files of a report beside those of its results, and print their names."""
    with busy(f"writing the report {path.with_suffix('.html')}"):
        written = write_report(report, path, say)
    typer.echo(f"wrote {', '.join(map(str, [*others, *written]))}")
