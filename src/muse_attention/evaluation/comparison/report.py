"""The report of `muse compare`, with the paper's numbers beside."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

import numpy as np

from muse_attention.evaluation.attentions import full_name, in_words, names_table, short_names
from muse_attention.evaluation.comparison.findings import (
    SIZES_OF_A_LAW,
    Difference,
    ScalingLaw,
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
from muse_attention.evaluation.comparison.further import further_sections
from muse_attention.evaluation.comparison.positions import (
    OWN,
    losses_by_position,
    own_attention_tables,
    position_figures,
)
from muse_attention.evaluation.comparison.results import ComparisonResults, Run
from muse_attention.evaluation.comparison.training_curves import UNSETTLED
from muse_attention.evaluation.loss.report import LEAK, span
from muse_attention.evaluation.means import Mean
from muse_attention.evaluation.provenance import provenance_of
from muse_attention.markup import csv_text
from muse_attention.plots import BLACK, PALETTE, ROUNDING, Axis, Curve, Line, shades
from muse_attention.pretraining.schedule import EXACT
from muse_attention.report.figures import line_figure
from muse_attention.report.tree import Card, Figure, Report, Section, Table, number, text
from muse_attention.sizes import format_size

_LOSS = (
    "Cross-entropy of the next token on held-out repositories, in nats, ± its standard error over samples, most of "
    "which is what the texts differ by."
)
_DIFFERENCE = (
    "Loss minus that of the reference on the same samples, ± the standard error of the difference. Seed-to-seed "
    "variance is not included."
)
_SWITCHING = (
    "The loss of one and the same model under an attention, minus its loss under exact attention: what is gained or "
    "lost by training with one and deploying with the other."
)
_TOKENS = (
    "The paper trains on 20 tokens for each parameter. Differences between runs that saw far fewer say how models "
    "begin to learn, not where they end."
)
_SPEED = f"Median of the updates without a probe; the first {UNSETTLED} after a change of the attention are left out."
_SECONDS = (
    "Time of the updates alone, without checkpoints and pauses, on whatever machine trained the run; probes of the "
    "attention's error may count in runs from before 0.2.0."
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
_POSITIONS = (
    "The first table is under exact attention: the loss itself, not its cumulative mean, between powers of two."
)
_PAPER_LAW = "The paper's, from 185M to 1B parameters: loss in proportion to parameters^-0.17, R² above 0.999."
_RUNS = (BLACK, *PALETTE)
_MEAN = "mean"
_POINTS_OF_A_LAW = 50


def comparison_report(results: ComparisonResults, file_name: str = "") -> Report:
    if not results.attentions:
        raise ValueError("no model has seen all samples yet; run the comparison again, and it goes on")
    settings = results.settings
    probes, answers, laws = probe_table(results), answers_table(results), scaling_table(results)
    smoothing = " or ".join(f"{averaged:,}" for averaged in sorted({run.curves.averaged for run in _runs(results)}))
    sections = [
        Section("Training attention against test attention", tables=[matrix_table(results)]),
        Section("Runs", tables=[runs_table(results)], notes=[_TOKENS, *_beginnings(results)]),
    ]
    if any(name != EXACT for name in results.attentions):
        sections.append(
            Section("Switching the attention", [_SWITCHING], tables=[switching_table(results)], notes=[LEAK])
        )
    averages = (
        f"Each point is the mean of {smoothing} consecutive updates, and none is in two points. This is the loss on "
        "the training batches, under the attention of the update."
    )
    sections.append(
        Section(
            "Training and its speed",
            figures=_training_figures(results),
            tables=[speed_table(results)],
            notes=[averages, _SPEED_OF_THE_PAPER],
        )
    )
    if probes.rows:
        sections.append(
            Section("The attention's error in training", [_PROBE], figures=_error_figures(results), tables=[probes])
        )
    if answers.rows:
        sections.append(
            Section("Learning to look needles up", [_ANSWERS], figures=_answers_figures(results), tables=[answers])
        )
    own_tables = own_attention_tables(results)
    sections += [
        *further_sections(results),
        Section(
            "Loss by position",
            [_POSITIONS, *([OWN] if own_tables else [])],
            figures=position_figures(results),
            tables=[positions_table(results), *own_tables],
        ),
        Section(
            "Scaling law",
            figures=_scaling_figures(results),
            tables=[laws] if laws.rows else [],
            notes=[*_missing_sizes(results), _PAPER_LAW],
        ),
    ]
    return Report(
        f"Training runs compared: {', '.join(results.runs)}",
        verdict=[*headline(results), *warnings(results)],
        cards=_cards(results),
        sections=sections,
        names=names_table(_named(results)),
        provenance=provenance_of(
            results,
            f"Held-out text: {settings.corpus}; {settings.samples} windows of {format_size(settings.length)} tokens, "
            f"evenly spaced among {settings.windows:,}; {settings.precision}, on {settings.device}",
            "The machine below measured these losses; the runs may have been trained on another.",
        ),
        csv=as_csv(results),
    )


def runs_table(results: ComparisonResults) -> Table:
    names = short_names(_named(results))
    return Table.of(
        _runs(results),
        (text("run"), lambda run: run.name),
        (text("trained with"), lambda run: f"{names[run.attention]}{_tail(run)}"),
        (number("parameters"), lambda run: f"{run.parameters / 1e6:,.1f}M"),
        (number("updates"), lambda run: f"{run.step:,}"),
        (number("tokens"), lambda run: f"{run.tokens:,}"),
        (number("tokens per parameter"), lambda run: f"{run.tokens / run.parameters:.2g}"),
        (text("weights"), _weights),
    )


def _weights(run: Run) -> str:
    return "the finished model" if run.is_finished else f"its newest checkpoint, of {run.recipe.updates:,} updates"


def matrix_table(results: ComparisonResults) -> Table:
    """Training attention against test attention, and the difference under exact attention."""
    attentions, names = results.attentions, short_names(_named(results))
    columns = [text("run"), text("trained with"), *(number(f"tested: {names[name]}", _LOSS) for name in attentions)]
    columns += [number("difference, tested: exact", _DIFFERENCE), number("percent", _DIFFERENCE)]
    rows = []
    for run in _runs(results):
        cells = [results.whole(run, name) for name in attentions]
        found = difference(results, run)
        rows.append(
            (
                run.name,
                names[run.attention],
                *("" if cell is None else str(Mean.of(cell.means)) for cell in cells),
                "" if found is None else found.nats.signed(),
                "" if found is None else _percent(found),
            )
        )
    return Table(columns, rows)


def switching_table(results: ComparisonResults) -> Table:
    others, names = [name for name in results.attentions if name != EXACT], short_names(_named(results))
    rows = []
    for run in _runs(results):
        found = [switching(results, run, name) for name in others]
        rows.append((run.name, *("" if gap is None else gap.signed() for gap in found)))
    return Table((text("run"), *(number(names[name], in_words(name)) for name in others)), rows)


def speed_table(results: ComparisonResults) -> Table:
    columns = (
        text("run"),
        text("attention of the update"),
        number("tokens/s", _SPEED),
        number("updates"),
        number("speed-up over exact training"),
        number("all updates", _SECONDS),
    )
    names = short_names(_named(results))
    rows = []
    for run in _runs(results):
        ratio = speedup(results, run)
        for attention, speed in run.curves.speeds.items():
            is_its_own = attention == run.recipe.attention
            rows.append(
                (
                    run.name,
                    names[full_name(attention, run.recipe.length)],
                    f"{speed.tokens_per_second:,.0f}",
                    f"{speed.updates:,}",
                    f"{ratio:.2f}x{_speed_remark(results, run)}" if is_its_own and ratio is not None else "",
                    str(datetime.timedelta(seconds=round(run.curves.seconds))) if is_its_own else "",
                )
            )
    return Table(columns, rows)


def probe_table(results: ComparisonResults) -> Table:
    """The first and the last measurement of each run, and the mean of all."""
    names = short_names(_named(results))
    rows = []
    for run in _runs(results):
        probes = run.curves.probes
        if probes:
            worst, error = max(probes[-1].errors.items(), key=lambda layer: layer[1])
            means = [probe.mean for probe in probes]
            numbers = (f"{means[0]:.2g}", f"{means[-1]:.2g}", f"{sum(means) / len(means):.2g}")
            about = (run.name, names[run.attention], str(len(probes)))
            rows.append((*about, *numbers, f"{error:.2g} (layer {worst})"))
    titles = ("measurements", "first", "last", "mean", "worst layer, last")
    return Table((text("run"), text("attention"), *map(number, titles)), rows)


def answers_table(results: ComparisonResults) -> Table:
    """Of runs that learnt from needles."""
    names = short_names(_named(results))
    rows = []
    for run in _runs(results):
        for attention, curve in answers_curves(run).items():
            losses = [loss for _, loss in curve]
            chosen = (losses[0], losses[(len(losses) - 1) // 2], losses[-1], min(losses))
            rows.append((run.name, names[attention], str(len(losses)), *(f"{loss:.3f}" for loss in chosen)))
    titles = ("measurements", "first", "middle", "last", "lowest")
    return Table((text("run"), text("measured under"), *map(number, titles)), rows)


def answers_curves(run: Run) -> dict[str, list[tuple[float, float]]]:
    """(millions of tokens, loss) by the attention that it was measured under, by its full name."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for answers in run.curves.answers:
        name = full_name(answers.attention, run.recipe.length)
        curves.setdefault(name, []).append((answers.tokens / 1e6, answers.loss))
    return curves


