"""Text in Markdown and CSV: all text is shown as it is, never read as markup or as a formula.

Every report goes through here, as names of runs and models, commands and errors can contain anything.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

_MARKUP = re.compile(r"[\\`*\[\]<>&|$~]|(?<![^\W_])_|_(?![^\W_])")
"""An underscore between letters or digits, as in many names, is not markup."""
_BLOCK = re.compile(r"[#+=-]|(?<=\d)[.)]")
"""At the beginning of a line, or after a number there: headings, lists and rules."""
_SPACE = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")
_BACKTICKS = re.compile(r"`+")
_NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|nan)", re.IGNORECASE)
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")
"""The beginning of a formula in spreadsheets, in half and full width."""


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
    fence = "`" * max(3, 1 + _longest_backticks("\n".join(lines)))
    return "\n".join([fence, *lines, fence])


def csv_text(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Text that a spreadsheet would take for a formula has a ' before it; numbers are as they are."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for row in (header, *rows):
        writer.writerow([_csv_cell(cell) if isinstance(cell, str) else cell for cell in row])
    return lines.getvalue()


def _escaped(text: str) -> str:
    return _MARKUP.sub(lambda match: f"\\{match[0]}", _SPACE.sub(" ", text).strip())


def _longest_backticks(text: str) -> int:
    return max((len(backticks) for backticks in _BACKTICKS.findall(text)), default=0)


def _csv_cell(text: str) -> str:
    lines = text.replace("\r\n", "\n").replace("\r", "\n")  # csv quotes a line's end, but not every reader knows \r
    return f"'{lines}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else lines
