"""`muse eval`: its commands are in files of their own."""

from __future__ import annotations

import typer

from muse_attention.cli.app import app

evaluations = typer.Typer(help="What a model can do, under any attention.")
app.add_typer(evaluations, name="eval")


@evaluations.callback(invoke_without_command=True)
def evaluate(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
