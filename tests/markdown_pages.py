"""The Markdown of this repository: its links, its Python, and the commands that it names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
_FOLDERS = ("", "docs", "benchmarks", "examples")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_MARKER = re.compile(r"<!-- test: (.+?) -->\s*$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`(muse [^`]+)`")
_INLINE_PATH = re.compile(r"`([\w./-]+(?:\.py|/))`")
_PATH_FROM_ROOT = re.compile(r"(?<![\w./-])(?:\.\./)*((?:src|tests|docs|docs_build|examples|benchmarks)/[\w./-]+\.\w+)")


@dataclass(frozen=True)
class PythonBlock:
    """A fenced block of Python. `<!-- test: length = 2048; folder = "model" -->` may stand before it."""

    code: str
    line: int
    marker: str | None

    def for_tests(self) -> str:
        """The code with the assignments of the marker in place of its own."""
        if self.marker is None:
            return self.code
        code = self.code
        for assignment in self.marker.split("; "):
            name = assignment.partition(" = ")[0]
            code, replaced = re.subn(rf"^{name} = .*$", assignment, code, flags=re.MULTILINE)
            if replaced != 1:
                raise ValueError(f"line {self.line}: the block assigns {name!r} {replaced} times, the marker wants one")
        return code


def markdown_files() -> list[Path]:
    """All of them, without what is built or installed."""
    pages = set(ROOT.glob("*.md"))
    for folder in _FOLDERS[1:]:
        pages |= set((ROOT / folder).rglob("*.md"))
    return sorted(pages)


def python_blocks(path: Path) -> list[PythonBlock]:
    text = path.read_text()
    blocks = []
    for fence in _FENCE.finditer(text):
        if fence[1] == "python":
            before = text[: fence.start()]
            marker = _MARKER.search(before)
            blocks.append(PythonBlock(fence[2], before.count("\n") + 2, marker[1] if marker else None))
    return blocks


def links(path: Path) -> Iterator[tuple[str, str]]:
    """Relative targets and their anchors; code is no link."""
    prose = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", path.read_text()))
    for link in _LINK.finditer(prose):
        target, _, anchor = link[1].partition("#")
        if "://" not in target and not target.startswith("mailto:"):
            yield target, anchor


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


def named_files(text: str) -> set[str]:
    """Python files and folders in inline code, and all files that are named from the root of the repository."""
    return {*_INLINE_PATH.findall(text), *_PATH_FROM_ROOT.findall(text)}


def make_targets(path: Path) -> set[str]:
    """The targets of `make` that indented lines and inline code name."""
    return set(re.findall(r"(?:^ {4}|`)make ([a-z][a-z-]*)", path.read_text(), re.MULTILINE))


def muse_commands(path: Path) -> Iterator[list[str]]:
    """The words of every command line of `muse`: in blocks of any kind but Python, indented lines, and inline code."""
    text = re.sub(r"^```python\n.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE).replace("\\\n", " ")
    for line in text.splitlines():
        if re.match(r"\s*muse\s", line):
            yield shlex.split(line, comments=True)
    for inline in _INLINE.finditer(text):
        yield shlex.split(inline[1])
