"""The paper's tables of fidelity, as `paper_tables.md` has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PaperTable:
    number: str
    setting: str
    """what it was measured on, in words"""
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _read(section: str) -> PaperTable:
    """Parse a section: a heading, a line, and a table of Markdown."""
    number, setting, _, *table = section.strip().splitlines()
    header, _, *rows = (tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table)
    return PaperTable(number, setting, header, tuple(rows))


_, *_SECTIONS = Path(__file__).with_name("paper_tables.md").read_text(encoding="utf-8").split("## ")
TABLES = {table.number: table for table in map(_read, _SECTIONS)}
"""By number, such as `Table 2`."""
