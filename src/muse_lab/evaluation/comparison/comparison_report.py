"""The report of `muse compare`, with the paper's numbers beside."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterable, Sequence

from muse_attention.sizes import format_size
from muse_lab.evaluation.comparison import evaluations, findings, seeds
from muse_lab.evaluation.comparison.answers import answers_section
from muse_lab.evaluation.comparison.further import further_sections
from muse_lab.evaluation.comparison.positions import positions_section
from muse_lab.evaluation.comparison.results import ComparisonResults, Run
from muse_lab.evaluation.comparison.seeds import in_percent, seeds_differences, seeds_headline
from muse_lab.evaluation.comparison.training_curves import UNSETTLED
from muse_lab.evaluation.loss.loss_report import LEAK
from muse_lab.records.attention_names import EXACT, in_words, short_names
from muse_lab.report.plots import PALETTE, ROUNDING, Axis, Line, coloured, colours, line_figure, shades
from muse_lab.report.provenance import count, names_table, provenance_of
from muse_lab.report.tree import Card, Figure, Note, Report, Section, Table, number, text

_LOSS = (
    "Cross-entropy of the next token on held-out repositories, in nats, ± its standard error over samples, most of "
    "which comes from differences between the texts."
)
_DIFFERENCE = (
    "Loss minus that of the reference on the same samples, ± the standard error of the difference over samples, "
    "without seed-to-seed variance."
)
_MEDIAN = (
    "The median over samples of the difference in percent. A few texts that no model predicts well, such as tables of "
    "numbers, can decide a mean."
)
_SAMPLES = "The least and the greatest difference of a sample, in nats."
_SWITCHING = (
    "The loss of one and the same model under an attention, minus its loss under exact attention: what is gained or "
    "lost by training with one and deploying with the other."
)
_TOKENS = Note(
    "The paper trains on 20 tokens for each parameter. Differences between runs that saw far fewer say how models "
    "begin to learn, not where they end."
)
_SPEED = f"Median of the updates without a probe; the first {UNSETTLED} after a change of the attention are left out."
_SECONDS = "Time of the updates alone, without checkpoints and pauses, on whatever machine trained the run."
_PAPER_SPEED = Note(
    "The paper's: 88.9k tokens/s with MuSe and 65.3k with cuDNN's exact attention, 1.36x, for the 1B model at 64k on "
    "8 A100."
)
_PROBE = (
    "The relative squared error of the training attention to exact attention, measured on the current batch while the "
    "model attends exactly, in every global layer."
)
_SHARED_GPU = Note("The GPU was shared with other programs, so the speeds of these runs are left out.")
_RECORDED = (
    "No loss was measured for this report: it has what the runs recorded while they trained. Their weights may be gone."
)
_PAPER_LAW = Note("The paper's, from 185M to 1B parameters: loss in proportion to parameters^-0.17, R² above 0.999.")
_RUN = (text("run"), lambda run: run.name)
_TOKENS_AXIS = Axis("tokens (millions)")


def comparison_report(results: ComparisonResults, file_name: str = "") -> Report:
    settings = results.settings
    if settings.samples and not results.attentions:
        raise ValueError("no model has seen all samples yet; run the comparison again to continue")
    smoothing = " or ".join(f"{averaged:,}" for averaged in sorted({run.curves.averaged for run in _runs(results)}))
    averages = Note(
        f"Each point is the mean of {smoothing} consecutive updates, and none is in two points. This is the loss on "
        "the training batches, under the attention of the update."
    )
    runs: list[Table | Note] = [runs_table(results), _TOKENS, *_beginnings(results)]
    recorded = [
        _training_section(results, averages),
        Section(
            "The attention's error in training",
            _PROBE,
            *_error_figures(results),
            probe_table(results),
            is_optional=True,
        ),
        answers_section(results, short_names(_named(results))),
        Section("Evaluated on the way", evaluations.ABOUT, *evaluations.evaluations_tables(results), is_optional=True),
    ]
    windows = (
        f"{settings.samples} windows of {format_size(settings.length)} tokens, evenly spaced among "
        f"{settings.windows:,}; {settings.precision}, on {settings.device}"
    )
    trained_on = _trained_on(results)
    facts = (
        [f"Held-out text: {settings.corpus}; {windows}", f"The machine below measured these losses; {trained_on}."]
        if settings.samples
        else [f"Corpus: {settings.corpus}", f"The machine below wrote this report; {trained_on}."]
    )
    return Report(
        f"Training runs compared: {', '.join(results.runs)}",
        verdict=[
            *([] if settings.samples else [_RECORDED]),
            *seeds_headline(results),
            *headline(results),
            *warnings(results),
        ],
        cards=_cards(results),
        sections=(
            [*_by_attention(results, runs), *recorded, *_by_position_and_size(results)]
            if settings.samples
            else [Section("Runs", *runs), *recorded]
        ),
        names=names_table(_named(results)),
        provenance=provenance_of(results, *facts),
    )


def _trained_on(results: ComparisonResults) -> str:
    named = [run.hardware for run in results.runs.values() if run.hardware is not None]
    if len(named) < len(results.runs):
        return "the runs may have been trained on another"
    return f"the runs were trained on {', '.join(dict.fromkeys(named))}"


def _by_attention(results: ComparisonResults, runs: Sequence[Table | Note]) -> Iterable[Section]:
    yield Section("Over seeds", seeds.ABOUT, seeds.seeds_table(results), is_optional=True)
    yield Section("Training attention against test attention", matrix_table(results))
    yield Section("Runs", *runs)
    if any(name != EXACT for name in results.attentions):
        yield Section("Switching the attention", _SWITCHING, switching_table(results), LEAK)


def _by_position_and_size(results: ComparisonResults) -> Iterable[Section]:
    laws = [scaling_table(results)] if findings.scaling_laws(results) else []
    yield from further_sections(results)
    yield positions_section(results)
    yield Section("Scaling law", *_scaling_figures(results), *laws, *_missing_sizes(results), _PAPER_LAW)


def _training_section(results: ComparisonResults, averages: Note) -> Section:
    figures = _training_figures(results)
    if results.settings.shared_gpu:
        return Section("Training", *figures, averages, _SHARED_GPU)
    return Section("Training and its speed", *figures, speed_table(results), averages, _PAPER_SPEED)


def runs_table(results: ComparisonResults) -> Table:
    names = short_names(_named(results))
    return Table.of(
        _runs(results),
        _RUN,
        (text("trained with"), lambda run: f"{names[run.attention]}{findings.describe_schedule(run)}"),
        (number("parameters"), lambda run: f"{run.parameters / 1e6:,.1f}M"),
        (number("updates"), lambda run: f"{run.step:,}"),
        (number("tokens"), lambda run: f"{run.tokens:,}"),
        (number("tokens per parameter"), lambda run: f"{run.tokens / run.parameters:.2g}"),
        *([(text("weights"), _weights)] if results.settings.samples else []),
    )


def _weights(run: Run) -> str:
    return "the finished model" if run.is_finished else f"its newest checkpoint, of {run.recipe.updates:,} updates"


def matrix_table(results: ComparisonResults) -> Table:
    """Training attention against test attention, and the difference under exact attention."""
    names, gaps = short_names(_named(results)), {run.name: findings.difference(results, run) for run in _runs(results)}
    return Table.of(
        _runs(results),
        _RUN,
        (text("trained with"), lambda run: names[run.attention]),
        *(
            (number(f"tested: {names[name]}", _LOSS), functools.partial(results.loss, attention=name))
            for name in results.attentions
        ),
        (number("difference, tested: exact", _DIFFERENCE), lambda run: (gap := gaps[run.name]) and gap.nats.signed()),
        (number("percent", _DIFFERENCE), lambda run: (gap := gaps[run.name]) and in_percent(gap.percent)),
        (number("median sample", _MEDIAN), lambda run: (gap := gaps[run.name]) and f"{gap.median:+.2f}%"),
        (
            number("samples", _SAMPLES),
            lambda run: (gap := gaps[run.name]) and f"{gap.least:+.3f} to {gap.most:+.3f}",
        ),
    )


def switching_table(results: ComparisonResults) -> Table:
    names = short_names(_named(results))

    def change(attention: str) -> Callable[[Run], str | None]:
        return lambda run: gap.signed() if (gap := findings.switching(results, run, attention)) else None

    others = (name for name in results.attentions if name != EXACT)
    return Table.of(_runs(results), _RUN, *((number(names[name], in_words(name)), change(name)) for name in others))


def speed_table(results: ComparisonResults) -> Table:
    names = short_names(_named(results))
    rows = [
        (run, attention, speed, attention == run.recipe.attention)
        for run in _runs(results)
        for attention, speed in run.curves.speeds.items()
    ]
    return Table.of(
        rows,
        (text("run"), lambda row: row[0].name),
        (text("attention of the update"), lambda row: names[row[1]]),
        (number("tokens/s", _SPEED), lambda row: f"{row[2].tokens_per_second:,.0f}"),
        (number("updates"), lambda row: f"{row[2].updates:,}"),
        (
            number("speed-up over exact training"),
            lambda row: f"{ratio:.2f}x" if row[3] and (ratio := findings.speedup(results, row[0])) else None,
        ),
        (
            number("all updates", _SECONDS),
            lambda row: datetime.timedelta(seconds=round(row[0].curves.seconds)) if row[3] else None,
        ),
    )


def probe_table(results: ComparisonResults) -> Table:
    """The first and the last measurement of each run, and the mean of all."""
    names = short_names(_named(results))
    return Table.of(
        [(run, run.curves.probes) for run in _runs(results) if run.curves.probes],
        (text("run"), lambda row: row[0].name),
        (text("attention"), lambda row: names[row[0].attention]),
        (number("measurements"), lambda row: len(row[1])),
        (number("first"), lambda row: f"{row[1][0].mean:.2g}"),
        (number("last"), lambda row: f"{row[1][-1].mean:.2g}"),
        (number("mean"), lambda row: f"{sum(probe.mean for probe in row[1]) / len(row[1]):.2g}"),
        (number("worst layer, last"), lambda row: "{1:.2g} (layer {0})".format(*row[1][-1].worst)),
    )


def scaling_table(results: ComparisonResults) -> Table:
    names, sizes = short_names(_named(results)), findings.sizes(results)
    return Table.of(
        [(names[attention], law, sizes[attention]) for attention, law in findings.scaling_laws(results).items()],
        (text("trained with"), lambda row: row[0]),
        (text("parameters"), lambda row: ", ".join(f"{parameters / 1e6:,.1f}M" for parameters, _ in row[2])),
        (number("exponent"), lambda row: f"{row[1].exponent:.3f}"),
        (number("R²"), lambda row: f"{row[1].r_squared(row[2]):.4f}"),
    )


def headline(results: ComparisonResults) -> list[str]:
    """For every run but the references: its held-out loss under exact attention, and its speed, in words."""
    lines = []
    for run in _runs(results):
        if difference := findings.difference(results, run):
            speed = f", {ratio:.2f}x its tokens per second" if (ratio := findings.speedup(results, run)) else ""
            change = f"{in_percent(difference.percent)}, median sample {difference.median:+.2f}%"
            gap = f"{abs(difference.percent.mean):.2f}% of {difference.reference} ({change})"
            lines.append(
                f"{run.name}, trained with {run.attention}{findings.describe_schedule(run)}: held-out loss under exact "
                f"attention within {gap}{speed}"
            )
    return lines


def warnings(results: ComparisonResults) -> list[str]:
    """What stands between these runs and a fair comparison."""
    state = "is not finished: its weights are those of" if results.settings.samples else "has metrics that end with"
    lines = [
        f"{run.name} {state} update {run.step:,} of {run.recipe.updates:,}."
        for run in _runs(results)
        if not run.is_finished
    ]
    for run in _runs(results):
        if names := findings.differing_fields(results, run):
            reference = findings.reference_of(results, run).name
            lines.append(f"{run.name} differs from {reference} by more than its attention: {', '.join(names)}.")
    compared = [run for run in _runs(results) if findings.speedup(results, run) is not None]
    slowed = dict.fromkeys(one.name for run in compared for one in findings.handicapped(results, run))
    if slowed:
        lines.append(
            f"Speed-ups are not those of the fastest kernels: {' and '.join(slowed)} "
            f"{'is' if len(slowed) == 1 else 'are'} deterministic, which leaves out cuDNN's attention. Train with "
            "deterministic=false to compare speeds."
        )
    return lines


def _beginnings(results: ComparisonResults) -> list[Note]:
    """A note on runs that began with the weights of another model."""
    by_weights: dict[str, list[str]] = {}
    for run in _runs(results):
        if run.recipe.initial:
            by_weights.setdefault(run.recipe.initial, []).append(run.name)
    if not by_weights:
        return []
    begun = "; ".join(f"{', '.join(names)} with those of {initial}" for initial, names in by_weights.items())
    return [Note(f"Runs that began with the weights of a model, whose tokens are not counted: {begun}.")]


def _runs(results: ComparisonResults) -> Iterable[Run]:
    return results.runs.values()


def _named(results: ComparisonResults) -> list[str]:
    """All attentions of the report, by their full names."""
    trained = [run.attention for run in _runs(results)]
    updates = [name for run in _runs(results) for name in run.curves.speeds]
    answered = [answers.attention for run in _runs(results) for answers in run.curves.answers]
    return [*trained, *results.named, *updates, *answered]


def _cards(results: ComparisonResults) -> list[Card]:
    """Cards of the first run that is compared with another, or of all its seeds if there are several."""
    over_seeds = {
        run.name: Card(
            "held-out loss", in_percent(gap), f"{len(group.runs)} seeds, against exact training with the same"
        )
        for group, gap in seeds_differences(results)
        for run in group.runs
    }
    for run in _runs(results):
        difference, ratio, probes = findings.difference(results, run), findings.speedup(results, run), run.curves.probes
        if difference is not None:
            return [
                *([Card("speed-up in training", f"{ratio:.2f}x", run.name)] if ratio is not None else []),
                over_seeds.get(run.name)
                or Card("held-out loss", in_percent(difference.percent), f"{run.name} against {difference.reference}"),
                *([Card("RSE in training", f"{probes[-1].mean:.2g}", f"{run.name}, last probe")] if probes else []),
                Card("tokens", f"{run.tokens:,}", f"{run.tokens / run.parameters:.2g} per parameter"),
            ]
    return []


def _missing_sizes(results: ComparisonResults) -> list[Note]:
    lines = []
    for attention, points in findings.sizes(results).items():
        if missing := findings.missing_sizes(points):
            measured = count(findings.SIZES_OF_A_LAW - missing, "size")
            lines.append(Note(f"{attention}: {measured} of model, {missing} fewer than a power law needs."))
    return lines


def _figure(name: str, title: str, lines: Iterable[Line], x: Axis, y: Axis, above: float | None = None) -> list[Figure]:
    """No figure if no line has a point."""
    drawn = [line for line in lines if line.points]
    return [line_figure(name, title, drawn, x, y, above=above)] if drawn else []


def _training_figures(results: ComparisonResults) -> list[Figure]:
    loss, points = Axis("training loss (nats)"), {run.name: run.curves.points for run in _runs(results)}
    by_tokens = coloured(
        (name, [(point.tokens / 1e6, point.loss) for point in run_points]) for name, run_points in points.items()
    )
    by_seconds = coloured(
        (name, [(point.seconds, point.loss) for point in run_points]) for name, run_points in points.items()
    )
    return [
        *_figure("training", "Training loss against tokens", by_tokens, _TOKENS_AXIS, loss),
        *(
            _figure("training-seconds", "Training loss against time", by_seconds, Axis("seconds of updates"), loss)
            if not results.settings.shared_gpu
            else []
        ),
    ]


def _error_figures(results: ComparisonResults) -> list[Figure]:
    """One for each run: a line for every layer, and their mean."""
    figures, y = [], Axis("relative squared error", log=10)
    for place, run in enumerate(_runs(results), start=1):
        probes = run.curves.probes
        layers = list(probes[0].errors) if probes else []
        lines = [
            Line(f"layer {layer}", [(probe.tokens / 1e6, probe.errors[layer]) for probe in probes], colour, ".")
            for layer, colour in zip(layers, shades(len(layers)), strict=True)
        ]
        lines.append(Line("mean", [(probe.tokens / 1e6, probe.mean) for probe in probes], PALETTE[1], ".", width=2))
        figures += _figure(f"errors-{place}", f"Error in training: {run.name}", lines, _TOKENS_AXIS, y, ROUNDING)
    return figures


def _scaling_figures(results: ComparisonResults) -> list[Figure]:
    """A mark for each model, and the law of each attention, which is straight on these axes."""
    laws, names, lines = findings.scaling_laws(results), short_names(_named(results)), []
    for (name, points), colour in zip(findings.sizes(results).items() if laws else [], colours(), strict=False):
        lines.append(Line(names[name], points, colour, "o", ""))
        if name in laws:
            ends = [(size, laws[name](size)) for size, _ in (points[0], points[-1])]
            lines.append(Line(f"law of {names[name]}", ends, colour, width=1))
    x, y = Axis("parameters", log=10), Axis("held-out loss (nats)", log=10)
    return _figure("scaling", "Loss against parameters", lines, x, y)
