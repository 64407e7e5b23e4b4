"""The results of `muse compare` for people: one HTML page, Markdown, and CSV, with the paper's numbers beside."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from muse_attention.evaluation.attentions import full_name
from muse_attention.evaluation.comparison.findings import (
    SIZES_OF_A_LAW,
    Difference,
    difference,
    missing_sizes,
    reference_of,
    scaling_laws,
    sizes,
    speedup,
    switching,
    unlike,
    unlike_in_speed,
)
from muse_attention.evaluation.comparison.results import Results, Run
from muse_attention.evaluation.comparison.training_curves import UNSETTLED
from muse_attention.evaluation.loss.report import LEAK
from muse_attention.evaluation.means import Mean
from muse_attention.evaluation.page import Page, Table
from muse_attention.machine import machine_lines
from muse_attention.markup import csv_text, fenced, markdown_line, markdown_list, markdown_table
from muse_attention.pretraining.schedule import EXACT
from muse_attention.sizes import format_size

TRAINING, ANSWERS, POSITIONS, ERRORS, SCALING = "training", "answers", "positions", "errors", "scaling"
"""The pictures, by what their files are called."""

_MATRIX = (
    "Loss is the cross-entropy of the next token on held-out repositories, in nats, ± its standard error over samples, "
    "most of which is what the texts differ by. All models saw the same samples, so the difference between two has a "
    "standard error of its own, which is smaller. What another seed of training would change is in no "
    "standard error."
)
_SWITCHING = (
    "The loss of one and the same model under an attention, less its loss under exact attention: what a user gains or "
    "loses who trains with one and deploys the other."
)
_TOKENS = (
    "The paper trains on 20 tokens for each parameter. Differences between runs that saw far fewer say how models "
    "begin to learn, not where they end."
)
_SECONDS = (
    "Seconds are those of the updates alone, without checkpoints and pauses, on whatever machine trained the run; "
    "probes of the attention's error may count in runs from before 0.2.0. Tokens per second are medians; updates with "
    f"a probe and the first {UNSETTLED} after a change of the attention are left out."
)
_SPEED_OF_THE_PAPER = (
    "The paper's: 88.9k tokens/s with MuSe and 65.3k with cuDNN's exact attention, 1.36x, for the 1B model at 64k on "
    "8 A100."
)
_PROBE = (
    "The relative squared error of the training attention to exact attention, measured on the current batch while the "
    "model attends exactly, in every global layer."
)
_ANSWERS = (
    "Nats for each token of a uid in an import, in needle documents that are no samples of the run, under the "
    "attention of the update, which is exact in a tail. They are few, some hundred tokens, and the same each time. A "
    "model that cannot look a uid up where its function was defined has to guess it."
)
_POSITIONS = "Under exact attention: the loss itself, not its cumulative mean, between powers of two of the position."
_PAPER_LAW = "The paper's, from 185M to 1B parameters: loss in proportion to parameters^-0.17, R² above 0.999."


def runs_table(results: Results) -> Table:
    header = ("run", "trained with", "parameters", "updates", "tokens", "tokens per parameter", "weights")
    rows = [
        (
            run.name,
            f"{run.attention}{_tail(run)}",
            f"{run.parameters / 1e6:,.1f}M",
            f"{run.step:,}",
            f"{run.tokens:,}",
            f"{run.tokens / run.parameters:.2g}",
            "the finished model" if run.is_finished else f"its newest checkpoint, of {run.recipe.steps:,} updates",
        )
        for run in results.runs.values()
    ]
    return header, rows


def matrix_table(results: Results) -> Table:
    """Training attention against test attention, and the difference under exact attention."""
    attentions = results.attentions
    header = (
        "run",
        "trained with",
        *(f"tested: {name}" for name in attentions),
        "difference, tested: exact",
        "percent",
    )
    rows = []
    for run in results.runs.values():
        cells = [results.whole(run, name) for name in attentions]
        found = difference(results, run)
        rows.append(
            (
                run.name,
                run.attention,
                *("" if cell is None else str(Mean.of(cell.means)) for cell in cells),
                "" if found is None else found.nats.signed(),
                "" if found is None else _percent(found),
            )
        )
    return header, rows


def switching_table(results: Results) -> Table:
    others = [name for name in results.attentions if name != EXACT]
    rows = []
    for run in results.runs.values():
        found = [switching(results, run, name) for name in others]
        rows.append((run.name, *("" if gap is None else gap.signed() for gap in found)))
    return ("run", *others), rows


def speed_table(results: Results) -> Table:
    header = ("run", "attention of the update", "tokens/s", "updates", "speed-up over exact training", "all updates")
    rows = []
    for run in results.runs.values():
        ratio = speedup(results, run)
        for attention, speed in run.curves.speeds.items():
            is_its_own = attention == run.recipe.attention
            rows.append(
                (
                    run.name,
                    full_name(attention, run.recipe.length),
                    f"{speed.tokens_per_second:,.0f}",
                    f"{speed.updates:,}",
                    f"{ratio:.2f}x{_speed_remark(results, run)}" if is_its_own and ratio is not None else "",
                    str(datetime.timedelta(seconds=round(run.curves.seconds))) if is_its_own else "",
                )
            )
    return header, rows


def probe_table(results: Results) -> Table:
    """The first and the last measurement of each run, and the mean of all."""
    header = ("run", "attention", "measurements", "first", "last", "mean", "worst layer, last")
    rows = []
    for run in results.runs.values():
        probes = run.curves.probes
        if probes:
            worst, error = max(probes[-1].errors.items(), key=lambda layer: layer[1])
            means = [probe.mean for probe in probes]
            overall = sum(means) / len(means)
            numbers = (f"{means[0]:.2g}", f"{means[-1]:.2g}", f"{overall:.2g}")
            rows.append((run.name, run.attention, str(len(probes)), *numbers, f"{error:.2g} (layer {worst})"))
    return header, rows


def answers_table(results: Results) -> Table:
    """Of runs that learnt from needles."""
    header = ("run", "measured under", "measurements", "first", "middle", "last", "lowest")
    rows = []
    for run in results.runs.values():
        for attention, curve in answers_curves(run).items():
            losses = [loss for _, loss in curve]
            chosen = (losses[0], losses[(len(losses) - 1) // 2], losses[-1], min(losses))
            rows.append((run.name, attention, str(len(losses)), *(f"{loss:.3f}" for loss in chosen)))
    return header, rows


def answers_curves(run: Run) -> dict[str, list[tuple[float, float]]]:
    """(millions of tokens, loss) by the attention that it was measured under, by its full name."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for answers in run.curves.answers:
        name = full_name(answers.attention, run.recipe.length)
        curves.setdefault(name, []).append((answers.tokens / 1e6, answers.loss))
    return curves


