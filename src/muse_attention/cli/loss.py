"""`muse loss`."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
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
from muse_attention.evaluation.attentions import figure_attentions, full_name
from muse_attention.evaluation.fidelity.presets import PRESETS, find_presets
from muse_attention.evaluation.loss.curves import SHORTEST, binned, fit_exact, reducible_curve
from muse_attention.evaluation.loss.positions import Results, measure, read_results, start_results
from muse_attention.evaluation.loss.report import as_csv, html_report, markdown_report, summary_table
from muse_attention.files import replace_file
from muse_attention.plots import plot_loss
from muse_attention.pretrained import DEFAULT_MODEL
from muse_attention.sizes import format_size, parse_size


@app.command()
def loss(
    model: Model = DEFAULT_MODEL,
    text: Text = None,
    length: Annotated[str, typer.Option(help="Tokens of a sample; k means 1024.")] = "8k",
    samples: Annotated[int, typer.Option(help="Samples, one after another in the text.")] = 4,
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
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("out/loss"),
    name: Annotated[
        str | None, typer.Option(help="File name, without ending.", show_default="the name of the model")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the samples that the file has already.")] = False,
) -> None:
    """Measure a language model's loss at every position of long texts, under one attention after another.

    Writes NAME.json after every sample of every attention, and NAME.md, NAME.csv, NAME.png and NAME.html at the end.
    """
    texts = text or []
    with user_errors():
        place = Place.choose(device, dtype)
        tokens_each = _tokens_each(length)
        attentions = _attentions(attention or [], preset or [], tokens_each)
        stem = file_stem(name if name is not None else name_of(model))
        path = output / f"{stem}.json"
        if resume and path.exists():
            read_results(path)  # what is broken should be known before a model is loaded
    options = [("--attention", attention) for attention in attentions]
    command_line = functools.partial(spell_command, "loss", tokens_each, samples, options, place, stem)
    again = f"{command_line(model, map(str, texts))} --output {shlex.quote(str(output))} --resume"
    with run_errors(lambda: how_to_continue(path, again)), user_errors(), short_warnings():
        subject = open_subject(model, texts, tokens_each, samples, place)
        make_folder(output)
        results = start_results(subject.settings, path, resume=resume)
        missing = results.missing(attentions)
        command = command_line(name_of(model), (file.name for file in texts))
        if missing and command not in results.commands:
            results.commands.append(command)
        with progress_bar(len(missing)) as on_step:
            measure(subject.model, subject.tokens, attentions, results, path, on_step=on_step)
        console.print(_loss_table(results))
        write_loss_reports(results, path)


def _tokens_each(length: str) -> int:
    tokens = parse_size(length)
    if tokens < SHORTEST:
        raise ValueError(f"--length {tokens} is too short for a curve; choose at least {SHORTEST}")
    return tokens


def _attentions(named: Sequence[str], presets: Sequence[str], length: int) -> list[str]:
    """Exact attention first: the others are compared with it."""
    if not named and not presets:
        return list(figure_attentions(length))
    requests = [request for preset in find_presets(list(presets), length) for request in preset.requests]
    of_presets = [request.attention for request in requests if request.length == length]
    return list(dict.fromkeys(["exact", *(full_name(attention, length) for attention in named), *of_presets]))


def _loss_table(results: Results) -> Table:
    settings = results.settings
    size = f"{settings.samples} x {format_size(settings.length)} tokens"
    last = format_size(binned(results, "exact")[-1].first)
    table = new_table(
        f"{settings.model}\n{settings.text}, {size}", "mean\nloss", "gap to\nexact", f"gap from\n{last} on"
    )
    table.caption = (
        f"In nats; irreducible loss: {fit_exact(results).irreducible:.2f}. "
        "MuSe's clustering sees the whole sequence, and its loss is measured with that."
    )
    for *row, _ in summary_table(results)[1]:
        table.add_row(*row)
    return table


def write_loss_reports(results: Results, path: Path) -> None:
    if "exact" not in results.whole:
        raise ValueError("exact attention has not seen all samples yet; continue the run with --resume")
    title = f"Loss against position: {path.stem}"
    picture, page = path.with_suffix(".png"), path.with_suffix(".html")
    files = {path.with_suffix(".md"): markdown_report(results, title=title), path.with_suffix(".csv"): as_csv(results)}
    for file, content in files.items():
        replace_file(file, content)
    is_drawn = draw_picture(picture, functools.partial(_plot_loss, results))
    replace_file(page, html_report(results, title=title, picture=picture.read_bytes() if is_drawn else None))
    written = [path, *files, *([picture] if is_drawn else []), page]
    typer.echo(f"wrote {', '.join(map(str, written))}")


def _plot_loss(results: Results, path: Path) -> None:
    irreducible = fit_exact(results).irreducible
    curves = {
        attention.removeprefix("muse:"): reducible_curve(results, attention, irreducible) for attention in results.whole
    }
    plot_loss(curves, path, exact="exact")
