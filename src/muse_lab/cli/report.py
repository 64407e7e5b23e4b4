"""`muse report`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from muse_lab.benchmark.bench_report import bench_report
from muse_lab.benchmark.packed_documents import DocumentsResults
from muse_lab.benchmark.packed_documents_report import documents_report
from muse_lab.benchmark.results import BenchmarkResults
from muse_lab.benchmark.tuning import TuningResults
from muse_lab.benchmark.tuning_report import tuning_report
from muse_lab.cli.app import CONTENTS, app, nonempty_path, run_errors, say, user_errors
from muse_lab.cli.measuring import write
from muse_lab.cli.needle_comparisons import write_needle_comparisons
from muse_lab.evaluation.comparison.comparison_report import comparison_report
from muse_lab.evaluation.comparison.results import ComparisonResults
from muse_lab.evaluation.fidelity.fidelity_report import fidelity_report
from muse_lab.evaluation.fidelity.layers import FidelityResults
from muse_lab.evaluation.gradients.gradient_report import gradient_report
from muse_lab.evaluation.gradients.results import GradientResults
from muse_lab.evaluation.lookups.lookup_report import lookup_report
from muse_lab.evaluation.lookups.results import LookupResults
from muse_lab.evaluation.loss.loss_report import loss_report
from muse_lab.evaluation.loss.positions import LossResults
from muse_lab.evaluation.needles.needle_report import needle_report
from muse_lab.evaluation.needles.results import NeedleResults
from muse_lab.records.files import replace_file
from muse_lab.records.machine import machine_lines
from muse_lab.records.untrusted import parse_json, read_regular
from muse_lab.report.files import check_replaceable
from muse_lab.report.html import as_html
from muse_lab.report.tree import Link, Provenance, Report, Section


@dataclass(frozen=True)
class _Kind:
    """A kind of results: how its files are recognised, read and reported."""

    title: str
    key: str
    """a key of its JSON that no other kind has"""
    read: Callable[[Path], Any]
    report: Callable[[Any, str], Report]


_NEEDLES = _Kind("Needles", "needles", NeedleResults.read, needle_report)
_KINDS = (
    _Kind("Fidelity", "measured", FidelityResults.read, fidelity_report),
    _Kind("Loss", "losses", LossResults.read, loss_report),
    _Kind("Training runs", "runs", ComparisonResults.read, comparison_report),
    _NEEDLES,
    _Kind("Lookups", "lookups", LookupResults.read, lookup_report),
    _Kind("Gradients of lookups", "gradients", GradientResults.read, gradient_report),
    _Kind("Time against error", "tuned", TuningResults.read, tuning_report),
    _Kind("Benchmarks", "cases", BenchmarkResults.read, bench_report),
    _Kind("Packed documents", "packed", DocumentsResults.read, documents_report),
)

_MOST_FILES = 10_000
"""Below a folder of results, at most: more are a home folder, or a disk."""
_LEFT_OUT = {"node_modules", "site-packages"}
_ENVIRONMENT = "pyvenv.cfg"
"""The file that marks a virtual environment."""
_COMMANDS = "muse bench, fidelity, loss, compare, eval or tune"


@dataclass(frozen=True)
class _Reported:
    """Results whose report was written."""

    kind: _Kind
    path: Path
    results: Any
    headline: str


@app.command()
def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(help=f"Result files of {_COMMANDS}, or their folder.", parser=nonempty_path),
    ] = None,
) -> None:
    """Write the reports of results again, without measuring anything, and for a folder index.html with links to them.

    Models in one folder that were asked for the same needles are compared with the one named exact, or else the first
    by name. Sibling folders that hold such models of one shape, one folder for each training, are compared over
    folders.
    An interrupted run is reported with what it has finished. Results that cannot be reported are named with the reason,
    and the exit code is 1; it is 2 if nothing is reported. Only files of earlier reports are replaced.
    """
    with user_errors(), run_errors(lambda: "the results themselves are unchanged"):
        if not results:
            raise ValueError(f"give result files of {_COMMANDS}, or their folder")
        reported: list[_Reported] = []
        are_left_out = False
        for path in list(_files(results)):  # a missing file is known before anything is written
            try:
                kind = _find_kind(path)
                if kind is not None:
                    loaded = kind.read(path)
                    described = kind.report(loaded, path.stem)
                    write(described, path, path)
                    reported.append(_Reported(kind, path, loaded, described.headline))
                elif path in results:
                    raise ValueError(f"it holds no results of {_COMMANDS}")
            except (ArithmeticError, FileExistsError, ValueError) as error:
                say(f"{path} is left out: {_reason(error)}")
                are_left_out = True
        for folder in filter(Path.is_dir, results):
            inside = [done for done in reported if done.path.is_relative_to(folder)]
            if inside:
                try:
                    _write_contents(folder, inside)
                except FileExistsError as error:
                    say(f"{error.filename} is not written: {error.strerror}")
                    are_left_out = True
        if not reported and not are_left_out:
            raise ValueError(f"none of these are results of {_COMMANDS}; give their .json files")
    if are_left_out:
        raise typer.Exit(1 if reported else 2)


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from _find_json(path)
        elif path.exists():
            yield path
        else:
            raise ValueError(f"there is no file or folder {str(path)!r}")


def _find_kind(path: Path) -> _Kind | None:
    """The kind of a file of results; None for other JSON. Raises ValueError for results that cannot be read."""
    try:
        text = read_regular(path).decode(errors="replace")
    except OSError as error:
        raise ValueError(error.strerror) from None
    try:
        document = parse_json(text, finite=False)
    except ValueError:
        if '"machine"' in text:  # all results begin with it
            raise ValueError("it is incomplete; copy it again") from None
        return None
    if not isinstance(document, dict) or not {"machine", "settings"} <= document.keys():
        return None
    return next((kind for kind in _KINDS if kind.key in document), None)


def _reason(error: Exception) -> str:
    """The message of a ValueError without its advice, which is for the command that measures."""
    if isinstance(error, FileExistsError):
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ArithmeticError):
        return f"it has numbers that no measurement gives: {error}"
    return str(error).partition(";")[0]


def _write_contents(folder: Path, inside: list[_Reported]) -> None:
    """Compare the models that were asked for needles, and write the links to all reports."""
    needles: dict[Path, dict[str, Any]] = {}
    for done in inside:
        if done.kind is _NEEDLES:
            needles.setdefault(done.path.parent, {})[done.path.stem] = done.results
    comparisons = write_needle_comparisons(needles)
    check_replaceable([folder / CONTENTS])
    replace_file(folder / CONTENTS, _contents(folder, inside, comparisons))
    typer.echo(f"wrote {folder / CONTENTS}")


def _contents(folder: Path, reported: list[_Reported], comparisons: dict[Path, str]) -> str:
    """Links to the reports of a folder, by kind, with the headline of each."""
    sections = []
    for kind in _KINDS:
        reports_of_kind = {done.path.with_suffix(".html"): done.headline for done in reported if done.kind is kind}
        if reports_of_kind:
            pages = (comparisons if kind is _NEEDLES else {}) | reports_of_kind
            sections.append(Section(kind.title, *(_link(page, folder, line) for page, line in pages.items())))
    machines = dict.fromkeys("; ".join(machine_lines(done.results.machine)) for done in reported)
    commands = dict.fromkeys(command for done in reported for command in done.results.commands)
    provenance = Provenance(list(machines), list(commands))
    return as_html(Report(f"Reports in {folder.resolve().name}", sections=sections, provenance=provenance))


def _link(page: Path, folder: Path, headline: str) -> Link:
    address = page.relative_to(folder)
    return Link(str(address.with_suffix("")), address.as_posix(), headline)


def _find_json(folder: Path) -> list[Path]:
    """The JSON files of a folder, in the order of their names.

    Those in hidden folders, in virtual environments and behind links are left out.

    Raises ValueError for a folder that holds too many files, or that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise ValueError(
            f"cannot read the folder {error.filename}: {error.strerror}; make it readable, or name the files to report"
        )

    paths: list[Path] = []
    seen = 0
    for inner, folders, names in os.walk(folder, onerror=refuse):
        if _ENVIRONMENT in names and Path(inner) != folder:
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _LEFT_OUT]
        seen += len(names)
        if seen > _MOST_FILES:
            raise ValueError(f"{folder} holds more than {_MOST_FILES:,} files; give the folder of the results alone")
        paths += [Path(inner, name) for name in names if name.endswith(".json")]
    return sorted(paths)
