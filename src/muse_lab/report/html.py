"""A report as one HTML file that needs nothing else: its style and pictures are inside it."""

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


def as_html(report: Report, pictures: Mapping[str, bytes] | None = None) -> str:
    """`pictures` are the PNG files of those figures that could be drawn, by name."""
    drawn = {name: f"data:image/png;base64,{base64.b64encode(png).decode()}" for name, png in (pictures or {}).items()}
    return _template().render(report=report, pictures=drawn)


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
