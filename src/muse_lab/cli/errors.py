"""`muse errors`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muse_attention.sizes import parse_size
from muse_lab.benchmark.errors_report import about, errors_report, errors_table
from muse_lab.benchmark.synthetic_errors import STEPS, Errors, ErrorSettings, measure_errors
from muse_lab.cli.app import Device, Overwrite, app, make_folder, progress_bar, run_errors, user_errors
from muse_lab.cli.language_model import Place
from muse_lab.cli.measuring import Output, add_command, show, spell, write
from muse_lab.records.machine import machine_lines


@app.command()
def errors(
    context: typer.Context,
    length: Annotated[str, typer.Option(help="Sequence length; k means 1024.")] = "16k",
    heads: Annotated[int, typer.Option(help="Heads.")] = 2,
    device: Device = None,
    output: Output = Path("out/errors"),
    overwrite: Overwrite = False,
) -> None:
    """Compare MuSe of the paper's sizes, and MoBA and block-diagonal attention as sparse, with exact attention.

    On synthetic data. Results that are there already are shown, not measured again.
    """
    with user_errors():
        settings = ErrorSettings(parse_size(length), heads=heads, device=Place.choose(device, None).device)
        path = output / "errors.json"
        results = Errors.start(settings, path, overwrite=overwrite)
        make_folder(output)
    less = "choose a smaller --length or fewer --heads"
    if not results.lines:
        with run_errors(lambda: "nothing was written", lambda: less), progress_bar(STEPS) as on_step:
            measure_errors(results, on_step=on_step)
        add_command(results, spell(context, {"device": settings.device}, is_recorded=True))
        results.write(path)
    table = errors_table(results)
    show(table, f"{machine_lines(results.machine)[0]}\n{about(results)}", table.titles[1:])
    write(errors_report(results), path, path)
