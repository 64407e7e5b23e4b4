"""`muse loss`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from muse_attention.registry import full_name
from muse_attention.sizes import parse_size
from muse_lab.cli.app import app, user_errors
from muse_lab.cli.language_model import Length, Model, Text, open_subject
from muse_lab.cli.measuring import Measurement, ModelRun, Samples, show
from muse_lab.cli.options import Words, attentions, flag, listed, option, with_option_groups
from muse_lab.evaluation.fidelity.presets import PRESETS, find_presets
from muse_lab.evaluation.loss.curves import SHORTEST, fit_exact
from muse_lab.evaluation.loss.endings import ending_position, measure_endings
from muse_lab.evaluation.loss.loss_report import endings_in_words, has_leak, loss_report, summary_table
from muse_lab.evaluation.loss.positions import LossResults, figure_attentions, measure
from muse_lab.models import DEFAULT_MODEL

_RUN = ModelRun(output=Path("out/loss"))
_INSIDE = "Take every sample from a single file: first one per file, then a second one, and so on."
_LEAK = "MuSe without a tolerance clusters the whole sequence: later tokens leak into its loss."


@app.command()
@with_option_groups
def loss(
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    text: Text = None,
    length: Length = "8k",
    samples: Samples = 4,
    inside_files: Annotated[bool, flag("--inside-files", _INSIDE)] = False,
    attention: Annotated[
        Words,
        attentions(
            "Attention to measure in addition to exact attention",
            "those of the paper's figure, around the paper's sizes",
        ),
    ] = None,
    preset: Annotated[
        Words, listed(f"The attentions of a preset of muse fidelity: {', '.join(PRESETS)}.", "none")
    ] = None,
    other_ending: Annotated[
        float | None,
        option(
            "Also measure how the loss on this first fraction of a sample changes if the next sample's ending follows.",
            "not measured",
        ),
    ] = None,
    run: ModelRun = _RUN,
) -> None:
    """Measure a language model's loss at every position of long texts, under one attention after another.

    Writes NAME.json after every sample of every attention, and NAME.md, NAME.png and NAME.html at the end.
    Run it again to add what is missing.
    """
    with user_errors():
        tokens_each = parse_size(length)
        if tokens_each < SHORTEST:
            raise ValueError(f"--length {tokens_each} is too short for a curve; choose at least {SHORTEST}")
        position = None if other_ending is None else ending_position(other_ending, tokens_each, samples)
        attentions = _attentions(attention or [], preset or [], tokens_each)
        name = run.name_for(model)
        measurement = Measurement(context, LossResults, run, name, settled={"attention": attentions, "preset": None})
    with measurement.errors():
        subject = open_subject(
            model, text or [], tokens_each, samples, run.place, download=run.download, inside_files=inside_files
        )
        results = measurement.start(subject.settings)
        with measurement.progress(results, len(results.missing(attentions))) as on_step:
            measure(subject.model, subject.tokens, attentions, results, measurement.path, on_step=on_step)
        if position is not None:
            with measurement.progress(results, len(results.missing(attentions, position))) as on_step:
                measure_endings(
                    *(subject.model, subject.tokens, attentions, position, results, measurement.path), on_step=on_step
                )
        report = loss_report(results, measurement.path.stem)
        table = summary_table(results)
        show(table, results.settings.title, table.titles[1:4], _caption(results))
        for sentence in endings_in_words(results):
            typer.echo(sentence)
        measurement.write(report)


def _caption(results: LossResults) -> str:
    irreducible = f"In nats; irreducible loss: {fit_exact(results).irreducible:.2f}."
    return f"{irreducible} {_LEAK}" if any(map(has_leak, results.whole)) else irreducible


def _attentions(named: Sequence[str], presets: Sequence[str], length: int) -> list[str]:
    """The attentions to measure, exact attention first: the others are compared with it."""
    if not named and not presets:
        return list(figure_attentions(length))
    requests = [request for preset in find_presets(list(presets), length) for request in preset.requests]
    in_presets = [request.attention for request in requests if request.length == length]
    return list(dict.fromkeys(["exact", *(full_name(attention, length) for attention in named), *in_presets]))
