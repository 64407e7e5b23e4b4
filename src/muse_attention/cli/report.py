"""`muse report`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from muse_attention.cli.app import CONTENTS, app, run_errors, say, user_errors
from muse_attention.cli.compare_reports import write_comparison_reports
from muse_attention.cli.fidelity import write_fidelity_reports
from muse_attention.cli.loss import write_loss_reports
from muse_attention.cli.needle_lookups import write_lookup_reports
from muse_attention.cli.needle_reports import write_needle_comparisons, write_needle_reports
from muse_attention.cli.tasks import write_tasks_reports
from muse_attention.cli.tune import write_tuning_reports
from muse_attention.evaluation.comparison import results as comparison
from muse_attention.evaluation.fidelity import layers
from muse_attention.evaluation.lookups import results as lookup_results
from muse_attention.evaluation.loss import positions as loss
from muse_attention.evaluation.needles import results as needle_results
from muse_attention.evaluation.page import Page
from muse_attention.evaluation.tasks import answers as standard_tasks
from muse_attention.evaluation.tuning import candidates as tuning
from muse_attention.files import replace_file
from muse_attention.machine import machine_lines
from muse_attention.strict_json import parse_json


@dataclass(frozen=True)
class _Kind:
    """Of results: how their files are known, read and reported."""

    title: str
    key: str
    """that no other kind has"""
    read: Callable[[Path], Any]
    write: Callable[[Any, Path], None]


_NEEDLES = _Kind("Needles", "needles", needle_results.read_results, write_needle_reports)
_KINDS = (
    _Kind("Fidelity", "measured", layers.read_results, write_fidelity_reports),
    _Kind("Loss", "losses", loss.read_results, write_loss_reports),
    _Kind("Training runs", "runs", comparison.read_results, write_comparison_reports),
    _NEEDLES,
    _Kind("Lookups", "lookups", lookup_results.read_results, write_lookup_reports),
    _Kind("Standard tasks", "tasks", standard_tasks.read_results, write_tasks_reports),
    _Kind("Time against error", "tuned", tuning.read_results, write_tuning_reports),
)


@dataclass(frozen=True)
class _Reported:
    """Results that have their reports beside them."""

    kind: _Kind
    path: Path
    results: Any


@app.command()
def report(
    results: Annotated[
        list[Path], typer.Argument(help="Result files of muse fidelity, loss, compare, eval and tune, or their folder.")
    ],
) -> None:
    """Write the reports of results anew, without measuring anything, and for a folder index.html, which leads to them.

    Models in one folder that were asked for the same needles are compared there, with the first by name.
    Of an interrupted run, what was measured to its end is reported. Results that cannot be are named with the reason,
    and the exit code is 1; it is 2 if nothing is reported.
    """
    with user_errors(), run_errors(lambda: "the results themselves are as they were"):
        reported: list[_Reported] = []
        are_left_out = False
        for path in list(_files(results)):  # one that is not there is known before anything is written
            try:
                kind = _find_kind(path)
                if kind is not None:
                    found = kind.read(path)
                    kind.write(found, path)
                    reported.append(_Reported(kind, path, found))
                elif path in results:
                    raise ValueError("it holds no results of muse fidelity, loss, compare, eval or tune")
            except ValueError as error:
                say(f"{path} is left out: {_reason(error)}")
                are_left_out = True
            except ArithmeticError as error:
                say(f"{path} is left out: its numbers are none that were measured: {error}")
                are_left_out = True
        for folder in filter(Path.is_dir, results):
            inside = [done for done in reported if done.path.is_relative_to(folder)]
            if inside:
                replace_file(folder / CONTENTS, _contents(folder, inside, list(_compare_needles(inside))))
                typer.echo(f"wrote {folder / CONTENTS}")
        if not reported and not are_left_out:
            raise ValueError(
                "none of these are results of muse fidelity, loss, compare, eval or tune; give their .json files"
            )
    if are_left_out:
        raise typer.Exit(1 if reported else 2)


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(path.rglob("*.json"))
        elif path.is_file():
            yield path
        else:
            raise ValueError(f"there is no file or folder {str(path)!r}")


def _find_kind(path: Path) -> _Kind | None:
    """None for what else ends in .json: data, recipes, benchmarks. A ValueError for results that are torn."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        document = parse_json(text, finite=False)
    except ValueError:
        if '"machine"' in text:  # with which all results begin
            raise ValueError("it is not whole; copy it again") from None
        return None
    if not isinstance(document, dict) or not {"machine", "settings"} <= document.keys():
        return None
    return next((kind for kind in _KINDS if kind.key in document), None)


def _reason(error: ValueError) -> str:
    """Without what to do about it: that is for who measures."""
    return str(error).partition(";")[0]


def _compare_needles(reported: list[_Reported]) -> Iterator[Path]:
    """The pages that compare the models of each folder."""
    folders: dict[Path, dict[str, Any]] = {}
    for done in reported:
        if done.kind is _NEEDLES:
            folders.setdefault(done.path.parent, {})[done.path.stem] = done.results
    for folder, models in folders.items():
        yield from write_needle_comparisons(models, folder)


def _contents(folder: Path, reported: list[_Reported], comparisons: list[Path]) -> str:
    page = Page(f"Reports in {folder.resolve().name}")
    for kind in _KINDS:
        of_kind = [done for done in reported if done.kind is kind]
        if of_kind:
            page.section(kind.title)
        for comparison_page in comparisons if kind is _NEEDLES else []:
            address = comparison_page.relative_to(folder)
            page.link(str(address.with_suffix("")), address.as_posix())
        for done in of_kind:
            address = done.path.with_suffix(".html").relative_to(folder)
            page.link(str(address.with_suffix("")), address.as_posix())
            for line in machine_lines(done.results.machine):
                page.paragraph(line, is_note=True)
            for command in done.results.commands:
                page.code(command)
    return page.html()
