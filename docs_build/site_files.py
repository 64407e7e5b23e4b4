"""A hook of MkDocs: pages that are not files of docs/, and links that leave docs/.

- README.md is the front page. Records, examples and the texts at the root become pages and files under `repository/`.
- `reference/commands.md` is written by typer from the command line interface itself.
- Links are written so that they work in the repository. Here they are rewritten to the places in the site.
- In tables a number stays on the line of its unit, and a mean on that of its error.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from docs_build.command_reference import describe_commands

ROOT = Path(__file__).parent.parent
FRONT_PAGE = Path("README.md")
COMMANDS = "reference/commands.md"
FOLDER = "repository"
"""Of the site: where files from outside of docs/ are."""
TEXTS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "LICENSE")
RECORDS = (".md", ".png", ".svg", ".json", ".txt")
_KEPT_TOGETHER = re.compile(r"(?<=\d) (?=(?:ms|s|B|KiB|MiB|GiB|nats)\b)|(?<=\d) (?=±)|(?<=±) (?=\d)")
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    added = [_generated(path, config) for path in _outside_files()]
    commands = File.generated(config, COMMANDS, content=describe_commands())
    for file in (*added, commands):
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == COMMANDS:
        return markdown
    return keep_units(rewrite_links(markdown, _place_in_repository(page.file.src_uri)))


def keep_units(markdown: str) -> str:
    """With spaces that do not break between numbers and units, in rows of tables."""
    lines = markdown.split("\n")
    return "\n".join(_KEPT_TOGETHER.sub("\u00a0", line) if line.startswith("|") else line for line in lines)


def rewrite_links(markdown: str, path: Path) -> str:
    """The links of a file of the repository, for the site."""

    def rewrite(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups()
        if "://" in target or target.startswith(("mailto:", "/")):
            return link.group()
        place = Path(os.path.normpath(path.parent / target))
        if (ROOT / place).is_dir():
            place = _nearest_readme(place)
        there, here = _place_in_site(place), _place_in_site(path)
        return f"{before}{os.path.relpath(there, os.path.dirname(here) or '.')}{anchor or ''}{after}"

    return _LINK.sub(rewrite, markdown)


def _outside_files() -> list[Path]:
    records = (path for path in (ROOT / "benchmarks").rglob("*") if path.suffix in RECORDS)
    sources = (*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").glob("*.py"), *(ROOT / "docs_build").glob("*.py"))
    return sorted(
        path.relative_to(ROOT) for path in (ROOT / FRONT_PAGE, *records, *sources, *(ROOT / text for text in TEXTS))
    )


def _generated(path: Path, config: Any) -> File:
    return File.generated(config, _place_in_site(path), abs_src_path=str(ROOT / path))


def _place_in_site(path: Path) -> str:
    if path == FRONT_PAGE:
        return "index.md"
    if path.parts[0] == "docs":
        return path.relative_to("docs").as_posix()
    return f"{FOLDER}/{path.as_posix()}"


def _place_in_repository(src_uri: str) -> Path:
    if src_uri == "index.md":
        return FRONT_PAGE
    inside, folder, path = src_uri.rpartition(f"{FOLDER}/")
    return Path(path) if folder and not inside else Path("docs") / src_uri


def _nearest_readme(folder: Path) -> Path:
    """GitHub shows a folder; the site shows the text that describes it."""
    for place in (folder, *folder.parents):
        if (ROOT / place / "README.md").exists():
            return place / "README.md"
    return folder