def positions_table(results: Results) -> Table:
    """The loss of references between powers of two of the position, and what the other runs add to it.

    A run whose reference is not measured yet has its own loss.
    """
    runs = [run for run in results.runs.values() if results.whole(run, EXACT)]
    columns = {run.name: [loss for _, loss in losses_by_position(results, run)] for run in runs}
    references = {run.name: reference_of(results, run).name for run in runs}
    less = {name: other for name, other in references.items() if other != name and other in columns}
    header = ["positions", *(f"{name} less {less[name]}" if name in less else name for name in columns)]
    rows = []
    first = 1
    for number, size in enumerate(_sizes(results)):
        cells = [f"{first}" if size == 1 else f"{first} to {first + size - 1}"]
        for name, column in columns.items():
            if name in less:
                cells.append(f"{column[number] - columns[less[name]][number]:+.4f}")
            else:
                cells.append(f"{column[number]:.4f}")
        rows.append(cells)
        first += size
    return header, rows


def scaling_table(results: Results) -> Table:
    rows = [
        (
            attention,
            ", ".join(f"{parameters / 1e6:,.1f}M" for parameters, _ in found.points),
            f"{found.law.exponent:.3f}",
            f"{found.r_squared:.4f}",
        )
        for attention, found in scaling_laws(results).items()
    ]
    return ("trained with", "parameters", "exponent", "R²"), rows


