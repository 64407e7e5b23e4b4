"""Several models on the same needles: how many each finds, by kind and by depth, and by how much they differ.

Models that were trained with different attentions are the rows of the paper's table of needles; here they are columns,
with the attention that reads the prompt beside each.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

from muse_attention.evaluation.needles.report import (
    ALL_KINDS,
    MEASURES,
    PAPER_IN_WORDS,
    PREFILL,
    TASK,
    depth_curve,
    format_difference,
    paper_table,
    show_by_depth,
    show_paper,
    table_by_depth,
    title_of,
    with_number,
)
from muse_attention.evaluation.needles.results import Results
from muse_attention.evaluation.needles.samples import CANDIDATES, KINDS
from muse_attention.evaluation.needles.scores import Answer
from muse_attention.evaluation.needles.statistics import (
    Measure,
    answers,
    attentions,
    by_sample,
    difference,
    failures,
    groups,
    share,
)
from muse_attention.evaluation.page import Page, Table
from muse_attention.machine import machine_lines
from muse_attention.markup import csv_text, markdown_line, markdown_list, markdown_table

Models = Mapping[str, Results]
"""Their results by their names. The first one is what the others are compared with."""

_MEASURED = (
    f"Exact match: greedy generation gives the uid. Right of {CANDIDATES}: the uid is more probable than each of seven "
    "others, so chance is 12.5%. ± is the binomial standard error of so many questions, as in the paper, which is 0 "
    "where all are right or none is, and takes the questions of one sample for independent. Differences are in "
    "percentage points on the samples that both models have answered, ± their standard error over samples. What "
    "another seed of training would change is in no standard error."
)


def have_same_questions(results: Results, other: Results) -> bool:
    """Whether both were asked for the same needles in the same haystack, and both have an answer to one of them."""
    for name in ("haystack", "seed", "version"):
        if getattr(results.settings, name) != getattr(other.settings, name):
            return False
    own, others = _uids(results), _uids(other)
    asked = own.keys() & others.keys()
    return bool(asked) and all(own[sample] == others[sample] for sample in asked)


def summary_tables(models: Models, measure: Measure) -> Iterator[tuple[str, Table]]:
    """One for each attention that reads the prompt, by title; exact attention, which is deployed, first."""
    first, *others = models
    header = ("kind, length", *models, *(f"{name} less {first}" for name in others))
    cells = _cells(models)
    for attention in dict.fromkeys(attention for _, _, attention in cells):
        rows = []
        of_attention = [(length, kind) for length, kind, name in cells if name == attention]
        for length in dict.fromkeys(length for length, _ in of_attention):
            kinds = [kind for tokens, kind in of_attention if tokens == length]
            for panel, together in _panels(models, length, kinds, [attention]).items():
                found = [_pooled(results, length, together, attention) for results in models.values()]
                shares = (with_number(share(of_model, measure)) for of_model in found)
                gaps = [""] * len(others)  # samples of several kinds have not as many questions each
                if len(together) == 1:
                    samples = {name: by_sample(models[name], length, together[0], attention) for name in models}
                    gaps = [format_difference(difference(samples[name], samples[first], measure)) for name in others]
                rows.append((title_of(length, panel), *shares, *gaps))
        yield _read_by(attention), (header, rows)


def depth_tables(models: Models, measure: Measure) -> Iterator[tuple[str, Table]]:
    """Of all kinds together and of each, by title. A column is a model, and the attention that reads the prompt."""
    for title, columns in _columns(models):
        yield title, table_by_depth(columns, measure)


def depth_curves(models: Models, measure: Measure) -> dict[str, dict[str, list[tuple[float, float, float]]]]:
    return {
        title: {name: depth_curve(found, measure) for name, found in columns.items()}
        for title, columns in _columns(models)
    }


def column_of(model: str, attention: str) -> str:
    """What the answers of a model to prompts that an attention has read are called."""
    return f"{model}, {_read_by(attention)}"


def markdown_report(models: Models, *, title: str) -> str:
    parts = [f"# {markdown_line(title)}", markdown_list(_facts(models)), TASK]
    for name, measure in MEASURES.items():
        for panel, table in summary_tables(models, measure):
            heading = f"{name.capitalize()}, the prompt {panel}"
            parts += [f"## {markdown_line(heading)}", markdown_table(*table)]
    parts += [_MEASURED, PREFILL]
    for name, measure in MEASURES.items():
        for panel, table in depth_tables(models, measure):
            parts += [f"## {markdown_line(f'{name}: {panel}')}", markdown_table(*table)]
    parts += ["## The paper", markdown_table(*paper_table()), PAPER_IN_WORDS]
    return "\n\n".join(parts) + "\n"


def html_report(models: Models, *, title: str, pictures: Mapping[str, bytes]) -> str:
    """`pictures` are those there are, by the name of the measure."""
    page = Page(title)
    for fact in _facts(models):
        page.paragraph(fact, is_note=True)
    page.paragraph(TASK)
    for name, measure in MEASURES.items():
        page.section(name.capitalize())
        page.tables_beside(*((f"the prompt {panel}", *table) for panel, table in summary_tables(models, measure)))
    for note in (_MEASURED, PREFILL):
        page.paragraph(note, is_note=True)
    show_by_depth(page, functools.partial(depth_tables, models), pictures)
    show_paper(page)
    return page.html()


def as_csv(models: Models) -> str:
    """A line for every model, attention, length, kind and depth."""
    rows = []
    for length, kind, attention in _cells(models):
        for name, results in models.items():
            found = answers(results, length, kind, attention)
            for measured, measure in MEASURES.items():
                for depth, value, error in depth_curve(found, measure):
                    cells = [name, attention, length, kind, f"{depth:.2f}", measured]
                    rows.append([*cells, f"{value:.5g}", f"{error:.3g}"])
    return csv_text(["model", "attention", "length", "kind", "depth", "measure", "share", "standard_error"], rows)


def _cells(models: Models) -> list[tuple[int, str, str]]:
    """Every length, kind and attention that some model has; exact attention first."""
    found = {
        (length, kind, attention)
        for results in models.values()
        for length, kind in groups(results)
        for attention in attentions(results, length, kind)
    }
    kinds = list(KINDS)
    return sorted(found, key=lambda cell: (cell[2] != "exact", cell[2], cell[0], kinds.index(cell[1])))


def _columns(models: Models) -> Iterator[tuple[str, dict[str, Sequence[Answer]]]]:
    """Answers by title and column."""
    cells = _cells(models)
    for length in sorted({length for length, _, _ in cells}):
        names = list(dict.fromkeys(attention for tokens, _, attention in cells if tokens == length))
        kinds = list(dict.fromkeys(kind for tokens, kind, _ in cells if tokens == length))
        for panel, together in _panels(models, length, kinds, names).items():
            columns: dict[str, Sequence[Answer]] = {
                column_of(model, attention): _pooled(results, length, together, attention)
                for attention in names
                for model, results in models.items()
            }
            yield title_of(length, panel), columns


def _panels(models: Models, length: int, kinds: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """All kinds together, which are those that all models have under these attentions, and each by itself."""
    shared = [
        kind
        for kind in kinds
        if all(answers(results, length, kind, name) for results in models.values() for name in names)
    ]
    together = {ALL_KINDS: shared} if len(shared) > 1 else {}
    return together | {kind: [kind] for kind in kinds}


def _pooled(results: Results, length: int, kinds: Sequence[str], attention: str) -> list[Answer]:
    return [answer for kind in kinds for answer in answers(results, length, kind, attention)]


def _read_by(attention: str) -> str:
    return f"read by {attention}"


def _uids(results: Results) -> dict[tuple[int, str, int, int], list[str]]:
    return {
        (task.length, task.kind, task.bucket, task.number): [answer.uid for answer in outcome.answers]
        for task, outcome in results.outcomes.items()
        if outcome.answers
    }


def _facts(models: Models) -> list[str]:
    first = next(iter(models.values())).settings
    lines = [f"Haystack: {first.haystack}; seed {first.seed}"]
    for name, results in models.items():
        if failed := failures(results):
            lines.append(f"Failed of {name}: {len(failed)} of {len(results.outcomes)} samples, which count in no share")
    for name, results in models.items():
        settings = results.settings
        hardware, versions = machine_lines(results.machine)
        lines.append(f"{name}: {settings.model}, {settings.dtype}, on {settings.device}; {hardware}; {versions}")
    return lines
