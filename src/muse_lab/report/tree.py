"""The parts of a report. Each measurement builds one `Report`; how it looks is decided elsewhere.

All text is plain: nothing in it is read as HTML or Markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Column:
    title: str
    definition: str = ""
    """what its cells mean: shown on hover, and in the legend"""
    is_number: bool = True
    """aligned to the right"""


def text(title: str, definition: str = "") -> Column:
    return Column(title, definition, is_number=False)


def number(title: str, definition: str = "") -> Column:
    return Column(title, definition)


def shown(value: object, form: str = "") -> str:
    """A value in the format of an f-string; empty for None."""
    return "" if value is None else format(value, form)


class Table:
    """Cells are text; an unknown cell is empty."""

    def __init__(self, columns: Iterable[Column | str], rows: Iterable[Sequence[str]], title: str = "") -> None:
        """A column given by its title alone holds numbers, except the first one."""
        self.title = title
        self.columns = tuple(
            column if isinstance(column, Column) else Column(column, is_number=place > 0)
            for place, column in enumerate(columns)
        )
        self.rows = [tuple(row) for row in rows]
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"a row of the table {title!r} has another number of cells than {self.titles}")

    @classmethod
    def of(cls, items: Iterable[Item], *columns: tuple[Column, Callable[[Item], object]], title: str = "") -> Table:
        """A row for every item, with a function for the cells of each column; a cell is empty for None."""
        rows = [[shown(cell(item)) for _, cell in columns] for item in items]
        return cls([column for column, _ in columns], rows, title)

    @property
    def titles(self) -> list[str]:
        return [column.title for column in self.columns]

    @property
    def are_numbers(self) -> list[bool]:
        return [column.is_number for column in self.columns]

    def column(self, title: str) -> list[str]:
        """The cells below a title."""
        place = self.titles.index(title)
        return [row[place] for row in self.rows]


@dataclass(frozen=True)
class Figure:
    name: str
    """of its file, after the name of the results"""
    title: str
    description: str
    """alternative text"""
    draw: Callable[[], bytes]
    """a PNG file"""


@dataclass(frozen=True)
class Link:
    title: str
    address: str
    """of a file, relative to that of the report"""
    note: str = ""


class Note(str):
    """Small print."""


class Section:
    """Content is given in any order, and shown by its kind: text is prose unless it is a note."""

    def __init__(self, title: str, *content: str | Link | Figure | Table, is_optional: bool = False) -> None:
        """`is_optional`: left out where no table has a row."""
        self.title = title
        self.prose = [part for part in content if isinstance(part, str) and not isinstance(part, Note)]
        self.links = [part for part in content if isinstance(part, Link)]
        self.figures = [part for part in content if isinstance(part, Figure)]
        self.tables = [part for part in content if isinstance(part, Table)]
        self.notes = [part for part in content if isinstance(part, Note)]
        self.is_shown = not is_optional or any(table.rows for table in self.tables)


@dataclass(frozen=True)
class Card:
    """One number that matters."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Provenance:
    """Where the numbers come from: folded in HTML, at the end in Markdown."""

    facts: Sequence[str] = ()
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    title: str
    verdict: Sequence[str] = ()
    """the findings; the first line is the headline"""
    cards: Sequence[Card] = ()
    sections: Sequence[Section] = ()
    names: Table | None = None
    """what the short names in the tables stand for"""
    provenance: Provenance = Provenance()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", [section for section in self.sections if section.is_shown])

    @property
    def headline(self) -> str:
        return next(iter(self.verdict), "")

    @property
    def figures(self) -> Iterator[Figure]:
        return (figure for section in self.sections for figure in section.figures)

    @property
    def definitions(self) -> dict[str, str]:
        """Definitions of columns, by title or by the titles that share one. `names` explains attentions."""
        named = set() if self.names is None else set(self.names.column(self.names.titles[0]))
        titles: dict[str, dict[str, None]] = {}
        for column in (column for section in self.sections for table in section.tables for column in table.columns):
            if column.definition and column.title not in named:
                titles.setdefault(column.definition, {})[column.title] = None
        return {"; ".join(shared): definition for definition, shared in titles.items()}
