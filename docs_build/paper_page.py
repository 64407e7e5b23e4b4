"""docs/paper.md, from `paper_elements.py` and the records: `python -m docs_build.paper_page`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from docs_build.paper_elements import EQUATIONS, FIGURES, PASSAGES, SRC, TABLES, Element
from docs_build.records import (
    BLOCK_DIAGONAL,
    DEFAULT,
    MOBA,
    PAPER,
    SYNTHETIC,
    TO_THE_LETTER,
    read_speeds,
    read_timings,
)
from docs_build.trained_pairs import median_gap, read_group
from muse_lab.evaluation.fidelity.presets import find_presets
from muse_lab.records.attention_names import EXACT

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "paper.md"
_LENGTH, _RECORDED_LENGTH = 65536, 8192
ERRORS = ("benchmarks/pretrained/smollm2-fidelity.md", "benchmarks/pretrained/smollm2-fidelity-capped-queries.md")
"""Without a limit on clusters of queries, for the presets it has, and with that limit."""
LOSSES = {
    "far-64k": "23M at 64k, three seeds,",
    "far-32k": "at 32k, two,",
    "far-32k-heads-of-128": "at 32k with heads of 128, three,",
    "far-64k-caution": "with `Q8K32T0.4B4k,caution=2` at 64k, two,",
    "far-32k-heads-of-128-caution": "and at 32k with heads of 128, three,",
}
SPEEDS = {"s3-64k": "96M at 64k", "far-64k-alone": "23M at 64k", "far-32k-alone": "at 32k"}
"""Records in pretraining, and what their models are."""
_INTRODUCTION = """# The paper, element by element

<!-- written by `python -m docs_build.paper_page` from docs_build/paper_elements.py; edit that -->

Multipole Semantic Attention: A Fast Approximation of Softmax Attention for Pretraining (Mitchell and Kersting, ICML
2026). For each equation, figure and table: where it is implemented, the command that regenerates it, the recorded
result or why there is none, and intended differences. Commands need your own run or model. At 64k they need a GPU; on
a CPU use a shorter `--length`. `muse:paper` and the recipes `paper-s3` to `paper-s8` follow the paper exactly. The
[default](reference/configuration.md#defaults) of this library is another configuration.

**Errors** are recorded on SmolLM2-135M, quantised to 4 bits and not trained with MuSe, at 8k tokens, around the
sizes that the paper's rule gives there. The paper's models are not published, and none was trained here at 64k for long
enough to replace them, so compare ratios, not values. Presets have the paper's sizes with Lloyd's
clustering and without a limit on clusters of queries. Some records are older and have the paper's limit, which was the
default then.

**Losses** are recorded for models of 23M parameters at 64k, 32k and 16k, with at most 10 tokens per parameter: no model
has been fully pretrained with this library.
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
        words = [*map(recorded_errors, element.presets), element.recorded.format(**results)]
        words.append(f"({_links(element.records)})" if element.records else "")
        yield f"- Recorded: {' '.join(filter(None, words))}"
        if element.differs:
            yield f"- Differs: {element.differs}"
        yield ""


def recorded_results() -> dict[str, str]:
    """Sentences with the numbers of records that are data."""
    return {
        "loss": _loss_of_default(),
        "speed": f"Training speed over exact attention, with the default: {'; '.join(map(_speed_up, SPEEDS))}.",
        "speed_of_methods": _speed_of_methods(),
    }


def recorded_errors(preset: str) -> str:
    """The errors of a preset of `muse fidelity` on SmolLM2, by the first record that has them."""
    (found,) = find_presets([preset], _RECORDED_LENGTH)
    for record in ERRORS:
        table = _table_below(f"## {found.title}", (ROOT / record).read_text())
        if table:
            place = table[0].index("RSE")
            errors = [f"{' / '.join(filter(None, row[:place]))}: {row[place]}" for row in table[1:]]
            return f"RSE by {' / '.join(table[0][:place])}: {'; '.join(errors)} ({_links([record])})."
    raise ValueError(f"no record has the preset {preset}")


def _table_below(heading: str, text: str) -> list[list[str]]:
    """The first table below a heading, header first; empty if there is no such heading."""
    _, _, rest = text.partition(f"{heading}\n")
    lines = itertools.dropwhile(lambda line: not line.startswith("| "), rest.splitlines())
    rows = [line.strip("| ").split(" | ") for line in itertools.takewhile(lambda line: line.startswith("|"), lines)]
    return [row for row in rows if not row[0].startswith("---")]


def _loss_of_default() -> str:
    gaps = {about: median_gap(read_group(record)) for record, about in LOSSES.items()}
    found = "; ".join(f"{about} {gap.mean:+.2f} ± {gap.standard_error:.2f}%" for about, gap in gaps.items())
    return (
        "Loss under exact attention after training with the default, or another configuration where named, minus that "
        f"of exact training, the median over held-out windows: {found}."
    )


def _speed_up(record: str) -> str:
    speeds = read_speeds(record)
    return f"{SPEEDS[record]} {speeds[DEFAULT] / speeds[EXACT]:.2f}x"


def _speed_of_methods() -> str:
    timings = {
        timing.method: timing for timing in read_timings() if (timing.length, timing.data) == (_LENGTH, SYNTHETIC)
    }
    names = {TO_THE_LETTER: "muse:paper, its exact method"}
    found = [
        f"{names.get(method, method)} {timings[method].speedup:.2f}x with an RSE of {timings[method].error:.2g}"
        for method in (TO_THE_LETTER, PAPER, MOBA, BLOCK_DIAGONAL)
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
