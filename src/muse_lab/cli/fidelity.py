"""`muse fidelity`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from muse_attention.registry import full_name
from muse_attention.sizes import format_size, parse_size
from muse_lab.cli.app import app, user_errors
from muse_lab.cli.language_model import Length, Model, Text, open_subject
from muse_lab.cli.measuring import Measurement, ModelRun, Samples, show
from muse_lab.cli.options import Words, attentions, flag, listed, with_option_groups
from muse_lab.evaluation.fidelity.fidelity_report import fidelity_report
from muse_lab.evaluation.fidelity.layers import FidelityRequest, FidelityResults, measure, steps
from muse_lab.evaluation.fidelity.presets import PRESETS, Preset, find_presets
from muse_lab.models import DEFAULT_MODEL
from muse_lab.report.fidelity_columns import ERROR, GRADIENTS, RETRIEVAL, TAIL, measure_columns
from muse_lab.report.tree import Table, number, text

_GRADIENTS = "Also measure gradient errors, by a backward pass in every head."
_RUN = ModelRun(output=Path("out/fidelity"))


@app.command()
@with_option_groups
def fidelity(
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    text: Text = None,
    length: Length = "8k",
    samples: Samples = 1,
    attention: Annotated[
        Words, attentions("Attention to measure", "MuSeConfig.for_length, if there is no preset")
    ] = None,
    preset: Annotated[Words, listed(f"Tables like the paper's: all, or {', '.join(PRESETS)}.", "none")] = None,
    gradients: Annotated[bool, flag("--gradients", _GRADIENTS)] = False,
    run: ModelRun = _RUN,
) -> None:
    """Measure how far attentions are from exact attention on the queries, keys and values of a model.

    Writes NAME.json every few seconds, and NAME.md, NAME.html and pictures at the end. Run it
    again to add what is missing.
    """
    with user_errors():
        tokens_each = parse_size(length)
        requests = _requests(find_presets(preset or [], tokens_each), attention, tokens_each)
        measurement = Measurement(context, FidelityResults, run, run.name_for(model))
    with measurement.errors():
        subject = open_subject(model, text or [], tokens_each, samples, run.place, download=run.download)
        results = measurement.start(subject.settings)
        is_whole = all(results.is_whole(request, gradients=gradients) for request in requests)
        with measurement.progress(results, 0 if is_whole else steps(subject.model, requests, samples)) as on_step:
            measure(
                *(subject.model, subject.tokens, requests, results, measurement.path),
                gradients=gradients,
                on_step=on_step,
            )
        _show(results, requests)
        measurement.write(fidelity_report(results, measurement.path.stem))


def _requests(presets: Sequence[Preset], attentions: Sequence[str] | None, length: int) -> list[FidelityRequest]:
    """The named attentions and then those of presets, each once."""
    named = attentions or ([] if presets else ["muse"])
    requests = [FidelityRequest(full_name(attention, length), length) for attention in named]
    return list(dict.fromkeys([*requests, *(request for preset in presets for request in preset.requests)]))


def _show(results: FidelityResults, requests: Sequence[FidelityRequest]) -> None:
    """Show tables of errors, of retrieval and of gradients, without measures that no request has."""
    title = f"{results.settings.title}, {results.heads} heads"
    for group in ((*ERROR, *TAIL), RETRIEVAL, GRADIENTS):
        if columns := measure_columns(group, requests, results.pooled):
            name = (text("attention"), lambda request: request.attention)
            length = (number("length"), lambda request: format_size(request.length))
            table = Table.of(requests, name, length, *columns)
            show(table, title if group[0] is ERROR[0] else "", table.titles[1:])
