"""The tables of docs/context-extension.md: `python -m docs_build.extension_table`.

One pair of tables for each default: the present one, and an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from docs_build.extension_runs import DEFAULT, EARLIER, EXACT, FOLDER, PAPER, Kind, group, read_runs
from docs_build.marked_tables import with_table
from docs_build.records import RECORDS

PAGE = RECORDS.parent / "docs" / "context-extension.md"
BEGIN = "<!-- table: python -m docs_build.extension_table -->"
BEGIN_EARLIER = "<!-- table: python -m docs_build.extension_table, earlier runs -->"
_CALLED = {EXACT: "exact attention (cuDNN)", DEFAULT: "MuSe, the default", PAPER: "the paper's method, `muse:paper`"}
_CALLED_EARLIER = {**_CALLED, DEFAULT: "`muse:Q8K32T0.1B2k`"}
TABLES = ((BEGIN, FOLDER, _CALLED), (BEGIN_EARLIER, EARLIER, _CALLED_EARLIER))
"""Where each begins, its records, and what attentions are called there."""


def make_page(page: str) -> str:
    """The page with its tables."""
    for begin, folder, called in TABLES:
        page = with_table(page, make_tables(group(read_runs(folder)), called), begin)
    return page


def make_tables(kinds: Sequence[Kind], called: Mapping[str, str]) -> str:
    """Speeds and losses, and losses by position of exact attention, the default and the paper's method."""
    lines = [
        "| trained with | seeds | tokens | tokens/s | speed-up | seconds | held-out loss | against exact training |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind in kinds:
        attention, tokens, tail = kind.runs[0].kind
        name = called.get(attention, f"`{attention}`") + (f", the last {tail:.0%} of updates exact" if tail else "")
        loss = mean(run.after["all"] for run in kind.runs)
        speed_up = "" if attention == EXACT else f"**{kind.speed / kind.exact_speed:.2f}x**"
        lines.append(
            f"| {name} | {len(kind.runs)} | {tokens / 1e6:.1f}M | {round(kind.speed, -2):,.0f} | {speed_up} | "
            f"{tokens / kind.speed:.0f} | {loss:.4f} | {kind.gap} |"
        )
    tokens = kinds[0].runs[0].tokens
    compared = [kind for kind in kinds if kind.runs[0].attention in called and kind.runs[0].kind[1:] == (tokens, 0)]
    heads = ["before", *(called[kind.runs[0].attention] for kind in compared)]
    lines += ["", f"| positions | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    for positions, before in compared[0].runs[0].before.items():
        losses = [before, *(mean(run.after[positions] for run in kind.runs) for kind in compared)]
        lines.append(f"| {positions} | {' | '.join(f'{loss:.4f}' for loss in losses)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(make_page(PAGE.read_text()))
    print(f"wrote the tables of {PAGE.name}")
