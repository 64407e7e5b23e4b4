"""`muse loss`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from muse_attention.cli.app import Device, Overwrite, Resume, app, make_folder, progress_bar, user_errors
from muse_attention.cli.language_model import Dtype, Model, Place, Text, name_of, open_subject
from muse_attention.cli.measuring import (
    Name,
    Output,
    Samples,
    add_command,
    measuring,
    results_file,
    show,
    spell,
    write,
)
from muse_attention.evaluation.attentions import figure_attentions, full_name
from muse_attention.evaluation.fidelity.presets import PRESETS, find_presets
from muse_attention.evaluation.loss.curves import SHORTEST, fit_exact
from muse_attention.evaluation.loss.positions import LossResults, measure
from muse_attention.evaluation.loss.report import loss_report, summary_table
from muse_attention.pretrained import DEFAULT_MODEL
from muse_attention.sizes import format_size, parse_size


@app.command()
def loss(
    model: Model = DEFAULT_MODEL,
    text: Text = None,
    length: Annotated[str, typer.Option(help="Tokens of a sample; k means 1024.")] = "8k",
    samples: Samples = 4,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="Attention to measure, by name, as muse:paper; may be repeated. Exact attention is always measured.",
            show_default="those of the paper's figure, around the paper's sizes",
        ),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(help=f"The attentions of a preset of muse fidelity; may be repeated. {', '.join(PRESETS)}."),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    output: Output = Path("out/loss"),
    name: Name = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
) -> None:
    """Measure a language model's loss at every position of long texts, under one attention after another.

    Writes NAME.json after every sample of every attention, and NAME.md, NAME.csv, NAME.png and NAME.html at the end.
    Run again, it adds what is missing.
    """
    texts = text or []
    with user_errors():
        place = Place.choose(device, dtype)
        tokens_each = parse_size(length)
        if tokens_each < SHORTEST:
            raise ValueError(f"--length {tokens_each} is too short for a curve; choose at least {SHORTEST}")
        attentions = _attentions(attention or [], preset or [], tokens_each)
        stem = name if name is not None else name_of(model)
        path = results_file(LossResults, output, stem, overwrite=overwrite)

    def spelled(model: str, texts: Sequence[object], **others: object) -> str:
        return spell(
            "loss", model, text=texts, length=format_size(tokens_each), samples=samples, attention=attentions,
            device=place.device, dtype=place.dtype, name=stem, **others,
        )  # fmt: skip

    with measuring(path, spelled(model, texts, output=output), overwrite=overwrite):
        subject = open_subject(model, texts, tokens_each, samples, place)
        make_folder(output)
        results = LossResults.start(subject.settings, path, overwrite=overwrite)
        missing = results.missing(attentions)
        if missing:
            add_command(results, spelled(name_of(model), [file.name for file in texts]))
        with progress_bar(len(missing)) as on_step:
            measure(subject.model, subject.tokens, attentions, results, path, on_step=on_step)
        report = loss_report(results, path.stem)
        settings, table = results.settings, summary_table(results)
        show(
            table,
            f"{settings.model}\n{settings.text}, {settings.samples} x {format_size(settings.length)} tokens",
            table.titles[1:4],
            f"In nats; irreducible loss: {fit_exact(results).irreducible:.2f}. "
            "MuSe's clustering sees the whole sequence, and its loss is measured with that.",
        )
        write(report, path, path)


def _attentions(named: Sequence[str], presets: Sequence[str], length: int) -> list[str]:
    """Exact attention first: the others are compared with it."""
    if not named and not presets:
        return list(figure_attentions(length))
    requests = [request for preset in find_presets(list(presets), length) for request in preset.requests]
    of_presets = [request.attention for request in requests if request.length == length]
    return list(dict.fromkeys(["exact", *(full_name(attention, length) for attention in named), *of_presets]))
