"""docs/paper.md, from `paper_elements.py` and the records: `python -m docs_build.paper_page`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from docs_build.paper_elements import EQUATIONS, FIGURES, PASSAGES, SRC, TABLES, Element
from docs_build.records import BLOCK_DIAGONAL, MOBA, PAPER, RECORDS, SYNTHETIC, read_timings
from muse_attention.evaluation.comparison.findings import difference, speedup
from muse_attention.evaluation.comparison.results import ComparisonResults
from muse_attention.evaluation.means import Mean
from muse_attention.pretraining.schedule import EXACT

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "paper.md"
_LENGTH = 65536
_INTRODUCTION = """# The paper, element by element

<!-- written by `python -m docs_build.paper_page` from docs_build/paper_elements.py; edit that -->

Multipole Semantic Attention: A Fast Approximation of Softmax Attention for Pretraining (Mitchell and Kersting, ICML
2026). For each equation, figure and table: where it is implemented, the command that regenerates it, what was recorded
or why nothing was, and what differs on purpose. Commands are for a run or a model at hand; at 64k they want a GPU, and
on a CPU the same commands take a shorter `--length`. `muse:paper` and the recipes `paper-s3` to `paper-s8` are the
paper's method to the letter. The [default](reference/configuration.md#defaults) of this library is another
configuration.
"""


def make_page() -> str:
    return "\n".join(
        [_INTRODUCTION, *_equations(), *_passages(), *_elements("Figures", FIGURES), *_elements("Tables", TABLES)]
    )


def all_commands() -> list[str]:
    """Every command line of the figures and tables."""
    return [command for element in (*FIGURES, *TABLES) for command in element.commands]


def all_paths() -> list[str]:
    """Every file that is named, of the repository."""
    named = [path for equation in EQUATIONS for path in (*equation.files, *equation.tests)]
    named += [path for passage in PASSAGES for path in passage.files]
    named += [path for element in (*FIGURES, *TABLES) for path in (*element.files, *element.records)]
    return list(dict.fromkeys(named))


def _equations() -> Iterator[str]:
    yield "## Equations\n"
    yield "| equation | what | where | tested by | remark |"
    yield "| ---: | --- | --- | --- | --- |"
    for equation in EQUATIONS:
        cells = (equation.what, _links(equation.files), _names(equation.tests), equation.remark)
        yield f"| {equation.number} | {' | '.join(cells)} |"
    yield ""


def _passages() -> Iterator[str]:
    yield "## Algorithm and appendices\n"
    yield "| passage | what | where | what differs |"
    yield "| --- | --- | --- | --- |"
    for passage in PASSAGES:
        yield f"| {passage.name} | {passage.says} | {_links(passage.files)} | {passage.differs} |"
    yield ""


def _elements(title: str, elements: Iterable[Element]) -> Iterator[str]:
    results = recorded_results()
    yield f"## {title}\n"
    for element in elements:
        yield f"### {element.name}: {element.title}\n"
        if element.commands:
            yield "\n".join(f"    {command}" for command in element.commands) + "\n"
        yield f"- Implemented in {_links(element.files)}."
        recorded = element.recorded.format(**results)
        yield f"- Recorded: {recorded}{f' ({_links(element.records)})' if element.records else ''}"
        if element.differs:
            yield f"- Differs: {element.differs}"
        yield ""


def recorded_results() -> dict[str, str]:
    """Sentences with the numbers of records that are data."""
    runs = ComparisonResults.read(RECORDS / "pretraining" / "64k" / "compare.json")
    exact = runs.whole(runs.runs["exact"], EXACT)
    assert exact is not None
    losses, speeds = [f"exact {Mean.of(exact.means)}"], []
    for run in runs.runs.values():
        if found := difference(runs, run):
            losses.append(f"{run.name} {found.nats.signed()}")
        if ratio := speedup(runs, run):
            speeds.append(f"{run.name} {ratio:.2f}x")
    return {
        "loss": f"Loss under exact attention, less that of exact training: {', '.join(losses)}.",
        "speed": f"Speed of training over exact attention: {', '.join(speeds)}.",
        "speed_of_methods": _speed_of_methods(),
    }


def _speed_of_methods() -> str:
    timings = {
        timing.method: timing for timing in read_timings() if (timing.length, timing.data) == (_LENGTH, SYNTHETIC)
    }
    found = [
        f"{name} {timings[name].speedup:.2f}x with an RSE of {timings[name].error:.2g}"
        for name in (PAPER, MOBA, BLOCK_DIAGONAL)
        if name in timings
    ]
    return f"Forward and backward at 64k on synthetic data, speed-up over exact attention: {'; '.join(found)}."


def _links(paths: Iterable[str]) -> str:
    return ", ".join(f"[{_shown(path)}]({os.path.relpath(ROOT / path, PAGE.parent)})" for path in paths)


def _shown(path: str) -> str:
    """A source by its place in the package, anything else by its name."""
    return path.removeprefix(f"{SRC}/") if path.startswith(SRC) else Path(path).name


def _names(paths: Iterable[str]) -> str:
    """Tests are not part of the site, so nothing leads there."""
    return ", ".join(f"`{path}`" for path in paths)


if __name__ == "__main__":
    PAGE.write_text(make_page())
    print(f"wrote {PAGE}")
