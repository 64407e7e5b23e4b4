"""Whether what was read from a file has the types that its dataclasses declare."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterable
from typing import Any

_LARGEST = 2**63


def check_types(value: Any) -> None:
    """A TypeError unless every field of a dataclass, and of those in it, has the type that it is declared with."""
    kind: Any = type(value)
    for name, declared in _fields(kind).items():
        if not _is(getattr(value, name), declared):
            raise TypeError(f"{kind.__name__}.{name} is not a {declared}")


def _is(value: Any, declared: Any) -> bool:
    """An integer may stand for a float, as JSON does not tell them apart; a bool is not a number."""
    if declared is Any:
        return True
    if declared is int:
        return type(value) is int and -_LARGEST <= value < _LARGEST
    if declared is float:
        return type(value) is float or _is(value, int)
    inside = typing.get_args(declared)
    origin = typing.get_origin(declared) or declared
    if origin in (typing.Union, types.UnionType):
        return any(_is(value, one) for one in inside)
    if not isinstance(value, origin):
        return False
    if origin is dict:
        keys, values = inside
        return _are(value, keys) and _are(value.values(), values)
    if origin is list or (origin is tuple and inside[1:] == (...,)):
        return _are(value, inside[0])
    if origin is tuple:
        return len(value) == len(inside) and all(map(_is, value, inside))
    return all(_is(getattr(value, name), one) for name, one in _fields(origin).items())


def _are(values: Iterable[Any], declared: Any) -> bool:
    return all(_is(value, declared) for value in values)


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    """Of a dataclass or a named tuple, by name; other types have none."""
    if not dataclasses.is_dataclass(kind) and not hasattr(kind, "_fields"):
        return {}
    hints = typing.get_type_hints(kind)
    return {name: declared for name, declared in hints.items() if typing.get_origin(declared) is not typing.ClassVar}
