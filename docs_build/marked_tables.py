"""Tables of pages that a command writes, between two comments."""

from __future__ import annotations

END = "<!-- end of table -->"


def with_table(text: str, table: str, first_line: str) -> str:
    """A page with the table after this line replaced."""
    before, begin, rest = text.partition(first_line)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {first_line} and {END}")
    return f"{before}{first_line}\n\n{table}\n\n{END}{after}"
