"""README's table, from the records: `python -m docs_build.readme_table`. Every number is read from benchmarks/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from docs_build.records import (
    DEFAULT,
    DEFAULTS_OF_0_3,
    GPU,
    QWEN,
    RECORDS,
    SMOLLM2,
    TRAINED_WITH,
    Timing,
    read_comparison,
    read_timings,
    read_timings_of_qwen,
)
from muse_attention.sizes import format_size
from muse_lab.evaluation.comparison.seeds import seeds_of
from muse_lab.pretraining.schedule import EXACT

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- table: python -m docs_build.readme_table -->", "<!-- end of table -->"
COMPARED = ((SMOLLM2, 64), (SMOLLM2, 32), (QWEN, 32))
"""Rows of attention: heads, and thousands of tokens."""
CALLED = {SMOLLM2: "heads of SmolLM2-135M", QWEN: "heads of 128 of Qwen2.5-Coder-1.5B"}


class Row(NamedTuple):
    """Of the table."""

    what: str
    exact: str
    muse: str
    change: str
    record: Path


def read_rows() -> list[Row]:
    """Attention on heads of trained models; speed and loss of training."""
    timings = [*read_timings(), *read_timings_of_qwen()]
    compared = [_find(timings, data, 1024 * thousands) for data, thousands in COMPARED]
    return [*map(_attention_row, compared), _speed_row("speed-64k"), _loss_row("32k")]


def make_table(rows: Sequence[Row]) -> str:
    """README's table in Markdown."""
    head = f"| one {GPU}, bfloat16 | exact | MuSe | MuSe against exact |\n| --- | ---: | ---: | --- |"
    return "\n".join([head, *(_line(row) for row in rows)])


def make_claims(rows: Sequence[Row]) -> list[str]:
    """What README's prose says of the default: numbers with the words around them."""
    data, thousands = COMPARED[0]
    best, slower = _find(read_timings(), data, 1024 * thousands), _find(read_timings_of_qwen(), QWEN, 16 * 1024)
    loss = rows[-1].change.partition(",")[0]
    return [
        f"**{best.speedup:.1f} times as fast as cuDNN** at {format_size(best.length)} tokens on {CALLED[data]}",
        f"a relative squared error (RSE) of {best.error:.2g}",
        f"a held-out loss {loss} than after exact training. They had the {TRAINED_WITH}",
        f"slower than exact attention ({slower.speedup:.2f}x) at {format_size(slower.length)}",
    ]


def with_table(text: str, table: str, first_line: str = BEGIN) -> str:
    """A page with the table after this line replaced."""
    before, begin, rest = text.partition(first_line)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {first_line} and {END}")
    return f"{before}{first_line}\n\n{table}\n\n{END}{after}"


def _find(timings: Sequence[Timing], data: str, length: int) -> Timing:
    """Of the default."""
    for timing in timings:
        if (timing.method, timing.data, timing.length, timing.gpu) == (DEFAULT, data, length, GPU):
            return timing
    raise ValueError(
        f"no record of an {GPU} has the default on {data} at {format_size(length)}: run muse bench with it"
    )


def _attention_row(timing: Timing) -> Row:
    return Row(
        f"Attention, {format_size(timing.length)} tokens, {CALLED[timing.data]}",
        *(f"{1000 * seconds:.3g} ms" for seconds in (timing.exact_seconds, timing.seconds)),
        f"**{timing.speedup:.2f}x** as fast, RSE {timing.error:.2g}",
        timing.file,
    )


def _speed_row(record: str) -> Row:
    """Of short runs from random weights."""
    results, path = read_comparison(record)
    exact, muse = (max(results.runs[run].curves.speeds.values()).tokens_per_second for run in ("exact", "muse"))
    return Row(
        f"Training a 96M model, {format_size(results.settings.length)} tokens, {TRAINED_WITH}",
        *(f"{round(speed, -3):,.0f} tokens/s" for speed in (exact, muse)),
        f"**{muse / exact:.2f}x** as fast",
        path,
    )


def _loss_row(record: str) -> Row:
    """Means over seeds."""
    results, path = read_comparison(record)
    length = results.settings.length
    by_attention = {seeds.attention: seeds for seeds in seeds_of(results)}
    exact, muse = (by_attention.get(name) for name in (EXACT, DEFAULTS_OF_0_3[length]))
    gap = muse and muse.difference(results, is_percent=True)
    if exact is None or muse is None or gap is None or gap.standard_error is None:
        raise ValueError(f"{path}: not several seeds of exact training, and as many with the default")
    of_exact, of_muse = (seeds.loss(results, EXACT) for seeds in (exact, muse))
    if of_exact is None or of_muse is None:
        raise ValueError(f"{path}: not all of its runs were measured to the end")
    sign = "lower" if gap.mean < 0 else "higher"
    return Row(
        f"Held-out loss of 23M models, {format_size(length)} tokens, {TRAINED_WITH}",
        f"{of_exact.mean:.3f}",
        f"{of_muse.mean:.3f}",
        f"{abs(gap.mean):.2f} ± {gap.standard_error:.2f}% {sign}, {len(muse.runs)} seeds",
        path,
    )


def _line(row: Row) -> str:
    link = row.record.with_suffix(".md").relative_to(RECORDS.parent).as_posix()
    return f"| [{row.what}]({link}) | {row.exact} | {row.muse} | {row.change} |"


if __name__ == "__main__":
    rows = read_rows()
    README.write_text(with_table(README.read_text(), make_table(rows)))
    print("wrote README's table; its prose must say:", *make_claims(rows), sep="\n")
