"""`muse fidelity`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from muse_attention.cli.app import (
    Device,
    Overwrite,
    Resume,
    app,
    console,
    make_folder,
    new_table,
    progress_bar,
    user_errors,
)
from muse_attention.cli.language_model import Dtype, Model, Place, Text, name_of, open_subject
from muse_attention.cli.measuring import (
    Name,
    Output,
    Samples,
    add_command,
    measuring,
    results_file,
    spell,
    write,
)
from muse_attention.evaluation.attentions import full_name
from muse_attention.evaluation.fidelity.layers import FidelityRequest, FidelityResults, measure, steps
from muse_attention.evaluation.fidelity.presets import PRESETS, Preset, find_presets
from muse_attention.evaluation.fidelity.report import fidelity_report
from muse_attention.fidelity_columns import ERROR, GRADIENTS, RETRIEVAL, TAIL, known
from muse_attention.pretrained import DEFAULT_MODEL
from muse_attention.sizes import format_size, parse_size


@app.command()
def fidelity(
    model: Model = DEFAULT_MODEL,
    text: Text = None,
    length: Annotated[str, typer.Option(help="Tokens of a sample; k means 1024.")] = "8k",
    samples: Samples = 1,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="Attention to measure, by name, as muse:paper; may be repeated.",
            show_default="MuSeConfig.for_length, if there is no preset",
        ),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(help=f"A table of the paper's kind; may be repeated. all, or {', '.join(PRESETS)}."),
    ] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Measure the errors of gradients too, by a backward pass in every head.")
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
    output: Output = Path("out/fidelity"),
    name: Name = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
) -> None:
    """Measure how far attentions are from exact attention on the queries, keys and values of a model.

    Writes NAME.json every few seconds, and NAME.md, NAME.csv, NAME.html and pictures at the end. Run again,
    it adds what is missing.
    """
    texts = text or []
    with user_errors():
        place = Place.choose(device, dtype)
        tokens_each = parse_size(length)
        requests = _requests(find_presets(preset or [], tokens_each), attention, tokens_each)
        stem = name if name is not None else name_of(model)
        path = results_file(FidelityResults, output, stem, overwrite=overwrite)

    def spelled(model: str, texts: Sequence[object], **others: object) -> str:
        return spell(
            "fidelity", model, text=texts, length=format_size(tokens_each), samples=samples, attention=attention,
            preset=preset, gradients=gradients, device=place.device, dtype=place.dtype, name=stem, **others,
        )  # fmt: skip

    with measuring(path, spelled(model, texts, output=output), overwrite=overwrite):
        subject = open_subject(model, texts, tokens_each, samples, place)
        make_folder(output)
        results = FidelityResults.start(subject.settings, path, overwrite=overwrite)
        if not all(results.is_whole(request, gradients=gradients) for request in requests):
            add_command(results, spelled(name_of(model), [file.name for file in texts]))
        with progress_bar(steps(subject.model, requests, samples)) as on_step:
            measure(subject.model, subject.tokens, requests, results, path, gradients=gradients, on_step=on_step)
        for table in _tables(results, requests):
            console.print(table)
        write(fidelity_report(results, path.stem), path, path)


def _requests(presets: Sequence[Preset], attentions: Sequence[str] | None, length: int) -> list[FidelityRequest]:
    """Those named first, each once."""
    named = attentions or ([] if presets else ["muse"])
    requests = [FidelityRequest(full_name(attention, length), length) for attention in named]
    return list(dict.fromkeys([*requests, *(request for preset in presets for request in preset.requests)]))


def _tables(results: FidelityResults, requests: Sequence[FidelityRequest]) -> list[Table]:
    """The errors; what was retrieved; those of gradients. What is known of none of the requests is absent."""
    settings = results.settings
    title = (
        f"{settings.model}\n{settings.text}, {settings.samples} x {format_size(settings.length)} tokens, "
        f"{results.heads} heads"
    )
    pooled = [results.pooled(request) for request in requests]
    tables: list[Table] = []
    for group in ((*ERROR, *TAIL), RETRIEVAL, GRADIENTS):
        columns = known(group, pooled)
        if columns:
            table = new_table("" if tables else title, "length", *(column.narrow_title for column in columns))
            for request, row in zip(requests, pooled, strict=True):
                table.add_row(request.attention, format_size(request.length), *(column.cell(row) for column in columns))
            tables.append(table)
    return tables
