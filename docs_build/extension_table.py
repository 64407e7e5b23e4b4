"""The tables of docs/context-extension.md: `python -m docs_build.extension_table`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from docs_build.extension_runs import DEFAULT, EXACT, PAPER, Kind, find, group, read_runs
from docs_build.marked_tables import with_table
from docs_build.records import RECORDS

PAGE = RECORDS.parent / "docs" / "context-extension.md"
BEGIN = "<!-- table: python -m docs_build.extension_table -->"
CALLED = {EXACT: "exact attention (cuDNN)", DEFAULT: "MuSe, the default", PAPER: "the paper's method, `muse:paper`"}


def make_tables(kinds: Sequence[Kind]) -> str:
    lines = [
        "| trained with | seeds | tokens | tokens/s | speed-up | seconds | held-out loss | against exact training |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind in kinds:
        attention, tokens, tail = kind.runs[0].kind
        name = CALLED.get(attention, f"`{attention}`") + (f", the last {tail:.0%} of updates exact" if tail else "")
        loss = mean(run.after["all"] for run in kind.runs)
        speed_up = "" if attention == EXACT else f"**{kind.speed / kind.exact_speed:.2f}x**"
        lines.append(
            f"| {name} | {len(kind.runs)} | {tokens / 1e6:.1f}M | {round(kind.speed, -2):,.0f} | {speed_up} | "
            f"{tokens / kind.speed:.0f} | {loss:.4f} | {kind.gap} |"
        )
    compared = [find(kinds, attention) for attention in (EXACT, DEFAULT, PAPER)]
    heads = ["before", *(CALLED[kind.runs[0].attention] for kind in compared)]
    lines += ["", f"| positions | {' | '.join(heads)} |", "| --- | ---: | ---: | ---: | ---: |"]
    for positions, before in compared[0].runs[0].before.items():
        losses = [before, *(mean(run.after[positions] for run in kind.runs) for kind in compared)]
        lines.append(f"| {positions} | {' | '.join(f'{loss:.4f}' for loss in losses)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), make_tables(group(read_runs())), BEGIN))
    print(f"wrote the tables of {PAGE.name}")
