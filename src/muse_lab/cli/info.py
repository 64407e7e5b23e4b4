"""`muse info`."""

from __future__ import annotations

import importlib.util
import json
from typing import Annotated

import torch
import typer
from rich.table import Table

from muse_attention.backends.choice import BACKENDS
from muse_attention.config import MuSeConfig
from muse_attention.sizes import format_size
from muse_lab.cli.app import app, console
from muse_lab.records.machine import describe_machine


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show versions, hardware, the backends that work here, and the default configurations."""
    machine = describe_machine()
    backends = {backend: _backend_state(backend) for backend in BACKENDS if backend != "auto"}
    configs = {format_size(length): str(MuSeConfig.for_length(length)) for length in (4096 * 4**n for n in range(5))}
    if as_json:
        typer.echo(json.dumps({"machine": machine, "backends": backends, "configs": configs}, indent=2))
        return
    for title, entries in (("machine", machine), ("backends", backends), ("MuSeConfig.for_length", configs)):
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name, entry in entries.items():
            table.add_row(name, "none" if entry is None else str(entry))
        console.print(table)
        console.print()


def _backend_state(backend: str) -> str:
    if backend == "triton" and not torch.cuda.is_available():
        return "needs a CUDA device"
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return "needs the package triton"
    return "available"