def losses_by_position(results: Results, run: Run, step: int | None = None) -> list[tuple[float, float]]:
    """(last position, mean loss) of every bin, under exact attention; none where it is not measured."""
    cell = results.whole(run, EXACT, step)
    if cell is None:
        return []
    last = 0
    found = []
    for size, mean in zip(cell.sizes, cell.by_position, strict=True):
        last += size
        found.append((float(last), mean.mean))
    return found


def headline(results: Results) -> list[str]:
    """For every run but the references: its held-out loss under exact attention, and its speed, in words."""
    lines = []
    for run in results.runs.values():
        found = difference(results, run)
        if found is None:
            continue
        line = (
            f"{run.name}, trained with {run.attention}: held-out loss under exact attention within "
            f"{abs(found.percent.mean):.2f}% of {found.reference} ({_percent(found)})"
        )
        ratio = speedup(results, run)
        speed = "" if ratio is None else f", {ratio:.2f}x its tokens per second{_speed_remark(results, run)}"
        lines.append(f"{line}{speed}")
    return lines


def warnings(results: Results) -> list[str]:
    """What stands between these runs and a fair comparison."""
    lines = [
        f"{run.name} is not finished: its weights are those of update {run.step:,} of {run.recipe.steps:,}."
        for run in results.runs.values()
        if not run.is_finished
    ]
    for run in results.runs.values():
        if names := unlike(results, run):
            reference = reference_of(results, run).name
            lines.append(f"{run.name} differs from {reference} by more than its attention: {', '.join(names)}.")
    return lines


def markdown_report(results: Results, *, title: str) -> str:
    parts = [f"# {markdown_line(title)}", markdown_list(_facts(results)), fenced(results.commands)]
    if lines := [*headline(results), *warnings(results)]:
        parts.append(markdown_list(lines))
    parts += ["## Training attention against test attention", markdown_table(*matrix_table(results)), _MATRIX]
    parts += ["## Runs", markdown_table(*runs_table(results)), _TOKENS]
    parts += map(markdown_line, _beginnings(results))
    if _has_other_attentions(results):
        parts += ["## Switching the attention", markdown_table(*switching_table(results)), _SWITCHING, LEAK]
    parts += ["## Speed", markdown_table(*speed_table(results)), _SECONDS, _SPEED_OF_THE_PAPER]
    if probe_table(results)[1]:
        parts += ["## The attention's error in training", markdown_table(*probe_table(results)), _PROBE]
    if answers_table(results)[1]:
        parts += ["## Learning to look needles up", markdown_table(*answers_table(results)), _ANSWERS]
    parts += ["## Loss by position", markdown_table(*positions_table(results)), _POSITIONS]
    parts.append("## Scaling law")
    if scaling_laws(results):
        parts.append(markdown_table(*scaling_table(results)))
    parts += [*map(markdown_line, _missing_sizes(results)), _PAPER_LAW]
    return "\n\n".join(parts) + "\n"


