"""`muse report`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from muse_attention.cli.app import app, run_errors, say, user_errors
from muse_attention.cli.compare_reports import write_comparison_reports
from muse_attention.cli.fidelity import write_fidelity_reports
from muse_attention.cli.loss import write_loss_reports
from muse_attention.cli.needles import write_needle_reports
from muse_attention.cli.tasks import write_tasks_reports
from muse_attention.evaluation import comparison, layers, loss, needle_results
from muse_attention.evaluation import tasks as standard_tasks
from muse_attention.evaluation.page import Page
from muse_attention.files import replace_file
from muse_attention.machine import machine_lines

CONTENTS = "index.html"
"""Beside the reports of a folder: what there is."""

_KINDS: dict[str, tuple[Callable[[Path], Any], Callable[[Any, Path], None]]] = {
    "Fidelity": (layers.read_results, write_fidelity_reports),
    "Loss": (loss.read_results, write_loss_reports),
    "Training runs": (comparison.read_results, write_comparison_reports),
    "Needles": (needle_results.read_results, write_needle_reports),
    "Standard tasks": (standard_tasks.read_results, write_tasks_reports),
}
"""How each kind of results is read, and reported."""


@dataclass(frozen=True)
class _Reported:
    """Results that have their reports beside them."""

    kind: str
    path: Path
    results: Any


@app.command()
def report(
    results: Annotated[
        list[Path], typer.Argument(help="Result files of muse fidelity, loss, compare and eval, or their folder.")
    ],
) -> None:
    """Write the reports of results anew, without measuring anything, and for a folder index.html, which leads to them.

    Of an interrupted run, what was measured to its end is reported.
    """
    with user_errors(), run_errors(lambda: "the results themselves are as they were"):
        found = list(_files(results))
        reported = [done for path in found if (done := _write(path)) is not None]
        for folder in filter(Path.is_dir, results):
            inside = [done for done in reported if done.path.is_relative_to(folder)]
            if inside:
                replace_file(folder / CONTENTS, _contents(folder, inside))
                typer.echo(f"wrote {folder / CONTENTS}")
        if not reported:
            raise ValueError(
                "none of these are results of muse fidelity, loss, compare or eval; give their .json files"
            )


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(path.rglob("*.json"))
        elif path.is_file():
            yield path
        else:
            raise ValueError(f"there is no file or folder {str(path)!r}")


def _write(path: Path) -> _Reported | None:
    """None if these are no results of a kind that is known, or there is nothing to report."""
    for kind, (read, write) in _KINDS.items():
        try:
            results = read(path)
        except ValueError:
            continue
        try:
            write(results, path)
        except ValueError as error:
            say(f"{path.name}: {error}")
            return None
        return _Reported(kind, path, results)
    return None


def _contents(folder: Path, reported: list[_Reported]) -> str:
    page = Page(f"Reports in {folder.resolve().name}")
    for kind in _KINDS:
        of_kind = [done for done in reported if done.kind == kind]
        if of_kind:
            page.section(kind)
        for done in of_kind:
            address = done.path.with_suffix(".html").relative_to(folder)
            page.link(str(address.with_suffix("")), address.as_posix())
            for line in machine_lines(done.results.machine):
                page.paragraph(line, is_note=True)
            for command in done.results.commands:
                page.code(command)
    return page.html()
