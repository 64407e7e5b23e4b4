"""`muse report`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

_KINDS: tuple[tuple[Callable[[Path], Any], Callable[[Any, Path], None]], ...] = (
    (layers.read_results, write_fidelity_reports),
    (loss.read_results, write_loss_reports),
    (comparison.read_results, write_comparison_reports),
    (needle_results.read_results, write_needle_reports),
    (standard_tasks.read_results, write_tasks_reports),
)
"""How each kind of results is read, and reported."""


@app.command()
def report(
    results: Annotated[
        list[Path], typer.Argument(help="Result files of muse fidelity, loss, compare and eval, or their folder.")
    ],
) -> None:
    """Write the reports of results anew, without measuring anything.

    Of an interrupted run, what was measured to its end is reported.
    """
    with user_errors(), run_errors(lambda: "the results themselves are as they were"):
        found = list(_files(results))
        reported = [path for path in found if _write(path)]
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


def _write(path: Path) -> bool:
    """Whether these were results of a kind that is known, with something to report."""
    for read, write in _KINDS:
        try:
            results = read(path)
        except ValueError:
            continue
        try:
            write(results, path)
        except ValueError as error:
            say(f"{path.name}: {error}")
            return False
        return True
    return False
