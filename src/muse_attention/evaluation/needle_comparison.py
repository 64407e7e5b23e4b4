"""Several models on the same needles: how many each finds, by kind and by depth, and by how much they differ.

Models that were trained with different attentions are the rows of the paper's table of needles; here they are columns,
with the attention that reads the prompt beside each.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from muse_attention.evaluation.needle_report import (
    MEASURES,
    PAPER_IN_WORDS,
    PREFILL,
    TASK,
    depth_curve,
    depths_table,
    format_difference,
    paper_table,
    title_of,
    with_number,
)
from muse_attention.evaluation.needle_results import Results
from muse_attention.evaluation.needle_scores import Answer
from muse_attention.evaluation.needle_statistics import (
    Measure,
    answers,
    attentions,
    by_sample,
    difference,
    groups,
    share,
)
from muse_attention.evaluation.page import Page, Table, markdown_table
from muse_attention.machine import machine_lines
from muse_attention.sizes import format_size

Models = Mapping[str, Results]
"""Their results by their names. The first one is what the others are compared with."""

_MEASURED = (
    "Exact match: greedy generation gives the uid. Right of 8: the uid is more probable than each of seven others. "
    "± is the binomial standard error, as in the paper, of so many questions. Differences are in percentage points on "
    "the samples that both models have answered, ± their standard error over samples. What another seed of training "
    "would change is in no standard error."
)
_ALL_KINDS = "all kinds"


def have_same_questions(results: Results, other: Results) -> bool:
    """Whether both have answers to a question, and no uid differs where both have been asked."""
    own, others = _uids(results), _uids(other)
    asked = own.keys() & others.keys()
    return bool(asked) and all(own[sample] == others[sample] for sample in asked)


def summary_table(models: Models, measure: Measure) -> Table:
    first, *others = models
    header = ("prompt read by", "length", "kind", *models, *(f"{name} less {first}" for name in others))
    rows = []
    for length, kind, attention in _cells(models):
        found = {name: answers(results, length, kind, attention) for name, results in models.items()}
        samples = {name: by_sample(results, length, kind, attention) for name, results in models.items()}
        rows.append(
            (
                *(attention, format_size(length), kind),
                *(with_number(share(of_model, measure)) for of_model in found.values()),
                *(format_difference(difference(samples[name], samples[first], measure)) for name in others),
            )
        )
    return header, rows


def depth_tables(models: Models, measure: Measure) -> Iterator[tuple[str, Table]]:
    """Of all kinds together and of each, by title. A column is a model, and the attention that reads the prompt."""
    for title, columns in _columns(models):
        yield title, depths_table(columns, measure)


def depth_curves(models: Models, measure: Measure) -> dict[str, dict[str, list[tuple[float, float, float]]]]:
    return {
        title: {name: depth_curve(found, measure) for name, found in columns.items()}
        for title, columns in _columns(models)
    }


def markdown_report(models: Models, *, title: str) -> str:
    parts = [f"# {title}", "\n".join(f"- {line}" for line in _facts(models)), TASK]
    for name, measure in MEASURES.items():
        parts += [f"## {name.capitalize()}", markdown_table(*summary_table(models, measure))]
    parts += [_MEASURED, PREFILL]
    for name, measure in MEASURES.items():
        for panel, table in depth_tables(models, measure):
            parts += [f"## {name}: {panel}", markdown_table(*table)]
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
        page.table(*summary_table(models, measure))
    for note in (_MEASURED, PREFILL):
        page.paragraph(note, is_note=True)
    for name, measure in MEASURES.items():
        page.section(f"{name} by depth".capitalize())
        if name in pictures:
            page.picture(pictures[name], f"{name} against depth, one panel per kind and length, one curve per model")
        page.tables_beside(*((panel, *table) for panel, table in depth_tables(models, measure)))
    page.section("The paper")
    page.table(*paper_table())
    page.paragraph(PAPER_IN_WORDS, is_note=True)
    return page.html()


def as_csv(models: Models) -> str:
    """A line for every model, attention, length, kind and depth."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["model", "attention", "length", "kind", "depth", "measure", "share", "standard_error"])
    for length, kind, attention in _cells(models):
        for name, results in models.items():
            found = answers(results, length, kind, attention)
            for measured, measure in MEASURES.items():
                for depth, value, error in depth_curve(found, measure):
                    cells = [name, attention, length, kind, f"{depth:.2f}", measured]
                    writer.writerow([*cells, f"{value:.5g}", f"{error:.3g}"])
    return lines.getvalue()


def _cells(models: Models) -> list[tuple[int, str, str]]:
    """Every length, kind and attention that some model has; exact attention, which is deployed, first."""
    found = dict.fromkeys(
        (attention, length, kind)
        for results in models.values()
        for length, kind in groups(results)
        for attention in attentions(results, length, kind)
    )
    names = list(dict.fromkeys(attention for attention, _, _ in found))
    return [(length, kind, attention) for name in names for attention, length, kind in found if attention == name]


def _columns(models: Models) -> Iterator[tuple[str, dict[str, Sequence[Answer]]]]:
    cells = _cells(models)
    names = list(dict.fromkeys(attention for _, _, attention in cells))
    for length in sorted({length for length, _, _ in cells}):
        kinds = list(dict.fromkeys(kind for tokens, kind, _ in cells if tokens == length))
        panels = {_ALL_KINDS: kinds, **{kind: [kind] for kind in kinds}} if len(kinds) > 1 else {kinds[0]: kinds}
        for panel, together in panels.items():
            yield (
                title_of(length, panel),
                {
                    f"{name}, {attention}": list(
                        chain.from_iterable(answers(results, length, kind, attention) for kind in together)
                    )
                    for attention in names
                    for name, results in models.items()
                },
            )


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
        settings = results.settings
        hardware, versions = machine_lines(results.machine)
        lines.append(f"{name}: {settings.model}, {settings.dtype}, on {settings.device}; {hardware}; {versions}")
    return lines