def positions_table(results: ComparisonResults) -> Table:
    """The loss of references between powers of two of the position, and what the other runs add to it.

    A run whose reference is not measured yet has its own loss.
    """
    runs = [run for run in _runs(results) if results.whole(run, EXACT)]
    columns = {run.name: [loss for _, loss in losses_by_position(results, run)] for run in runs}
    references = {run.name: reference_of(results, run).name for run in runs}
    less = {name: other for name, other in references.items() if other != name and other in columns}
    titles = ["positions", *(f"{name} less {less[name]}" if name in less else name for name in columns)]
    rows = []
    first = 1
    for place, size in enumerate(next((cell.sizes for cell in results.cells), [])):
        cells = (
            f"{column[place] - columns[less[name]][place]:+.4f}" if name in less else f"{column[place]:.4f}"
            for name, column in columns.items()
        )
        rows.append((span(first, first + size - 1), *cells))
        first += size
    return Table(map(number, titles), rows)


def scaling_table(results: ComparisonResults) -> Table:
    names = short_names(_named(results))
    return Table.of(
        scaling_laws(results).items(),
        (text("trained with"), lambda law: names[law[0]]),
        (text("parameters"), lambda law: ", ".join(f"{parameters / 1e6:,.1f}M" for parameters, _ in law[1].points)),
        (number("exponent"), lambda law: f"{law[1].law.exponent:.3f}"),
        (number("R²"), lambda law: f"{law[1].r_squared:.4f}"),
    )


