"""`muse fidelity`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from muse_attention.cli.app import (
    Device,
    Model,
    Text,
    app,
    console,
    default_device,
    file_stem,
    make_folder,
    new_table,
    progress_bar,
    run_errors,
    user_errors,
)
from muse_attention.evaluation.attentions import full_name
from muse_attention.evaluation.layers import Request, Results, as_csv, measure, start_results, steps
from muse_attention.evaluation.presets import PRESETS, Preset, find_presets
from muse_attention.evaluation.settings import Settings, describe_model, take_fingerprint
from muse_attention.evaluation.texts import read_samples
from muse_attention.files import replace_file
from muse_attention.machine import machine_lines
from muse_attention.pretrained import load_model
from muse_attention.sizes import format_size, parse_size


@app.command()
def fidelity(
    model: Model = "smollm2",
    text: Text = None,
    length: Annotated[str, typer.Option(help="Tokens of a sample; k means 1024.")] = "8k",
    samples: Annotated[int, typer.Option(help="Samples of the text.")] = 1,
    attention: Annotated[
        list[str] | None, typer.Option(help="Attention to measure, by name; may be repeated.", show_default="muse")
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(help=f"A table of the paper's kind, may be repeated: all, or {', '.join(PRESETS)}."),
    ] = None,
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("out/fidelity"),
    name: Annotated[str, typer.Option(help="File name, without ending.")] = "fidelity",
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the file has already.")] = False,
) -> None:
    """Measure how far attentions are from exact attention on the queries, keys and values of a model.

    Writes NAME.json after every layer, and NAME.csv, NAME.md, NAME.html and pictures at the end.
    """
    with user_errors():
        tokens = parse_size(length)
        presets = find_presets(preset or [], tokens)
        requests = _requests(presets, attention, tokens)
        stem = file_stem(name)
        make_folder(output)
        device = device or default_device()
        loaded, tokenizer = load_model(model, dtype=getattr(torch, dtype), device=device)
        taken = read_samples(tokenizer, text or [], tokens, samples)
        settings = Settings(
            describe_model(Path(model).name, loaded), taken.source, tokens, samples, device, dtype,
            take_fingerprint(loaded, taken.tokens),
        )  # fmt: skip
        path = output / f"{stem}.json"
        results = start_results(settings, path, resume=resume)
    command = _command_line(model, text, settings, attention, preset, stem)
    if command not in results.commands:
        results.commands.append(command)
    with run_errors(lambda: f"continue with: {command} --output {shlex.quote(str(output))} --resume"):
        with progress_bar(steps(loaded, requests, samples)) as on_step:
            measure(loaded, taken.tokens, requests, results, path, on_step=on_step)
        console.print(_table(results, requests))
        files = [path, output / f"{stem}.csv"]
        replace_file(files[1], as_csv(results))
    typer.echo(f"wrote {', '.join(map(str, files))}")


def _requests(presets: Sequence[Preset], attentions: Sequence[str] | None, length: int) -> list[Request]:
    named = list(attentions or ([] if presets else ["muse"]))
    requests = [Request(full_name(attention, length), length) for attention in named]
    return list(dict.fromkeys([*requests, *(request for preset in presets for request in preset.requests)]))


def _command_line(
    model: str,
    text: Sequence[Path] | None,
    settings: Settings,
    attentions: Sequence[str] | None,
    presets: Sequence[str] | None,
    name: str,
) -> str:
    """With every setting spelled out, but names of files and folders without where they are."""
    words = ["muse", "fidelity", Path(model).name]
    for path in text or []:
        words += ["--text", path.name]
    options: dict[str, Any] = {"length": format_size(settings.length), "samples": settings.samples}
    options |= {"device": settings.device, "dtype": settings.dtype}
    for option, value in options.items():
        words += [f"--{option}", str(value)]
    for attention in attentions or []:
        words += ["--attention", attention]
    for preset in presets or []:
        words += ["--preset", preset]
    return shlex.join([*words, "--name", name])


def _table(results: Results, requests: Sequence[Request]) -> Table:
    hardware, _ = machine_lines(results.machine)
    settings = results.settings
    table = new_table(f"{settings.model}\n{settings.text}\n{hardware}", "length", "RSE", "cosine", "lse gap")
    for request in requests:
        pooled = results.pooled(request)
        table.add_row(
            request.attention,
            format_size(request.length),
            f"{pooled['relative_squared_error']:.3g}",
            f"{pooled['cosine']:.4f}",
            f"{pooled['lse_gap']:.3g}",
        )
    return table
