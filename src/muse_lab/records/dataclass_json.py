"""Dataclasses as JSON, and back with every type checked: what a dataclass declares is what its file has."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

_LARGEST = 2**63


def entries(
    *keys: str, name: str = "", value: str = "", of_values: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Metadata of a field that is a dict here, and in the file a list of objects: the parts of the key, and the value.

    Args:
        keys: names of the parts of the key
        name: of the list, if it is not that of the field
        value: name of the value, if that is not a structure, whose fields have their own names
        of_values: the entries that values are, if they are dicts too
    """
    return {"keys": keys, "name": name, "value": value, "of_values": of_values or {}}


def as_json(value: Any, listed: Mapping[str, Any] | None = None) -> Any:
    """Structures as what JSON has; `listed` describes a dict by `entries`."""
    if listed:
        return [_entry(key, one, listed) for key, one in value.items()]
    if dataclasses.is_dataclass(value):
        return {_name(one): as_json(getattr(value, one.name), one.metadata) for one in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple) and not (value and isinstance(value[0], float | int | str)):
        return [as_json(one) for one in value]
    return value


def from_json(declared: Any, found: Any, listed: Mapping[str, Any] | None = None) -> Any:
    """A structure of the declared type from what `as_json` gave; a TypeError, KeyError or ValueError if it is not one.

    Fields that are not declared are left out. An integer may stand for a float, as JSON does not tell them apart; a
    bool is no number.
    """
    inside, origin = typing.get_args(declared), typing.get_origin(declared) or declared
    if listed:
        return dict(_from_entry(inside, one, listed) for one in _checked(found, list))
    if declared is Any:
        return found
    if origin in (typing.Union, types.UnionType):
        arms = [arm for arm in inside if arm is not types.NoneType]
        return None if found is None and len(arms) < len(inside) else from_json(arms[0], found)
    if declared in (int, float):
        if type(found) is not declared and (declared is int or type(found) is not int):
            raise TypeError(f"{found!r} is not a {declared.__name__}")
        if type(found) is int and not -_LARGEST <= found < _LARGEST:
            raise ValueError("a number that is too large")
        return found
    if dataclasses.is_dataclass(declared):
        named = {_name(one): one for one in dataclasses.fields(declared) if one.init}
        hints, given = _hints(origin), _checked(found, dict)
        return origin(
            **{
                one.name: from_json(hints[one.name], given[name], one.metadata)
                for name, one in named.items()
                if name in given
            }
        )
    if hasattr(declared, "_fields"):
        return declared(*map(from_json, _hints(declared).values(), _checked(found, list)))
    if origin in (list, tuple):
        kinds = inside if origin is tuple and inside[1:] != (...,) else inside[:1] * len(_checked(found, list))
        return origin(from_json(kind, one) for kind, one in zip(kinds, _checked(found, list), strict=True))
    if origin is dict:
        return {
            int(key) if inside[0] is int else key: from_json(inside[1], one)
            for key, one in _checked(found, dict).items()
        }
    return _checked(found, declared)


def _name(one: dataclasses.Field[Any]) -> str:
    """Of a field, in the file."""
    return one.metadata.get("name") or one.name


def _entry(key: Any, value: Any, listed: Mapping[str, Any]) -> dict[str, Any]:
    parts = key if isinstance(key, tuple) else (key,)
    shown = as_json(value, listed["of_values"])
    return dict(zip(listed["keys"], parts, strict=True)) | ({listed["value"]: shown} if listed["value"] else shown)


def _from_entry(declared: tuple[Any, Any], entry: dict[str, Any], listed: Mapping[str, Any]) -> tuple[Any, Any]:
    parts = [entry[name] for name in listed["keys"]]
    key = from_json(declared[0], parts if len(parts) > 1 else parts[0])
    found = entry[listed["value"]] if listed["value"] else entry
    return key, from_json(declared[1], found, listed["of_values"])


def _checked(found: Any, kind: type) -> Any:
    if not isinstance(found, kind):
        raise TypeError(f"{found!r} is not a {kind.__name__}")
    return found


@functools.cache
def _hints(declared: Any) -> dict[str, Any]:
    return typing.get_type_hints(declared)