def html_report(results: Results, *, title: str, pictures: Mapping[str, bytes]) -> str:
    """With those of the pictures that could be drawn, by name."""
    page = Page(title)
    for line in [*headline(results), *warnings(results)]:
        page.paragraph(line)
    for fact in _facts(results):
        page.paragraph(fact, is_note=True)
    page.code("\n".join(results.commands))

    def show(name: str, description: str) -> None:
        if name in pictures:
            page.picture(pictures[name], description)

    page.section("Training attention against test attention")
    page.table(*matrix_table(results))
    page.paragraph(_MATRIX, is_note=True)
    page.section("Runs")
    page.table(*runs_table(results))
    for note in (_TOKENS, *_beginnings(results)):
        page.paragraph(note, is_note=True)
    if _has_other_attentions(results):
        page.section("Switching the attention")
        page.table(*switching_table(results))
        for note in (_SWITCHING, LEAK):
            page.paragraph(note, is_note=True)
    page.section("Training")
    show(TRAINING, "Training loss against tokens and against seconds, one curve per run")
    page.paragraph(_smoothing(results), is_note=True)
    page.table(*speed_table(results))
    for note in (_SECONDS, _SPEED_OF_THE_PAPER):
        page.paragraph(note, is_note=True)
    if probe_table(results)[1]:
        page.section("The attention's error in training")
        show(ERRORS, "Relative squared error of every global layer against tokens, one panel per run")
        page.table(*probe_table(results))
        page.paragraph(_PROBE, is_note=True)
    if answers_table(results)[1]:
        page.section("Learning to look needles up")
        show(ANSWERS, "Loss of uids in imports against tokens, one curve per run")
        page.table(*answers_table(results))
        page.paragraph(_ANSWERS, is_note=True)
    page.section("Loss by position")
    show(POSITIONS, "Loss against position, one panel per run, one curve per checkpoint")
    page.table(*positions_table(results))
    page.paragraph(_POSITIONS, is_note=True)
    page.section("Scaling law")
    show(SCALING, "Loss against parameters, one curve per training attention")
    if scaling_laws(results):
        page.table(*scaling_table(results))
    for note in (*_missing_sizes(results), _PAPER_LAW):
        page.paragraph(note, is_note=True)
    return page.html()


def as_csv(results: Results) -> str:
    """A line for every model and attention that has seen all samples, earlier checkpoints included."""
    header = ["run", "trained_with", "parameters", "updates", "tested_with", "samples", "loss", "standard_error"]
    rows = []
    for run in results.runs.values():
        for cell in results.cells:
            if cell.run == run.name and len(cell.bins) == results.settings.samples:
                mean = Mean.of(cell.means)
                error = "" if mean.standard_error is None else f"{mean.standard_error:.6g}"
                about = [run.name, run.attention, run.parameters, cell.step, cell.attention, len(cell.bins)]
                rows.append([*about, f"{mean.mean:.6g}", error])
    return csv_text(header, rows)


def _facts(results: Results) -> list[str]:
    settings = results.settings
    hardware, versions = machine_lines(results.machine)
    return [
        f"Held-out text: {settings.corpus}; {settings.samples} windows of {format_size(settings.length)} tokens, "
        f"evenly spaced among {settings.windows:,}; {settings.precision}, on {settings.device}",
        f"Machine that measured these losses: {hardware}",
        f"Versions: {versions}",
    ]


def _beginnings(results: Results) -> list[str]:
    """Of runs whose first weights are those of another."""
    return [
        f"{run.name} begins with the weights of {run.recipe.initial}; what those have seen is not counted."
        for run in results.runs.values()
        if run.recipe.initial
    ]


def _tail(run: Run) -> str:
    share = run.recipe.exact_tail
    return f", exact for the last {100 * share:g}%" if share and run.attention != EXACT else ""


def _speed_remark(results: Results, run: Run) -> str:
    names = unlike_in_speed(results, run)
    return f" ({', '.join(names)} {'differs' if len(names) == 1 else 'differ'})" if names else ""


def _percent(found: Difference) -> str:
    mean, error = found.percent
    return f"{mean:+.2f}%" if error is None else f"{mean:+.2f} ± {error:.2f}%"


def _has_other_attentions(results: Results) -> bool:
    return any(name != EXACT for name in results.attentions)


def _sizes(results: Results) -> list[int]:
    return next((cell.sizes for cell in results.cells), [])


def _smoothing(results: Results) -> str:
    numbers = sorted({run.curves.averaged for run in results.runs.values()})
    updates = " or ".join(f"{number:,}" for number in numbers)
    return (
        f"Each point is the mean of {updates} consecutive updates, and none is in two points. This is the loss on the "
        "training batches, under the attention of the update."
    )


def _missing_sizes(results: Results) -> list[str]:
    lines = []
    for attention, points in sizes(results).items():
        if missing := missing_sizes(points):
            number = SIZES_OF_A_LAW - missing
            there_are = "one size" if number == 1 else f"{number} sizes"
            lines.append(f"{attention}: {there_are} of model, {missing} fewer than a power law needs.")
    return lines
