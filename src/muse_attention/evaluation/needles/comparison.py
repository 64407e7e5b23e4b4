"""The report of several models on the same needles: how many each finds, by kind and by depth, and how they differ.

Models that were trained with different attentions are the rows of the paper's table of needles; here they are columns,
with the attention that reads the prompt beside each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from muse_attention.evaluation.attentions import names_table, short_names
from muse_attention.evaluation.means import WILSON
from muse_attention.evaluation.needles.report import (
    ALL_KINDS,
    DEFINITIONS,
    EXACT,
    MEASURES,
    PREFILL,
    TASK,
    columns_by_length,
    format_difference,
    heat_maps,
    paper_section,
    table_by_depth,
    title_of,
    with_number,
)
from muse_attention.evaluation.needles.results import NeedleResults
from muse_attention.evaluation.needles.samples import KINDS, depth_of
from muse_attention.evaluation.needles.scores import Answer
from muse_attention.evaluation.needles.statistics import (
    answers,
    attentions,
    by_depth,
    by_sample,
    difference,
    failures,
    groups,
    share,
)
from muse_attention.machine import machine_lines
from muse_attention.markup import csv_text
from muse_attention.report.tree import Card, Figure, Provenance, Report, Section, Table, number, text

Models = Mapping[str, NeedleResults]
"""Their results by their names. The first one is what the others are compared with."""

_DIFFERENCES = (
    "Differences are in percentage points on the samples that both models have answered, ± their standard error over "
    "samples. Seed-to-seed variance of training is not included."
)


def have_same_questions(results: NeedleResults, other: NeedleResults) -> bool:
    """Whether both were asked for the same needles in the same haystack, and both have an answer to one of them."""
    for name in ("haystack", "seed", "version"):
        if getattr(results.settings, name) != getattr(other.settings, name):
            return False
    own, others = _uids(results), _uids(other)
    asked = own.keys() & others.keys()
    return bool(asked) and all(own[sample] == others[sample] for sample in asked)


def needle_comparison(models: Models) -> Report:
    first = next(iter(models.values())).settings
    lines = [f"Haystack: {first.haystack}; seed {first.seed}"]
    for name, results in models.items():
        settings = results.settings
        hardware, versions = machine_lines(results.machine)
        lines.append(f"{name}: {settings.model}, {settings.dtype}, on {settings.device}; {hardware}; {versions}")
    asked = [cell for cell in _cells(models) if cell[2] == EXACT] or _cells(models)
    read = f"read by {asked[0][2] if asked[0][2] == EXACT else 'any'} attention"
    best = {
        name: share([answer for cell in asked for answer in answers(results, *cell)], MEASURES["exact match"])
        for name, results in models.items()
    }
    return Report(
        f"Needles compared: {', '.join(models)}",
        verdict=[
            "; ".join(f"{name} finds {of_model}" for name, of_model in best.items() if of_model)
            + f" of the needles, the prompt {read}.",
            WILSON,
            *(
                f"Failed of {name}: {len(failed)} of {len(results.outcomes)} samples, which count in no share"
                for name, results in models.items()
                if (failed := failures(results))
            ),
        ],
        cards=[
            Card(f"exact match, {name}", f"{100 * of_model.value:.1f}%", f"{read}, n = {of_model.number}")
            for name, of_model in best.items()
            if of_model
        ][:6],
        sections=[
            *(
                Section(
                    name.capitalize(),
                    [TASK] if place == 0 else [],
                    tables=list(summary_tables(models, name)),
                    notes=[_DIFFERENCES, PREFILL] if place == 0 else [],
                )
                for place, name in enumerate(MEASURES)
            ),
            *(
                Section(
                    f"{name} by depth".capitalize(),
                    figures=_heat_maps(models, name),
                    tables=list(depth_tables(models, name)),
                )
                for name in MEASURES
            ),
            paper_section(),
        ],
        names=names_table(_named(models)),
        provenance=Provenance(lines, [command for results in models.values() for command in results.commands]),
        csv=as_csv(models),
    )


def summary_tables(models: Models, name: str) -> Iterator[Table]:
    """One for each attention that reads the prompt; exact attention, which is deployed, first."""
    first, *others = models
    columns = [text("kind, length"), *(number(model, DEFINITIONS[name]) for model in models)]
    columns += [number(f"{other} less {first}", _DIFFERENCES) for other in others]
    cells, short = _cells(models), short_names(_named(models))
    for attention in dict.fromkeys(attention for _, _, attention in cells):
        rows = []
        of_attention = [(length, kind) for length, kind, name in cells if name == attention]
        for length in dict.fromkeys(length for length, _ in of_attention):
            kinds = [kind for tokens, kind in of_attention if tokens == length]
            for panel, together in _panels(models, length, kinds, [attention]).items():
                found = [_pooled(results, length, together, attention) for results in models.values()]
                shares = (with_number(share(of_model, MEASURES[name])) for of_model in found)
                gaps = [""] * len(others)  # samples of several kinds have not as many questions each
                if len(together) == 1:
                    samples = {one: by_sample(models[one], length, together[0], attention) for one in models}
                    gaps = [
                        format_difference(difference(samples[one], samples[first], MEASURES[name])) for one in others
                    ]
                rows.append((title_of(length, panel), *shares, *gaps))
        yield Table(columns, rows, f"the prompt read by {short[attention]}")


def depth_tables(models: Models, name: str) -> Iterator[Table]:
    """Of all kinds together and of each. A column is a model, and the attention that reads the prompt."""
    cells, short = _cells(models), short_names(_named(models))
    for length in sorted({length for length, _, _ in cells}):
        names = list(dict.fromkeys(attention for tokens, _, attention in cells if tokens == length))
        kinds = list(dict.fromkeys(kind for tokens, kind, _ in cells if tokens == length))
        for panel, together in _panels(models, length, kinds, names).items():
            columns: dict[str, Sequence[Answer]] = {
                f"{model}, read by {short[attention]}": _pooled(results, length, together, attention)
                for attention in names
                for model, results in models.items()
            }
            yield table_by_depth(columns, name, title_of(length, panel))


def _heat_maps(models: Models, name: str) -> list[Figure]:
    cells, short = _cells(models), short_names(_named(models))
    panels = {}
    for attention in dict.fromkeys(attention for _, _, attention in cells):
        for model, results in models.items():
            mine = [(length, kind) for length, kind, one in cells if one == attention]
            panels[f"{model}, read by {short[attention]}"] = {
                column: by_depth([a for group in together for a in answers(results, *group, attention)], MEASURES[name])
                for column, together in columns_by_length(mine).items()
            }
    return heat_maps(panels, name)


def as_csv(models: Models) -> str:
    """A line for every model, attention, length, kind and depth."""
    rows = []
    for length, kind, attention in _cells(models):
        for name, results in models.items():
            found = answers(results, length, kind, attention)
            for measured, measure in MEASURES.items():
                for bucket, of_depth in enumerate(by_depth(found, measure)):
                    if of_depth is not None:
                        numbers = (of_depth.standard_error, *of_depth.interval)
                        about = [name, attention, length, kind, f"{depth_of(bucket):.2f}", measured]
                        rows.append([*about, f"{of_depth.value:.5g}", *(f"{number:.3g}" for number in numbers)])
    header = ["model", "attention", "length", "kind", "depth", "measure", "share", "standard_error", "low", "high"]
    return csv_text(header, rows)


def _named(models: Models) -> list[str]:
    return [attention for _, _, attention in _cells(models)]


def _cells(models: Models) -> list[tuple[int, str, str]]:
    """Every length, kind and attention that some model has; exact attention first."""
    found = {
        (length, kind, attention)
        for results in models.values()
        for length, kind in groups(results)
        for attention in attentions(results, length, kind)
    }
    kinds = list(KINDS)
    return sorted(found, key=lambda cell: (cell[2] != EXACT, cell[2], cell[0], kinds.index(cell[1])))


def _panels(models: Models, length: int, kinds: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """All kinds together, which are those that all models have under these attentions, and each by itself."""
    shared = [
        kind
        for kind in kinds
        if all(answers(results, length, kind, name) for results in models.values() for name in names)
    ]
    together = {ALL_KINDS: shared} if len(shared) > 1 else {}
    return together | {kind: [kind] for kind in kinds}


def _pooled(results: NeedleResults, length: int, kinds: Sequence[str], attention: str) -> list[Answer]:
    return [answer for kind in kinds for answer in answers(results, length, kind, attention)]


def _uids(results: NeedleResults) -> dict[tuple[int, str, int, int], list[str]]:
    return {
        (task.length, task.kind, task.bucket, task.number): [answer.uid for answer in outcome.answers]
        for task, outcome in results.outcomes.items()
        if outcome.answers
    }
