"""README's table, from the records: `python -m docs_build.readme_table`. Every number is read from benchmarks/."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

from docs_build.records import DEFAULT, PAPER, RECORDS, SYNTHETIC, Timing, read_timings
from muse_attention.sizes import format_size

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- table: python -m docs_build.readme_table -->", "<!-- end of table -->"
COMPARED_LENGTH = 64 * 1024
REAL = "heads of SmolLM2"
GPU = "NVIDIA H200"
PAPERS = "the paper's"


def make_table(timings: list[Timing]) -> str:
    """README's table in Markdown."""
    compared = [
        _newest(timings, method, COMPARED_LENGTH, data) for data in (REAL, SYNTHETIC) for method in (DEFAULT, PAPER)
    ]
    rows = [
        *(
            (
                f"Attention, {format_size(timing.length)} tokens, {timing.data}",
                "default" if timing.method == DEFAULT else PAPERS,
                _milliseconds(timing.exact_seconds),
                _milliseconds(timing.seconds),
                f"**{timing.speedup:.2f}x** as fast",
                _error(timing),
                timing.file,
            )
            for timing in compared
        ),
        *_training_rows(),
    ]
    titles = [f"one {GPU}, bfloat16", "configuration", "exact", "MuSe", "MuSe against exact", "error (RSE)", "record"]
    head = f"| {' | '.join(titles)} |\n| --- | --- | ---: | ---: | --- | --- | --- |"
    if {timing.gpu for timing in compared} != {GPU}:
        raise ValueError(f"a row of README's table is not of an {GPU}, as its head says")
    return "\n".join([head, *(_row(*row) for row in rows)])


def with_table(text: str, table: str, first_line: str = BEGIN) -> str:
    """A page with the table after this line replaced."""
    before, begin, rest = text.partition(first_line)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {first_line} and {END}")
    return f"{before}{first_line}\n\n{table}\n\n{END}{after}"


def _training_rows() -> list[tuple[str, str, str, str, str, str, Path]]:
    """Speed of short runs with the default, and losses of longer ones with the paper's sizes, both at 64k."""
    short, path = _compared("speed-64k")
    speeds = {run["name"]: max(speed for speed, _ in run["curves"]["speeds"].values()) for run in short["runs"]}
    training = (
        "Speed of training a 96M model, 64k tokens, 12 updates",
        "default",
        *(f"{round(speeds[run], -3):,.0f} tokens/s" for run in ("exact", "muse")),
        f"**{speeds['muse'] / speeds['exact']:.2f}x** as fast",
        "",
        path,
    )
    longer, path = _compared("64k")
    losses = {cell["run"]: _losses(cell) for cell in longer["cells"] if _is_final(cell, longer["runs"])}
    difference = mean(muse - exact for muse, exact in zip(losses["muse"], losses["exact"], strict=True))
    percent = 100 * difference / mean(losses["exact"])
    loss = (
        "Held-out loss of two 96M models, read with exact attention",
        PAPERS,
        *(f"{mean(losses[run]):.3f}" for run in ("exact", "muse")),
        f"{abs(percent):.1f}% {'lower' if percent < 0 else 'higher'}, one seed, short runs",
        "",
        path,
    )
    return [training, loss]


def _compared(record: str) -> tuple[dict[str, Any], Path]:
    """What `muse compare` wrote."""
    path = RECORDS / "pretraining" / record / "compare.json"
    document = json.loads(path.read_text())
    if document["machine"]["gpu"] != GPU:
        raise ValueError(f"{path}: not of an {GPU}, as the head of README's table says")
    return document, path


def _is_final(cell: dict[str, Any], runs: list[dict[str, Any]]) -> bool:
    """Whether it has the losses of a finished model under exact attention."""
    return cell["attention"] == "exact" and (cell["run"], cell["step"]) in {(run["name"], run["step"]) for run in runs}


def _losses(cell: dict[str, Any]) -> list[float]:
    """Of each window: the mean over its tokens."""
    sizes = cell["sizes"]
    return [sum(size * loss for size, loss in zip(sizes, bins, strict=True)) / sum(sizes) for bins in cell["bins"]]


def _newest(timings: list[Timing], method: str, length: int, data: str) -> Timing:
    found = [timing for timing in timings if (timing.method, timing.length, timing.data) == (method, length, data)]
    if not found:
        raise ValueError(f"no record has {method!r} at {length}: run muse bench or muse tune with it")
    return max(found, key=lambda timing: timing.date)


def _error(timing: Timing) -> str:
    tail = "" if timing.error_p99 is None else f", 1% of queries above {timing.error_p99:.2f}"
    return "" if timing.error is None else f"{timing.error:.2g}{tail}"


def _row(what: str, called: str, exact: str, muse: str, gain: str, error: str, file: Path) -> str:
    link = file.with_suffix(".md").relative_to(RECORDS.parent).as_posix()
    return f"| {what} | {called} | {exact} | {muse} | {gain} | {error} | [{file.stem}]({link}) |"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{1000 * seconds:.0f} ms"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(), make_table(read_timings())))
    print(f"wrote the table of {README}")
