"""README's table, from the records: `python -m docs_build.readme_table`. Every number is read from benchmarks/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from docs_build.extension_runs import read_compared
from docs_build.extension_table import PAGE
from docs_build.marked_tables import with_table
from docs_build.records import (
    DEFAULT,
    GPU,
    QWEN,
    RECORDS,
    SMOLLM2,
    TRAINED_AT_64K,
    Timing,
    read_speeds,
    read_timings,
    read_timings_of_qwen,
)
from docs_build.trained_pairs import median_gap, read_group
from muse_attention.sizes import format_size
from muse_lab.records.attention_names import EXACT
from muse_lab.records.means import Mean

README = Path(__file__).parent.parent / "README.md"
BEGIN = "<!-- table: python -m docs_build.readme_table -->"
COMPARED = ((SMOLLM2, 64), (QWEN, 32))
"""Rows of attention: heads, and thousands of tokens."""
CALLED = {
    SMOLLM2: "heads of SmolLM2-135M",
    QWEN: "128-wide heads of Qwen2.5-Coder-1.5B",
}


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
    return [*map(_attention_row, compared), _long_row(), *_extension_rows()]


def make_table(rows: Sequence[Row]) -> str:
    """README's table in Markdown."""
    head = f"| one {GPU}, bfloat16 | cuDNN | MuSe | MuSe against exact |\n| --- | ---: | ---: | --- |"
    return "\n".join([head, *(_line(row) for row in rows)])


def make_claims(rows: Sequence[Row]) -> list[str]:
    """What README's prose says of the default: numbers with the words around them."""
    data, thousands = COMPARED[0]
    best, at_32k, at_16k = (_find(read_timings(), data, 1024 * size) for size in (thousands, 32, 16))
    of_64k = _find(read_timings(), TRAINED_AT_64K, 65536)
    exact, _, with_tail = read_compared()
    trained = ("far-64k", "far-32k-heads-of-128", "far-64k-caution", "far-32k-heads-of-128-caution")
    at_64k, of_128, cautious_at_64k, cautious_of_128 = (median_gap(read_group(record)) for record in trained)
    faster, loss = rows[-2].change.partition("**")[2].partition("x")[0], rows[-1].change.partition(";")[0]
    return [
        f"**{best.speedup:.1f} times as fast as cuDNN** at {format_size(best.length)} tokens on {CALLED[data]}",
        f"a relative squared error (RSE) of {best.error:.2g}",
        f"{faster} times the tokens/s of exact attention",
        f"Its held-out loss, measured with exact attention, ended {loss}",
        f"ended {with_tail.gap.lstrip('+')} higher, at {with_tail.speed / exact.speed:.2f} times the tokens/s",
        f"{_change(at_64k)} at 64k, {_change(of_128)} at 32k with 128-wide heads",
        f"{_change(cautious_at_64k)} (two) and {_change(cautious_of_128)} (three)",
        f"{at_32k.speedup:.2f}x at {format_size(at_32k.length)}",
        f"{of_64k.speedup:.2f}x, RSE {of_64k.error:#.2g}",
        f"{at_16k.speedup:.2f} times as fast at {format_size(at_16k.length)}",
    ]


def _change(gap: Mean) -> str:
    return f"{gap.mean:+.2f} ± {gap.standard_error:.2f}%"


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
        f"**{timing.speedup:.2f}x** as fast, RSE {timing.error:#.2g}",
        timing.file,
    )


def _long_row() -> Row:
    """Training at 64k from trained weights."""
    speeds = read_speeds("s3-64k")
    exact, muse = speeds[EXACT], speeds[DEFAULT]
    return Row(
        "96M model, 64k tokens, training speed, one seed",
        *(f"{round(speed, -2):,.0f} tokens/s" for speed in (exact, muse)),
        f"**{muse / exact:.2f}x** as fast",
        RECORDS.parent / "docs" / "evidence" / "pretraining.md",
    )


def _extension_rows() -> list[Row]:
    """Means over seeds, of the same tokens."""
    exact, muse, _ = read_compared()
    losses = [mean(run.after["all"] for run in kind.runs) for kind in (exact, muse)]
    numbers = len(muse.runs), len(exact.runs)
    seeds = f"{numbers[0]} seeds" + (" each" if numbers[0] == numbers[1] else f", exact {numbers[1]}")
    return [
        Row(
            "SmolLM2-135M extended from 8k to 32k, training speed",
            *(f"{round(kind.speed, -2):,.0f} tokens/s" for kind in (exact, muse)),
            f"**{muse.speed / exact.speed:.2f}x** as fast",
            PAGE,
        ),
        Row(
            "Its held-out loss after the same tokens",
            *(f"{loss:.4f}" for loss in losses),
            f"{muse.gap.lstrip('+-')} {'lower' if mean(muse.gaps) < 0 else 'higher'}; {seeds}",
            PAGE,
        ),
    ]


def _line(row: Row) -> str:
    link = row.record.with_suffix(".md").relative_to(RECORDS.parent).as_posix()
    return f"| [{row.what}]({link}) | {row.exact} | {row.muse} | {row.change} |"


if __name__ == "__main__":
    rows = read_rows()
    README.write_text(with_table(README.read_text(), make_table(rows), BEGIN))
    print("wrote README's table; its prose must say:", *make_claims(rows), sep="\n")
