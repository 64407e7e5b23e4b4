"""The report of several models on the same needles: how many each finds, by kind and by depth, and how they differ.

Models that were trained with different attentions are the rows of the paper's table of needles; here they are columns,
in a table for each attention that reads the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from muse_lab.evaluation.needles import panels
from muse_lab.evaluation.needles.needle_report import PREFILL, TASK, format_difference, paper_section
from muse_lab.evaluation.needles.results import NeedleResults
from muse_lab.evaluation.needles.scores import Answer
from muse_lab.evaluation.needles.statistics import Asked, Group, by_depth, difference, share
from muse_lab.pretraining.needles.samples import BUCKETS, depth_of
from muse_lab.records.attention_names import EXACT, short_names
from muse_lab.records.machine import machine_lines
from muse_lab.records.means import WILSON
from muse_lab.report.plots import Curve
from muse_lab.report.provenance import names_table
from muse_lab.report.tree import Figure, Note, Provenance, Report, Section, Table, number, text

Models = Mapping[str, NeedleResults]
"""Their results by their names. The first one is what the others are compared with."""

_DIFFERENCES = Note(
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


def reference_first(models: Models) -> dict[str, NeedleResults]:
    """The models, first the one that others are compared with: the one named exact, or the first by name."""
    return dict(sorted(models.items(), key=lambda named: (named[0] != EXACT, named[0])))


def needle_comparison(models: Models) -> Report:
    _, haystack = next(iter(models.values())).settings.facts
    lines = [haystack]
    for name, results in models.items():
        settings = results.settings
        hardware, versions = machine_lines(results.machine)
        lines.append(f"{name}: {settings.model}, {settings.dtype}, on {settings.device}; {hardware}; {versions}")
    short = short_names(_named(models))
    read_by = next(iter(short))
    first_read = {name: Asked(results, read_by) for name, results in models.items()}
    return Report(
        f"Needles compared: {', '.join(models)}",
        verdict=[
            panels.found_in_words(first_read),
            f"The prompt is read by {short[read_by]}. {WILSON}",
            *panels.failed_in_words(models),
        ],
        cards=panels.cards(first_read),
        sections=[
            *(
                Section(name.capitalize(), *summary_tables(models, name), Note(panels.DEFINITIONS[name]), *words)
                for name, words in zip(panels.MEASURES, ((TASK, _DIFFERENCES, PREFILL), ()), strict=True)
            ),
            *(
                Section(f"{name} by depth".capitalize(), *pictures, *tables_by_depth(models, name))
                for name, pictures in zip(panels.MEASURES, (depth_curves(models), ()), strict=True)
            ),
            paper_section(),
        ],
        names=names_table(_named(models)),
        provenance=Provenance(lines, [command for results in models.values() for command in results.commands]),
    )


def summary_tables(models: Models, name: str) -> Iterator[Table]:
    """A table for each attention that reads the prompt; exact attention, which is deployed, comes first."""
    (first, *others), measure = models, panels.MEASURES[name]
    columns = [text("kind, length"), *map(number, models)]
    columns += [number(f"{other} less {first}") for other in others]
    short = short_names(_named(models))
    for attention in _named(models):
        asked = {model: Asked(results, attention) for model, results in models.items()}
        rows = []
        for panel in panels.panels_of(asked):
            for kind, together in panel.by_kind.items():
                shares = (panels.with_number(share(one.answers(together), measure)) for one in asked.values())
                gaps = (difference(asked[one], asked[first], together, measure) for one in others)
                rows.append((panels.title_of(panel.length, kind), *shares, *map(format_difference, gaps)))
        yield Table(columns, rows, f"the prompt read by {short[attention]}")


def tables_by_depth(models: Models, name: str) -> Iterator[Table]:
    """A table for each length and attention that reads the prompt, all kinds together: one kind has few at a depth."""
    measure = panels.MEASURES[name]
    for title, asked, together in _kinds_together(models):
        (first, *others), shares = asked, panels.depth_table(asked, together, name)
        gaps = (
            [difference(asked[other], asked[first], together, measure, bucket=bucket) for other in others]
            for bucket in range(BUCKETS)
        )
        rows = [(*row, *map(format_difference, at_depth)) for row, at_depth in zip(shares.rows, gaps, strict=True)]
        yield Table([*shares.columns, *(number(f"{other} less {first}") for other in others)], rows, title)


def depth_curves(models: Models) -> Iterator[Figure]:
    """Exact match against depth, a line for each model; a picture for each length and attention that reads prompts."""
    for place, (title, asked, together) in enumerate(_kinds_together(models), start=1):
        curves = {model: _by_depth(one.answers(together)) for model, one in asked.items()}
        yield panels.depth_figure(place, title, curves)


def _kinds_together(models: Models) -> Iterator[tuple[str, Mapping[str, Asked], list[Group]]]:
    """For each attention that reads prompts and each length: a title, the models, and what all of them were asked."""
    short = short_names(_named(models))
    for attention in _named(models):
        asked = {model: Asked(results, attention) for model, results in models.items()}
        for panel in panels.panels_of(asked):
            title, together = panel.together
            yield f"{title}, the prompt read by {short[attention]}", panel.columns, together


def _by_depth(answers: Sequence[Answer]) -> Curve:
    shares = enumerate(by_depth(answers, panels.MEASURES[panels.EXACT_MATCH]))
    return [(depth_of(bucket), depth_share.value) for bucket, depth_share in shares if depth_share is not None]


def _named(models: Models) -> list[str]:
    """The attentions that read prompts for some model; exact attention first."""
    attentions = {name for results in models.values() for name in results.named}
    return sorted(attentions, key=lambda name: (name != EXACT, name))


def _uids(results: NeedleResults) -> dict[tuple[int, str, int, int], list[str]]:
    return {
        (task.length, task.kind, task.bucket, task.number): [answer.uid for answer in outcome.answers]
        for task, outcome in results.measured.items()
        if outcome.answers
    }
