"""`muse eval`: the group of commands that ask a language model for answers."""

from __future__ import annotations

import typer

from muse_lab.cli.app import app

evaluations = typer.Typer(help="Ask a language model for answers, under any attention.")
app.add_typer(evaluations, name="eval")


@evaluations.callback(invoke_without_command=True)
def evaluate(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
