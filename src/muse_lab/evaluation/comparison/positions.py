"""Loss by position: differences of runs to their reference, and, as in the paper's Figure 6, during training.

Bins are between powers of two, so the size of a block, from which on MuSe approximates, is the edge of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from muse_lab.evaluation.comparison.findings import reference_of
from muse_lab.evaluation.comparison.results import ComparisonResults, Run
from muse_lab.evaluation.comparison.seeds import Seeds, seeds_of
from muse_lab.evaluation.loss.loss_report import span
from muse_lab.records.attention_names import EXACT, block_size_of, short_names
from muse_lab.records.means import Mean
from muse_lab.report.plots import GREY, PALETTE, Axis, Curve, Line, Rule, line_figure, shades
from muse_lab.report.tree import Figure, Section, Table, number, text

_NEAR = 10
"""The bin from position 1024 on."""
_SMALLEST_PART = 128
"""A bin with less than one in this many of the tokens is noise, and is left out of the picture of differences."""
_POSITION = Axis("position, up to", log=2, is_size=True)
_ABOUT = "The first table is under exact attention: the loss itself, not its cumulative mean, between powers of two."
_DIFFERENCES = (
    "The picture of differences is under exact attention too, without the first positions, which have too few tokens."
)
_OWN = (
    "Tables of a run's own attention less exact have the loss under the attention that the run was trained with, less "
    "that under exact attention, of the same weights."
)
_WHILE_TRAINING = (
    "In pictures of one run, solid lines are under the attention it was trained with, dashed ones under exact "
    "attention. The paper's Figure 6 is of five checkpoints; its values and bins are not printed."
)


def positions_section(results: ComparisonResults) -> Section:
    differences, histories = difference_figures(results), history_figures(results)
    own_tables = own_attention_tables(results)
    notes = [_ABOUT]
    if differences:
        notes.append(_DIFFERENCES)
    if own_tables:
        notes.append(_OWN)
    if own_tables and histories:
        notes.append(_WHILE_TRAINING)
    tables = [positions_table(results), *context_tables(results), *own_tables]
    return Section("Loss by position", *notes, *differences, *histories, *tables)


def positions_table(results: ComparisonResults) -> Table:
    """The loss of references between powers of two of the position, and what the other runs add to it.

    A run whose reference is not measured yet has its own loss.
    """
    columns: dict[str, list[str]] = {}
    for run in results.runs.values():
        if gaps := _gaps_by_position(results, run):
            columns[_less_reference(results, run)] = _signed(gaps)
        elif losses := losses_by_position(results, run):
            columns[run.name] = [f"{loss:.4f}" for _, loss in losses]
    return _by_position(results, columns)


def losses_by_position(
    results: ComparisonResults, run: Run, step: int | None = None, attention: str = EXACT
) -> list[tuple[float, float]]:
    """(last position, mean loss) of every bin; none where it is not measured."""
    cell = results.whole(run, attention, step)
    if cell is None:
        return []
    lasts = itertools.accumulate(cell.sizes)
    return [(float(last), mean.mean) for last, mean in zip(lasts, cell.by_position, strict=True)]


def difference_figures(results: ComparisonResults) -> list[Figure]:
    """One figure of all runs that have a reference."""
    curves = differences_by_position(results)
    if not curves:
        return []
    coloured = zip(curves, itertools.cycle(PALETTE), strict=False)
    lines = [Line(name, curve, colour, ".") for (name, curve), colour in coloured]
    title, y = "Loss by position, less that of the reference", Axis("held-out loss, difference (nats)")
    return [line_figure("positions", title, lines, _POSITION, y, rules=[Rule("the reference", 0, GREY)])]


def differences_by_position(results: ComparisonResults) -> list[tuple[str, Curve]]:
    """A curve for every run that has a reference, under exact attention, without the first bins: they hold few tokens.

    Runs that differ by their seed share a mean curve; they have none if a seed has no exact training.
    """
    groups = seeds_of(results) or [Seeds(run.attention, (run,)) for run in results.runs.values()]
    names = short_names([group.attention for group in groups])
    curves = []
    for group in groups:
        gaps = [_gaps_by_position(results, run)[_first_drawn(results) :] for run in group.runs]
        if len(gaps) == 1 and gaps[0]:
            curves.append((_less_reference(results, group.runs[0]), gaps[0]))
        elif len(gaps) > 1 and group.difference(results) is not None:
            curves.append((f"{group.named(names)}: {len(gaps)} seeds, less exact", _mean_curve(gaps)))
    return curves


def history_figures(results: ComparisonResults) -> list[Figure]:
    """One for each run with earlier checkpoints, or for every run if none is compared with another.

    A line for every checkpoint and attention, the last one the darkest.
    """
    is_compared = any(_gaps_by_position(results, run) for run in results.runs.values())
    figures = []
    for place, run in enumerate(results.runs.values(), start=1):
        steps = results.steps(run)
        if is_compared and len(steps) < 2:
            continue
        lines: list[Line] = []
        for step, shade in zip(steps, shades(len(steps)), strict=True):
            own = [] if run.attention == EXACT else losses_by_position(results, run, step, run.tested_attention)
            exact = losses_by_position(results, run, step)
            if own:
                lines.append(Line(f"{step:,} updates", own, shade, "."))
            lines.append(
                Line(f"{step:,}, exact" if own else f"{step:,} updates", exact, shade, ".", "--" if own else "-")
            )
        lines = [line for line in lines if line.points]
        if lines:
            title, y = f"Loss by position: {run.name}", Axis("held-out loss (nats)")
            figures.append(line_figure(f"positions-{place}", title, lines, _POSITION, y, rules=_block(results, run)))
    return figures


def own_attention_tables(results: ComparisonResults) -> list[Table]:
    """What a run's own attention adds to its loss, by position, at every checkpoint that was measured under both.

    Runs with earlier checkpoints have a table each, the others share one.
    """
    finished: dict[str, list[str]] = {}
    tables = []
    for run in results.runs.values():
        steps = [] if run.attention == EXACT else results.steps(run)
        steps = [step for step in steps if results.whole(run, run.tested_attention, step)]
        if len(steps) > 1:
            columns = {f"{step:,} updates": _own_gaps(results, run, step) for step in steps}
            tables.append(_by_position(results, columns, f"{run.name}: its own attention less exact"))
        elif steps:
            finished[run.name] = _own_gaps(results, run, steps[0])
    together = "Each run's own attention less exact"
    return [*([_by_position(results, finished, together)] if finished else []), *tables]


def context_tables(results: ComparisonResults) -> list[Table]:
    """How much lower the loss is at the end of the context than between positions 1k and 2k, of every finished model.

    It shows whether distant context helps a model at all: if not, attentions cannot be told apart.
    """
    rows = []
    for run in results.runs.values():
        cell = results.whole(run, EXACT)
        if cell is None or len(cell.sizes) <= _NEAR + 1:
            continue
        near, far = ([losses[place] for losses in cell.bins] for place in (_NEAR, -1))
        gap = Mean.of_differences(far, near)
        rows.append((run.name, str(Mean.of(near)), str(Mean.of(far)), gap.signed()))
    if not rows:
        return []
    spans = _spans(results)
    titles = [spans[_NEAR], spans[-1], "difference"]
    return [Table([text("run"), *map(number, titles)], rows, "What the far context is worth, tested: exact")]


def _gaps_by_position(results: ComparisonResults, run: Run) -> Curve:
    """Loss less that of the reference, under exact attention; empty for a reference, or if one is not measured."""
    reference = reference_of(results, run)
    own, other = losses_by_position(results, run), losses_by_position(results, reference)
    if reference is run or not own or not other:
        return []
    return _less(own, other)


def _less_reference(results: ComparisonResults, run: Run) -> str:
    return f"{run.name} less {reference_of(results, run).name}"


def _own_gaps(results: ComparisonResults, run: Run, step: int) -> list[str]:
    own = losses_by_position(results, run, step, run.tested_attention)
    return _signed(_less(own, losses_by_position(results, run, step)))


def _less(one: Curve, other: Curve) -> Curve:
    return [(last, loss - of_other) for (last, loss), (_, of_other) in zip(one, other, strict=True)]


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    return [(points[0][0], Mean.of([value for _, value in points]).mean) for points in zip(*curves, strict=True)]


def _signed(gaps: Curve) -> list[str]:
    return [f"{gap:+.4f}" for _, gap in gaps]


def _by_position(results: ComparisonResults, columns: dict[str, list[str]], title: str = "") -> Table:
    return Table(map(number, ("positions", *columns)), zip(_spans(results), *columns.values(), strict=True), title)


def _sizes(results: ComparisonResults) -> list[int]:
    return next((cell.sizes for cell in results.cells), [])


def _spans(results: ComparisonResults) -> list[str]:
    sizes = _sizes(results)
    return [span(last - size + 1, last) for last, size in zip(itertools.accumulate(sizes), sizes, strict=True)]


def _first_drawn(results: ComparisonResults) -> int:
    sizes = _sizes(results)
    return next((place for place, size in enumerate(sizes) if size * _SMALLEST_PART >= sum(sizes)), 0)


def _block(results: ComparisonResults, run: Run) -> list[Rule]:
    """A rule at the end of the first block, up to which MuSe is exact."""
    size = block_size_of(run.attention)
    if size is None or size >= results.settings.length:
        return []
    return [Rule("first block", size, GREY, is_vertical=True)]
