"""`muse eval`: its commands are in files of their own."""

from __future__ import annotations

import typer

from muse_attention.cli.app import app

evaluations = typer.Typer(no_args_is_help=True, help="What a model can do, under any attention.")
app.add_typer(evaluations, name="eval")
