"""The files of a report, beside those of its results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from muse_attention.files import replace_file
from muse_attention.plots import MatplotlibMissingError
from muse_attention.report.html import as_html
from muse_attention.report.markdown import as_markdown
from muse_attention.report.tree import Report


def write_report(report: Report, path: Path, say: Callable[[str], None]) -> list[Path]:
    """Write .md, .csv, .html and the pictures that can be drawn; the paths of all. `say` hears what cannot be."""
    pictures: dict[str, tuple[Path, bytes]] = {}
    for figure in report.figures:
        picture = path.with_name(f"{path.stem}{figure.name and '-'}{figure.name}.png")
        try:
            pictures[figure.name] = picture, figure.draw()
        except MatplotlibMissingError as error:
            say(f"{picture.name} was not drawn: {error}")
    contents: dict[Path, str | bytes] = {
        path.with_suffix(".md"): as_markdown(report, {name: file.name for name, (file, _) in pictures.items()}),
        path.with_suffix(".csv"): report.csv,
        **dict(pictures.values()),
        path.with_suffix(".html"): as_html(
            report, {name: png for name, (_, png) in pictures.items()}, file_name=path.stem
        ),
    }
    for file, content in contents.items():
        replace_file(file, content)
    return list(contents)
