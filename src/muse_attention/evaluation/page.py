"""Reports as one HTML file that needs nothing else, with tables and pictures inside it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from urllib.parse import quote

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Header and rows."""

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 84rem; margin: 0 auto;
       padding: 1rem; }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem; }
h3 { font-size: .95rem; font-weight: 600; margin: .3rem 0; }
p { max-width: 52rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .6rem; text-align: left; border-bottom: 1px solid #eee; vertical-align: top; }
th { border-bottom: 2px solid #888; font-weight: 600; vertical-align: bottom; }
.number { text-align: right; }
td.number { white-space: nowrap; }
th { max-width: 12rem; overflow-wrap: anywhere; }
td { max-width: 24rem; overflow-wrap: anywhere; }
th:not(.number), td:not(.number) { min-width: 5rem; }
th.number { min-width: 3.5rem; }
.beside { display: flex; flex-wrap: wrap; gap: 1.5rem 2.5rem; align-items: flex-start; }
.beside > div { min-width: 0; max-width: 100%; }
.beside > div + div h3 { max-width: 24rem; }
img { max-width: min(100%, 52rem); height: auto; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: .7rem; font-size: .85rem; }
.note { color: #555; font-size: .9rem; }
nav a { margin-right: .8rem; }
"""


class Page:
    """Parts are added in order. Whatever text comes in is shown as it is, never read as HTML."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []
        self._sections: list[tuple[str, str]] = []

    def section(self, title: str) -> None:
        anchor = f"s{len(self._sections) + 1}"
        self._sections.append((anchor, title))
        self._parts.append(f'<h2 id="{anchor}">{escape(title)}</h2>')

    def paragraph(self, text: str, *, is_note: bool = False) -> None:
        self._parts.append(f'<p class="note">{escape(text)}</p>' if is_note else f"<p>{escape(text)}</p>")

    def link(self, text: str, address: str) -> None:
        self._parts.append(f'<p><a href="{escape(quote(address))}">{escape(text)}</a></p>')

    def code(self, text: str) -> None:
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def picture(self, png: bytes, description: str) -> None:
        data = base64.b64encode(png).decode()
        self._parts.append(f'<p><img alt="{escape(description)}" src="data:image/png;base64,{data}"></p>')

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._parts.append(_table(header, rows))

    def tables_beside(self, *tables: tuple[str, Sequence[str], Sequence[Sequence[str]]]) -> None:
        """Several (title, header, rows), side by side where the screen is wide enough."""
        shown = (f"<div><h3>{escape(title)}</h3>{_table(header, rows)}</div>" for title, header, rows in tables)
        self._parts.append(f'<div class="beside">{"".join(shown)}</div>')

    def html(self) -> str:
        links = "".join(f'<a href="#{anchor}">{escape(title)}</a> ' for anchor, title in self._sections)
        body = "\n".join(self._parts)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self._title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
            f"<h1>{escape(self._title)}</h1>\n<nav>{links}</nav>\n{body}\n</body>\n</html>\n"
        )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    columns = list(zip(header, *rows, strict=True))
    are_numbers = [any(cells[1:]) and all(map(_is_number, filter(None, cells[1:]))) for cells in columns]
    lines = "".join(f"<tr>{_cells('td', row, are_numbers)}</tr>" for row in rows)
    head = _cells("th", header, are_numbers)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cells(tag: str, cells: Sequence[str], are_numbers: Sequence[bool]) -> str:
    return "".join(
        f'<{tag} class="number">{escape(cell)}</{tag}>' if is_number else f"<{tag}>{escape(cell)}</{tag}>"
        for cell, is_number in zip(cells, are_numbers, strict=True)
    )


def _is_number(cell: str) -> bool:
    return cell.removeprefix("more than ").lstrip("+-~")[:1].isdigit()
