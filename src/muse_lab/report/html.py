"""A report as one HTML file that needs nothing else: its style, pictures and data are inside it."""

from __future__ import annotations

import base64
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from muse_lab.report.tree import Report

if TYPE_CHECKING:
    from jinja2 import Template

SIGN = "<summary>Provenance</summary>"
"""Marks a page as a report: each has this section."""
LARGEST_DOWNLOAD = 2**18
"""Bytes of data that a page has inside it; larger ones are linked to."""


def as_html(report: Report, pictures: Mapping[str, bytes] | None = None, *, file_name: str = "results") -> str:
    """`pictures` are the PNG files of those figures that could be drawn, by name.

    `file_name` is the name of the data when saved, without its extension.
    """
    drawn = {name: _data("image/png", png) for name, png in (pictures or {}).items()}
    csv = report.csv.encode()
    address = _data("text/csv", csv) if len(csv) <= LARGEST_DOWNLOAD else quote(f"{file_name}.csv")
    return _template().render(report=report, pictures=drawn, csv_address=address, csv_name=f"{file_name}.csv")


@functools.cache
def _template() -> Template:
    """Jinja is imported here, so that commands that write no report do not need it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__package__, "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["address"] = quote
    return environment.get_template("page.html")


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
