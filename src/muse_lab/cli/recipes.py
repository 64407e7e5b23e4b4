"""`muse recipes`."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.table import Table

from muse_lab.cli.app import app, console, user_errors
from muse_lab.pretraining.recipes import RECIPES, field_meanings, format_field, get_recipe


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(help=f"{', '.join(RECIPES)}.", show_default="all, with the fields of tiny")
    ] = None,
) -> None:
    """List the recipes of `muse train`, and what their fields mean, with their values in one recipe.

    Each field can be changed: muse train out/corpus --recipe tiny FIELD=VALUE
    """
    with user_errors():
        recipe = get_recipe(name or "tiny")
    if name is None:
        summaries = Table(box=SIMPLE, title="recipes", title_style="", title_justify="left", pad_edge=False)
        summaries.add_column("recipe")
        summaries.add_column("what it trains")
        for recipe_name, make in RECIPES.items():
            summaries.add_row(recipe_name, inspect.getdoc(make))
        console.print(summaries)
    table = Table(box=SIMPLE, title=f"recipe {name or 'tiny'}", title_style="", title_justify="left", pad_edge=False)
    table.add_column("field", no_wrap=True)
    table.add_column("value", justify="right", overflow="fold")
    table.add_column("meaning")
    for field in dataclasses.fields(recipe):
        table.add_row(field.name, format_field(getattr(recipe, field.name)), field_meanings()[field.name])
    console.print(table)
