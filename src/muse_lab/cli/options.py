"""Options: lists, comma-separated or repeated, and groups that several commands share.

    @app.command()
    @with_option_groups
    def loss(attention: Annotated[Words, attentions("...", "...")] = None, run: ModelRun = _RUN) -> None: ...

has an option for each field of the dataclass `ModelRun`, with the defaults of `_RUN`, and receives a `ModelRun` of the
given values.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, get_type_hints

import typer

from muse_attention.registry import split_names

Words = list[str] | None


def split_words(texts: Iterable[str]) -> list[str]:
    """The words between commas, each once."""
    return list(dict.fromkeys(word.strip() for text in texts for word in text.split(",")))


def option(meaning: str, default: str = "", *flags: str) -> Any:
    """An option; `default` is what the help shows in place of the parameter's own."""
    return typer.Option(*flags, help=meaning, show_default=default or True)


def flag(name: str, meaning: str) -> Any:
    """An option without a value."""
    return typer.Option(name, help=meaning)


def listed(meaning: str, default: str, *flags: str, split: Callable[[Iterable[str]], list[str]] = split_words) -> Any:
    """An option of several words; `default` is what the help shows."""
    return typer.Option(
        *flags,
        help=f"{meaning} Comma-separated or repeated.",
        show_default=default,
        callback=lambda given: given and split(given),
    )


def attentions(meaning: str, default: str) -> Any:
    """An option of several attentions by name."""
    return listed(f"{meaning}, by name, such as muse:paper.", default, split=split_names)


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for every field of each parameter whose default is a dataclass."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if not dataclasses.is_dataclass(parameter.default):
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        groups[name] = parameter.default
        kinds = get_type_hints(type(parameter.default), include_extras=True)
        parameters += [
            parameter.replace(name=field, annotation=kinds[field], default=getattr(parameter.default, field))
            for field in _fields(parameter.default)
        ]

    def with_options(**given: Any) -> None:
        for name, default in groups.items():
            given[name] = dataclasses.replace(default, **{field: given.pop(field) for field in _fields(default)})
        command(**given)

    described: Any = with_options
    described.__name__, described.__doc__ = command.__name__, command.__doc__
    described.__signature__ = inspect.Signature(parameters)
    described.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def _fields(group: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(group)]
