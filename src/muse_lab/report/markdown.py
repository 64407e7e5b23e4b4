"""A report as Markdown, with links to its pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from muse_lab.report.markup import fenced, markdown_line, markdown_list, markdown_table
from muse_lab.report.tree import Report, Section, Table

SIGN = "\n## Provenance\n"
"""Marks a text as a report: each has this section."""


def as_markdown(report: Report, pictures: Mapping[str, str] | None = None) -> str:
    """`pictures` are the files of those figures that could be drawn, by name."""
    return "\n\n".join(filter(None, _parts(report, pictures or {}))) + "\n"


def _parts(report: Report, pictures: Mapping[str, str]) -> Iterator[str]:
    yield f"# {markdown_line(report.title)}"
    yield markdown_list(report.verdict)
    if report.cards:
        labels, values = [card.label for card in report.cards], [card.value for card in report.cards]
        yield markdown_table(labels, [values], [True] * len(labels))
    for section in report.sections:
        yield from _section(section, pictures)
    if report.names is not None:
        yield "## Names"
        yield _table(report.names)
    if report.definitions:
        yield "## Legend"
        yield markdown_list(f"{title}: {meaning}" for title, meaning in report.definitions.items())
    if report.provenance.facts or report.provenance.commands:
        yield SIGN.strip()
        yield markdown_list(report.provenance.facts)
        yield fenced(report.provenance.commands) if report.provenance.commands else ""


def _section(section: Section, pictures: Mapping[str, str]) -> Iterator[str]:
    yield f"## {markdown_line(section.title)}"
    yield from map(markdown_line, section.prose)
    yield markdown_list(f"{link.title}: {link.note}" if link.note else link.title for link in section.links)
    for figure in section.figures:
        if figure.name in pictures:
            yield f"![{markdown_line(figure.title)}]({pictures[figure.name]})"
    for table in section.tables:
        yield f"### {markdown_line(table.title)}" if table.title else ""
        yield _table(table)
    yield from map(markdown_line, section.notes)


def _table(table: Table) -> str:
    return markdown_table(table.titles, table.rows, table.are_numbers)