def headline(results: ComparisonResults) -> list[str]:
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


def warnings(results: ComparisonResults) -> list[str]:
    """What stands between these runs and a fair comparison."""
    lines = [
        f"{run.name} is not finished: its weights are those of update {run.step:,} of {run.recipe.updates:,}."
        for run in results.runs.values()
        if not run.is_finished
    ]
    for run in results.runs.values():
        if names := unlike(results, run):
            reference = reference_of(results, run).name
            lines.append(f"{run.name} differs from {reference} by more than its attention: {', '.join(names)}.")
    return lines


def as_csv(results: ComparisonResults) -> str:
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


def _beginnings(results: ComparisonResults) -> list[str]:
    """Of runs whose first weights are those of another."""
    return [
        f"{run.name} begins with the weights of {run.recipe.initial}; what those have seen is not counted."
        for run in results.runs.values()
        if run.recipe.initial
    ]


def _tail(run: Run) -> str:
    """What a run attends with at its end, if it is something else."""
    share, recipe = run.recipe.exact_tail, run.recipe
    tail = f", exact for the last {100 * share:g}%" if share and run.attention != EXACT else ""
    if not recipe.further_steps:
        return tail
    name = short_names([full_name(recipe.attention_at(recipe.steps), recipe.length)])
    return f"{tail}, then {next(iter(name.values()))} for {recipe.further_steps:,} further updates"


def _speed_remark(results: ComparisonResults, run: Run) -> str:
    names = unlike_in_speed(results, run)
    return f" ({', '.join(names)} {'differs' if len(names) == 1 else 'differ'})" if names else ""


def _percent(found: Difference) -> str:
    mean, error = found.percent
    return f"{mean:+.2f}%" if error is None else f"{mean:+.2f} ± {error:.2f}%"


def _runs(results: ComparisonResults) -> Iterable[Run]:
    return results.runs.values()


def _named(results: ComparisonResults) -> list[str]:
    """All attentions of the report, by their full names."""
    trained = [run.attention for run in _runs(results)]
    updates = [full_name(name, run.recipe.length) for run in _runs(results) for name in run.curves.speeds]
    answered = [name for run in _runs(results) for name in answers_curves(run)]
    return [*trained, *results.named, *updates, *answered]


