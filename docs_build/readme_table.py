"""README's table, from the records: `python -m docs_build.readme_table`. Every number is read from benchmarks/."""

from __future__ import annotations

from pathlib import Path

from docs_build.records import (
    DEFAULT,
    DEFAULTS_OF_0_3,
    GPU,
    PAPER,
    RECORDS,
    SYNTHETIC,
    TO_THE_LETTER,
    Timing,
    read_comparison,
    read_speed_alone,
    read_timings,
)
from muse_attention.sizes import format_size
from muse_lab.evaluation.comparison.seeds import seeds_of
from muse_lab.evaluation.comparison.training_curves import Speed
from muse_lab.pretraining.schedule import EXACT

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- table: python -m docs_build.readme_table -->", "<!-- end of table -->"
COMPARED_LENGTH = 64 * 1024
REAL = "heads of SmolLM2"
CALLED = {
    DEFAULT: "default",
    PAPER: "the paper's sizes, our clustering",
    TO_THE_LETTER: "the paper's method to the letter",
}
"""What the rows call a method."""
TRAINED_WITH = "default of 0.3.0"
"""What models of the records were trained with."""
COMPARED = ((REAL, DEFAULT), (REAL, PAPER), (SYNTHETIC, DEFAULT), (SYNTHETIC, TO_THE_LETTER))


def make_table(timings: list[Timing]) -> str:
    """README's table in Markdown."""
    compared = [_newest(timings, method, COMPARED_LENGTH, data) for data, method in COMPARED]
    rows = [
        *(
            (
                f"Attention, {format_size(timing.length)} tokens, {timing.data}",
                CALLED[timing.method],
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
    """Speed of short runs from random and from trained weights, and losses of longer runs, with the default of then."""
    short, path = read_comparison("speed-64k")
    speeds = [max(short.runs[run].curves.speeds.values()) for run in ("exact", "muse")]
    random = _speed_row("Speed of training a 96M model from random weights, 64k tokens", *speeds, path)
    (exact, _), (muse, folder) = (read_speed_alone("32k", training) for training in ("exact", "muse"))
    trained = _speed_row("Speed of training a 23M model from trained weights, 32k tokens", exact, muse, folder.parent)
    return [random, trained, _loss_row("32k")]


def _speed_row(what: str, exact: Speed, muse: Speed, path: Path) -> tuple[str, str, str, str, str, str, Path]:
    return (
        f"{what}, {min(exact.updates, muse.updates)} timed updates",
        TRAINED_WITH,
        *(f"{round(speed.tokens_per_second, -3):,.0f} tokens/s" for speed in (exact, muse)),
        f"**{muse.tokens_per_second / exact.tokens_per_second:.2f}x** as fast",
        "",
        path,
    )


def _loss_row(record: str) -> tuple[str, str, str, str, str, str, Path]:
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
    return (
        f"Held-out loss of 23M models, {format_size(length)} tokens, read with exact attention",
        TRAINED_WITH,
        f"{of_exact.mean:.3f}",
        f"{of_muse.mean:.3f}",
        f"{abs(gap.mean):.2f} ± {gap.standard_error:.2f}% {sign}, {len(muse.runs)} seeds",
        "",
        path,
    )


def _newest(timings: list[Timing], method: str, length: int, data: str) -> Timing:
    found = [timing for timing in timings if (timing.method, timing.length, timing.data) == (method, length, data)]
    if not found:
        raise ValueError(f"no record has {method!r} at {length}: run muse bench or muse tune with it")
    return max(found, key=lambda timing: timing.date)


def _error(timing: Timing) -> str:
    tail = "" if timing.error_p99 is None else f", 1% of queries above {timing.error_p99:.2f}"
    return "" if timing.error is None else f"{timing.error:.2g}{tail}"


def _row(what: str, called: str, exact: str, muse: str, gain: str, error: str, file: Path) -> str:
    link = (file if file.is_dir() else file.with_suffix(".md")).relative_to(RECORDS.parent).as_posix()
    return f"| {what} | {called} | {exact} | {muse} | {gain} | {error} | [{file.stem}]({link}) |"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{1000 * seconds:.0f} ms"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(), make_table(read_timings())))
    print(f"wrote the table of {README}")
