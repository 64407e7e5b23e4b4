"""The files of a report, beside those of its results. Only files of earlier reports are ever replaced."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from muse_lab.records.files import replace_file
from muse_lab.records.untrusted import read_regular
from muse_lab.report.html import SIGN as HTML_SIGN
from muse_lab.report.html import as_html
from muse_lab.report.markdown import SIGN as MARKDOWN_SIGN
from muse_lab.report.markdown import as_markdown
from muse_lab.report.plots import MatplotlibMissingError
from muse_lab.report.tree import Report

_SIGNS = {".md": MARKDOWN_SIGN, ".html": HTML_SIGN}


def write_report(report: Report, path: Path, say: Callable[[str], None]) -> list[Path]:
    """Write .md, .html and the pictures that can be drawn. Returns all paths; `say` is told what cannot be drawn.

    Raises FileExistsError, before anything is written, if a file is in the way.
    """
    pictures: dict[str, tuple[Path, bytes]] = {}
    for figure in report.figures:
        picture = path.with_name(f"{path.stem}{figure.name and '-'}{figure.name}.png")
        try:
            pictures[figure.name] = picture, figure.draw()
        except MatplotlibMissingError as error:
            say(f"{picture.name} was not drawn: {error}")
    contents: dict[Path, str | bytes] = {
        path.with_suffix(".md"): as_markdown(report, {name: file.name for name, (file, _) in pictures.items()}),
        **dict(pictures.values()),
        path.with_suffix(".html"): as_html(report, {name: png for name, (_, png) in pictures.items()}),
    }
    check_replaceable(contents)
    for file, content in contents.items():
        replace_file(file, content)
    return list(contents)


def check_replaceable(files: Iterable[Path]) -> None:
    """Raise FileExistsError if one of these files exists and is not of an earlier report.

    Pages of reports have a section on provenance. Pictures belong to the pages beside them.
    """
    existing = [file for file in files if os.path.lexists(file)]
    pages = [file for file in existing if file.suffix in _SIGNS]
    foreign = [file for file in pages if not _has_sign(file)] if pages else existing
    for file in foreign:
        raise FileExistsError(errno.EEXIST, "it exists and is not part of a report; move it away", str(file))


def _has_sign(page: Path) -> bool:
    try:
        return _SIGNS[page.suffix].encode() in read_regular(page)
    except OSError:
        return False