def _cards(results: ComparisonResults) -> list[Card]:
    """Of the first run that is compared with another."""
    for run in _runs(results):
        found, ratio, probes = difference(results, run), speedup(results, run), run.curves.probes
        if found is not None:
            return [
                *([Card("speed-up in training", f"{ratio:.2f}x", run.name)] if ratio is not None else []),
                Card("held-out loss", _percent(found), f"{run.name} against {found.reference}"),
                *([Card("RSE in training", f"{probes[-1].mean:.2g}", f"{run.name}, last probe")] if probes else []),
                Card("tokens", f"{run.tokens:,}", f"{run.tokens / run.parameters:.2g} per parameter"),
            ]
    return []


def _missing_sizes(results: ComparisonResults) -> list[str]:
    lines = []
    for attention, points in sizes(results).items():
        if missing := missing_sizes(points):
            found = SIZES_OF_A_LAW - missing
            there_are = "one size" if found == 1 else f"{found} sizes"
            lines.append(f"{attention}: {there_are} of model, {missing} fewer than a power law needs.")
    return lines


def _figure(name: str, title: str, lines: Iterable[Line], x: Axis, y: Axis, above: float | None = None) -> list[Figure]:
    """None if there is no line with a point."""
    drawn = [line for line in lines if line.points]
    return [line_figure(name, title, drawn, x, y, above=above)] if drawn else []


def _coloured(curves: Iterable[tuple[str, Curve]], marker: str = "") -> list[Line]:
    return [Line(name, curve, _RUNS[place % len(_RUNS)], marker) for place, (name, curve) in enumerate(curves)]


def _training_figures(results: ComparisonResults) -> list[Figure]:
    loss, runs = Axis("training loss (nats)"), list(_runs(results))
    by_tokens = [(run.name, [(point.tokens / 1e6, point.loss) for point in run.curves.points]) for run in runs]
    by_seconds = [(run.name, [(point.seconds, point.loss) for point in run.curves.points]) for run in runs]
    return [
        *_figure("training", "Training loss against tokens", _coloured(by_tokens), Axis("tokens (millions)"), loss),
        *_figure(
            "training-seconds", "Training loss against time", _coloured(by_seconds), Axis("seconds of updates"), loss
        ),
    ]


def _error_figures(results: ComparisonResults) -> list[Figure]:
    """One for each run: a line for every layer, and their mean."""
    figures = []
    for place, run in enumerate(_runs(results), start=1):
        probes = run.curves.probes
        layers = list(probes[0].errors) if probes else []
        lines = [
            Line(f"layer {layer}", [(probe.tokens / 1e6, probe.errors[layer]) for probe in probes], colour, ".")
            for layer, colour in zip(layers, shades(len(layers)), strict=True)
        ]
        lines.append(Line(_MEAN, [(probe.tokens / 1e6, probe.mean) for probe in probes], PALETTE[1], ".", width=2))
        x, y = Axis("tokens (millions)"), Axis("relative squared error", log=10)
        figures += _figure(f"errors-{place}", f"Error in training: {run.name}", lines, x, y, ROUNDING)
    return figures


def _answers_figures(results: ComparisonResults) -> list[Figure]:
    names = short_names(_named(results))
    curves = [
        (f"{run.name}, {names[attention]}", curve)
        for run in _runs(results)
        for attention, curve in answers_curves(run).items()
    ]
    y = Axis("nats for a token of the answer", from_zero=True)
    return _figure("answers", "Loss of uids in imports", _coloured(curves, "."), Axis("tokens (millions)"), y)


def _scaling_figures(results: ComparisonResults) -> list[Figure]:
    """A mark for each model, and a line for the law of each attention."""
    laws, names = scaling_laws(results), short_names(_named(results))
    lines = []
    for place, (name, points) in enumerate(sizes(results).items() if laws else []):
        colour = _RUNS[place % len(_RUNS)]
        lines.append(Line(names[name], points, colour, "o", ""))
        if name in laws:
            lines.append(Line(f"law of {names[name]}", _line(laws[name]), colour, width=1))
    x, y = Axis("parameters", log=10), Axis("held-out loss (nats)", log=10)
    return _figure("scaling", "Loss against parameters", lines, x, y)


def _line(found: ScalingLaw) -> Curve:
    smallest, largest = found.points[0][0], found.points[-1][0]
    return [(float(size), found.law(float(size))) for size in np.geomspace(smallest, largest, _POINTS_OF_A_LAW)]
