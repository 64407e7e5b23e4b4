"""Text in Markdown: all of it is shown as it is, never read as markup.

Every report goes through here, as names of runs and models, commands and errors can contain anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_MARKUP = re.compile(r"[\\`*\[\]<>&|$~]|(?<![^\W_])_|_(?![^\W_])")
"""An underscore between letters or digits, as in many names, is not markup."""
_BLOCK = re.compile(r"[#+=-]|(?<=\d)[.)]")
"""At the beginning of a line, or after a number there: headings, lists and rules."""
_SPACE = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")
_BACKTICKS = re.compile(r"`+")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], are_numbers: Sequence[bool]) -> str:
    """Columns of numbers are aligned to the right."""
    rule = ["---:" if is_number else "---" for is_number in are_numbers]
    lines = [list(map(_escaped, header)), rule, *(list(map(_escaped, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_line(text: str) -> str:
    """Text for one line of Markdown: a paragraph, an item of a list, a heading."""
    shown = _escaped(text)
    digits = len(shown) - len(shown.lstrip("0123456789"))
    mark = _BLOCK.match(shown, digits)
    return f"{shown[:digits]}\\{shown[digits:]}" if mark and (mark[0] in ".)") == (digits > 0) else shown


def markdown_list(items: Iterable[str]) -> str:
    return "\n".join(f"- {markdown_line(item)}" for item in items)


def fenced(lines: Sequence[str]) -> str:
    """Lines as they are, for Markdown."""
    longest = max(map(len, _BACKTICKS.findall("\n".join(lines))), default=0)
    fence = "`" * max(3, 1 + longest)
    return "\n".join([fence, *lines, fence])


def _escaped(text: str) -> str:
    return _MARKUP.sub(lambda match: f"\\{match[0]}", _SPACE.sub(" ", text).strip())
