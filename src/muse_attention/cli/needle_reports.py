"""The files that needles become for people, from their results alone: of one model, or of several beside each other."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from muse_attention.cli.app import draw_picture
from muse_attention.evaluation import needle_comparison, needle_report
from muse_attention.evaluation.needle_comparison import have_same_questions
from muse_attention.evaluation.needle_report import MEASURES
from muse_attention.evaluation.needle_results import Results
from muse_attention.evaluation.needle_statistics import failures
from muse_attention.files import replace_file
from muse_attention.plots import plot_share_by_depth

COMPARED = "needles-compared"
"""Name of the files that compare the models in a folder."""


def write_needle_reports(results: Results, path: Path) -> None:
    """Beside the file of the results."""
    if len(failures(results)) == len(results.outcomes):
        raise ValueError("no sample has been answered yet; continue the run with --resume")
    written = _write(needle_report, results, path, title=f"Needles: {path.stem}", exact="exact")
    typer.echo(f"wrote {', '.join(map(str, [path, *written]))}")


def write_needle_comparison(models: Mapping[str, Results], folder: Path) -> Path | None:
    """Of those that were asked the same as the first one, if there are any; its page."""
    (first, reference), *others = models.items()
    alike = {first: reference} | {name: found for name, found in others if have_same_questions(reference, found)}
    if len(alike) < 2:
        return None
    title = f"Needles compared: {', '.join(alike)}"
    written = _write(needle_comparison, alike, folder / COMPARED, title=title, exact=f"{first}, exact")
    typer.echo(f"wrote {', '.join(map(str, written))}")
    return written[-1]


def _write(report: ModuleType, found: Any, path: Path, *, title: str, exact: str) -> list[Path]:
    """The Markdown, the numbers, the pictures and the page that a report makes of what was found; the page is last."""
    texts = {".md": report.markdown_report(found, title=title), ".csv": report.as_csv(found)}
    written = [path.with_name(f"{path.stem}{suffix}") for suffix in texts]
    for file, content in zip(written, texts.values(), strict=True):
        replace_file(file, content)
    pictures = {}
    for suffix, (name, measure) in zip((".png", "-of-8.png"), MEASURES.items(), strict=True):
        draw = functools.partial(plot_share_by_depth, report.depth_curves(found, measure), measure=name, exact=exact)
        picture = path.with_name(f"{path.stem}{suffix}")
        if draw_picture(picture, draw):
            pictures[name] = picture
    page = path.with_name(f"{path.stem}.html")
    shown = {name: picture.read_bytes() for name, picture in pictures.items()}
    replace_file(page, report.html_report(found, title=title, pictures=shown))
    return [*written, *pictures.values(), page]
