"""`muse errors`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from muse_attention.benchmark.tables import format_error, format_ratio
from muse_attention.cli.app import (
    Device,
    Overwrite,
    app,
    console,
    default_device,
    is_out_of_memory,
    make_folder,
    new_table,
    progress_bar,
    report_written,
    say,
    user_errors,
)
from muse_attention.earlier_results import find_earlier
from muse_attention.machine import describe_machine, machine_lines
from muse_attention.plots import plot_error_by_position
from muse_attention.sizes import format_size, parse_size
from muse_attention.synthetic_errors import STEPS, Errors, Settings, measure_errors


@app.command()
def errors(
    length: Annotated[str, typer.Option(help="Sequence length; k means 1024.")] = "16k",
    heads: Annotated[int, typer.Option(help="Heads.")] = 2,
    device: Device = None,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("out/errors"),
    overwrite: Overwrite = False,
) -> None:
    """Compare MuSe of the paper's sizes, and MoBA and block-diagonal attention as sparse, with exact attention.

    On synthetic data. Results that are there already are shown, not measured again.
    """
    with user_errors():
        settings = Settings(parse_size(length), heads=heads, device=device or default_device())
        path = output / "errors.json"
        wanted = Errors(describe_machine(), settings, [], []).conditions()
        earlier = find_earlier(path, Errors.read, Errors.conditions, wanted, overwrite=overwrite)
        make_folder(output)
    try:
        with progress_bar(STEPS) as on_step:
            result = earlier or measure_errors(settings, on_step=on_step)
    except KeyboardInterrupt:
        say("interrupted; nothing was written")
        raise typer.Exit(130) from None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        say("out of memory; choose a smaller --length or fewer --heads")
        raise typer.Exit(1) from None
    console.print(_errors_table(result))
    if earlier is None:
        result.write(path)
    report_written([path], output / "error_by_position.png", lambda picture: _plot_error(result, picture))


def _errors_table(found: Errors) -> Table:
    settings = found.settings
    hardware, _ = machine_lines(found.machine)
    title = f"{hardware}\ncausal, length {format_size(settings.length)}, {settings.heads} heads, on {settings.device}"
    table = new_table(title, "forward +\nbackward", "speed-up", "RSE", "cosine", "future\ninfluence")
    for line in found.lines:
        table.add_row(
            line.attention,
            f"{line.forward_backward_seconds * 1000:,.0f} ms",
            format_ratio(line.speedup),
            format_error(line.relative_squared_error),
            f"{line.cosine:.4f}",
            format_error(line.future_influence),
        )
    return table


def _plot_error(found: Errors, path: Path) -> None:
    curves = {
        line.kind: list(zip(found.bin_centres, line.error_by_position, strict=True))
        for line in found.lines
        if line.kind != "exact"
    }
    plot_error_by_position(curves, path, length=found.settings.length, block_size=found.settings.block_size)
