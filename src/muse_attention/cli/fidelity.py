"""`muse fidelity`."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from muse_attention.cli.app import (
    Device,
    app,
    console,
    draw_picture,
    file_stem,
    make_folder,
    new_table,
    progress_bar,
    run_errors,
    user_errors,
)
from muse_attention.cli.language_model import (
    Dtype,
    Model,
    Place,
    Text,
    how_to_continue,
    name_of,
    open_subject,
    short_warnings,
    spell_command,
)
from muse_attention.evaluation.attentions import full_name
from muse_attention.evaluation.fidelity.layers import (
    Request,
    Results,
    as_csv,
    measure,
    read_results,
    start_results,
    steps,
)
from muse_attention.evaluation.fidelity.presets import ERROR_CONTROL, PRESETS, Preset, find_presets
from muse_attention.evaluation.fidelity.report import (
    cluster_curves,
    headline,
    html_report,
    key_curves,
    markdown_report,
    paper_curves,
    shown_presets,
)
from muse_attention.fidelity_columns import ERROR, GRADIENTS, RETRIEVAL, TAIL, known
from muse_attention.files import replace_file
from muse_attention.plots import plot_error_against_clusters, plot_error_against_keys, plot_heat_map
from muse_attention.pretrained import DEFAULT_MODEL
from muse_attention.sizes import format_size, parse_size


@app.command()
def fidelity(
    model: Model = DEFAULT_MODEL,
    text: Text = None,
    length: Annotated[str, typer.Option(help="Tokens of a sample; k means 1024.")] = "8k",
    samples: Annotated[int, typer.Option(help="Samples, one after another in the text.")] = 1,
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
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("out/fidelity"),
    name: Annotated[
        str | None, typer.Option(help="File name, without ending.", show_default="the name of the model")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the file has already.")] = False,
) -> None:
    """Measure how far attentions are from exact attention on the queries, keys and values of a model.

    Writes NAME.json every few seconds, and NAME.md, NAME.csv, NAME.html and pictures at the end.
    """
    texts = text or []
    with user_errors():
        place = Place.choose(device, dtype)
        tokens_each = parse_size(length)
        presets = find_presets(preset or [], tokens_each)
        requests = _requests(presets, attention, tokens_each)
        stem = file_stem(name if name is not None else name_of(model))
        path = output / f"{stem}.json"
        if resume and path.exists():
            read_results(path)  # what is broken should be known before a model is loaded
    options = [("--attention", asked) for asked in attention or []] + [("--preset", asked) for asked in preset or []]
    flags = ["--gradients"] if gradients else []
    command_line = functools.partial(spell_command, "fidelity", tokens_each, samples, options, place, stem, flags=flags)
    again = f"{command_line(model, map(str, texts))} --output {shlex.quote(str(output))} --resume"
    with run_errors(lambda: how_to_continue(path, again)), user_errors(), short_warnings():
        subject = open_subject(model, texts, tokens_each, samples, place)
        make_folder(output)
        results = start_results(subject.settings, path, resume=resume)
        command = command_line(name_of(model), (file.name for file in texts))
        is_whole = all(results.is_whole(request, gradients=gradients) for request in requests)
        if not is_whole and command not in results.commands:
            results.commands.append(command)
        with progress_bar(steps(subject.model, requests, samples)) as on_step:
            measure(subject.model, subject.tokens, requests, results, path, gradients=gradients, on_step=on_step)
        for table in _fidelity_tables(results, requests):
            console.print(table)
        write_fidelity_reports(results, path)


def _requests(presets: Sequence[Preset], attentions: Sequence[str] | None, length: int) -> list[Request]:
    """Those named first, each once."""
    named = attentions or ([] if presets else ["muse"])
    requests = [Request(full_name(attention, length), length) for attention in named]
    return list(dict.fromkeys([*requests, *(request for preset in presets for request in preset.requests)]))


def _fidelity_tables(results: Results, requests: Sequence[Request]) -> list[Table]:
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
                cells = [column.cell(row) for column in columns]
                table.add_row(request.attention, format_size(request.length), *cells)
            tables.append(table)
    return tables


def write_fidelity_reports(results: Results, path: Path) -> None:
    title = f"Fidelity: {path.stem}"
    files = {
        path.with_suffix(".md"): markdown_report(results, title=title),
        path.with_suffix(".csv"): as_csv(results),
    }
    for file, content in files.items():
        replace_file(file, content)
    drawings = {f"{path.stem}-{what.replace(' ', '-')}.png": (what, draw) for what, draw in _drawings(results).items()}
    drawn = {
        path.with_name(file): what
        for file, (what, draw) in drawings.items()
        if draw_picture(path.with_name(file), draw)
    }
    pictures = {what: file.read_bytes() for file, what in drawn.items()}
    page = path.with_suffix(".html")
    replace_file(page, html_report(results, pictures, title=title))
    typer.echo(f"wrote {', '.join(map(str, [path, *files, *drawn, page]))}")


def _drawings(results: Results) -> dict[str, Callable[[Path], None]]:
    """How to draw each picture, by what it shows."""
    errors = results.by_head(headline(results), "relative_squared_error").tolist()
    drawings: dict[str, Callable[[Path], None]] = {
        "error of every head": functools.partial(plot_heat_map, errors, results.layers)
    }
    presets = {preset.name: preset for preset in shown_presets(results)}
    controlled = presets.get(ERROR_CONTROL)
    if controlled is not None and (by_keys := key_curves(results, controlled)):
        drawings["error against retrieved keys"] = functools.partial(plot_error_against_keys, by_keys)
    joint = presets.get("joint")
    if joint is not None and all(cluster_curves(results, joint).values()):
        panels = {"here": cluster_curves(results, joint), "the paper's 1B model, 64k": paper_curves()}
        drawings["error against clusters"] = functools.partial(plot_error_against_clusters, panels)
    return drawings
