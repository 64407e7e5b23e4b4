"""Dataclasses as JSON and back, with every type checked against what the dataclass declares."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

_LARGEST = 2**63


def entries(*keys: str, name: str = "", value: str = "") -> Mapping[str, Any]:
    """Metadata of a dict that is a list of objects in the file, each with the parts of the key, and the value.

    Args:
        keys: names of the parts of the key
        name: name of the list, if it is not that of the field
        value: name of the value, if that is not a structure, whose fields have their own names
    """
    return {"keys": keys, "name": name, "value": value}


def as_json(value: Any, listed: Mapping[str, Any] | None = None) -> Any:
    """Structures as JSON values; `listed` describes a dict by `entries`."""
    if listed:
        return [_entry(key, item, listed) for key, item in value.items()]
    if dataclasses.is_dataclass(value):
        return {
            _name(field): as_json(getattr(value, field.name), field.metadata) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not (value and isinstance(value[0], float | int | str)):
        return [as_json(item) for item in value]
    return value


def from_json(declared: Any, value: Any, listed: Mapping[str, Any] | None = None) -> Any:
    """The structure of the declared type that `as_json` wrote; raises TypeError, KeyError or ValueError otherwise.

    Fields that are not declared are left out. An integer may stand for a float, as JSON does not tell them apart; a
    bool is no number.
    """
    parts, origin = typing.get_args(declared), typing.get_origin(declared) or declared
    if listed:
        return dict(_from_entry(parts, entry, listed) for entry in _checked(value, list))
    if declared is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        options = [option for option in parts if option is not types.NoneType]
        return None if value is None and len(options) < len(parts) else from_json(options[0], value)
    if declared in (int, float):
        if type(value) is not declared and (declared is int or type(value) is not int):
            raise TypeError(f"{value!r} is not a {declared.__name__}")
        if type(value) is int and not -_LARGEST <= value < _LARGEST:
            raise ValueError("a number that is too large")
        return value
    if dataclasses.is_dataclass(declared):
        fields = {_name(field): field for field in dataclasses.fields(declared) if field.init}
        hints, given = _hints(origin), _checked(value, dict)
        return origin(
            **{
                field.name: from_json(hints[field.name], given[name], field.metadata)
                for name, field in fields.items()
                if name in given
            }
        )
    if hasattr(declared, "_fields"):
        return declared(*map(from_json, _hints(declared).values(), _checked(value, list)))
    if origin in (list, tuple):
        kinds = parts if origin is tuple and parts[1:] != (...,) else parts[:1] * len(_checked(value, list))
        return origin(from_json(kind, item) for kind, item in zip(kinds, _checked(value, list), strict=True))
    if origin is dict:
        return {
            int(key) if parts[0] is int else key: from_json(parts[1], item)
            for key, item in _checked(value, dict).items()
        }
    return _checked(value, declared)


def _name(field: dataclasses.Field[Any]) -> str:
    """The name of a field in the file."""
    return field.metadata.get("name") or field.name


def _entry(key: Any, value: Any, listed: Mapping[str, Any]) -> dict[str, Any]:
    parts = key if isinstance(key, tuple) else (key,)
    shown = as_json(value)
    return dict(zip(listed["keys"], parts, strict=True)) | ({listed["value"]: shown} if listed["value"] else shown)


def _from_entry(declared: tuple[Any, Any], entry: dict[str, Any], listed: Mapping[str, Any]) -> tuple[Any, Any]:
    parts = [entry[name] for name in listed["keys"]]
    key = from_json(declared[0], parts if len(parts) > 1 else parts[0])
    value = entry[listed["value"]] if listed["value"] else entry
    return key, from_json(declared[1], value)


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


@functools.cache
def _hints(declared: Any) -> dict[str, Any]:
    return typing.get_type_hints(declared)
