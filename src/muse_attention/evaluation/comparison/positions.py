"""Loss by position while a run trains, under exact attention and under its own, as in the paper's Figure 6.

Bins are between powers of two, so the size of a block, from which on MuSe approximates, is the edge of one.
"""

from __future__ import annotations

from collections.abc import Sequence

from muse_attention.attention_names import muse_config
from muse_attention.evaluation.comparison.results import ComparisonResults, Run
from muse_attention.evaluation.loss.report import span
from muse_attention.evaluation.means import Mean
from muse_attention.plots import GREY, Axis, Line, Rule, shades
from muse_attention.pretraining.schedule import EXACT
from muse_attention.report.figures import line_figure
from muse_attention.report.tree import Figure, Table, number, text

_NEAR = 10
"""The bin from position 1024 on."""
OWN = (
    "Under the attention that the run was trained with (solid lines of the pictures), less under exact attention "
    "(dashed), of the same weights. The paper's Figure 6 is of five checkpoints; its values and bins are not printed."
)


def losses_by_position(
    results: ComparisonResults, run: Run, step: int | None = None, attention: str = EXACT
) -> list[tuple[float, float]]:
    """(last position, mean loss) of every bin; none where it is not measured."""
    cell = results.whole(run, attention, step)
    if cell is None:
        return []
    last = 0
    found = []
    for size, mean in zip(cell.sizes, cell.by_position, strict=True):
        last += size
        found.append((float(last), mean.mean))
    return found


def position_figures(results: ComparisonResults) -> list[Figure]:
    """One for each run: a line for every checkpoint and attention, the last one the darkest."""
    figures = []
    for place, run in enumerate(results.runs.values(), start=1):
        steps = results.steps(run)
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
            x, y = Axis("position, up to", log=2, is_size=True), Axis("held-out loss (nats)")
            title = f"Loss by position: {run.name}"
            figures.append(line_figure(f"positions-{place}", title, lines, x, y, rules=_block(results, run)))
    return figures


def own_attention_tables(results: ComparisonResults) -> list[Table]:
    """What a run's own attention adds to its loss, by position, at every checkpoint that was measured under both."""
    tables = []
    for run in results.runs.values():
        steps = [step for step in results.steps(run) if run.attention != EXACT]
        steps = [step for step in steps if results.whole(run, run.tested_attention, step)]
        if steps:
            tables.append(_gaps(results, run, steps))
    return tables


def context_tables(results: ComparisonResults) -> list[Table]:
    """How much lower the loss is at the end of the context than between positions 1k and 2k, of every finished model.

    It says whether what is far away helps a model at all: without that, no attention can be told from another.
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
    sizes = results.cells[0].sizes
    titles = [span(1 << _NEAR, (2 << _NEAR) - 1), span(sum(sizes) - sizes[-1] + 1, sum(sizes)), "difference"]
    return [Table([text("run"), *map(number, titles)], rows, "What the far context is worth, tested: exact")]


def _gaps(results: ComparisonResults, run: Run, steps: Sequence[int]) -> Table:
    columns = [
        (losses_by_position(results, run, step, run.tested_attention), losses_by_position(results, run, step))
        for step in steps
    ]
    rows = []
    first = 1
    for place, (last, _) in enumerate(columns[0][0]):
        gaps = (f"{own[place][1] - exact[place][1]:+.4f}" for own, exact in columns)
        rows.append((span(first, int(last)), *gaps))
        first = int(last) + 1
    titles = ("positions", *(f"{step:,} updates" for step in steps))
    return Table(map(number, titles), rows, f"{run.name}: its own attention less exact")


def _block(results: ComparisonResults, run: Run) -> list[Rule]:
    """Where the first block ends, up to which MuSe is exact."""
    config = muse_config(run.attention)
    if config is None or config.block_size >= results.settings.length:
        return []
    return [Rule("first block", config.block_size, GREY, is_vertical=True)]
