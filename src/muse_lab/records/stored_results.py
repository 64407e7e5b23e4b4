"""Results of a measurement as one JSON file: written, read back and continued by the same few lines, whatever they are.

A file has what the dataclass of its results declares, a `version`, and under `attentions` all settings behind the names
in it, as defaults can change. A dict that is described by `entries` is a list of objects there. Files of version 1,
which have no number, have the settings beside the names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from muse_lab.records.attention_names import check_meaning, settings_of
from muse_lab.records.declared_types import check_types
from muse_lab.records.earlier_results import WAY_OUT_BY_NAME, find_earlier
from muse_lab.records.files import replace_file
from muse_lab.records.machine import describe_machine
from muse_lab.records.recorded_names import with_full_names
from muse_lab.records.regular_files import read_regular
from muse_lab.records.strict_json import parse_json

if TYPE_CHECKING:
    from torch import Tensor

OnStep = Callable[[str, int], None]
"""Told what a measurement begins with, and how many steps are finished."""
VERSION = 2
SECONDS_BETWEEN_WRITES = 2.0
"""At most this much work is lost. (Writing a large file after every step can take longer than the step.)"""


@dataclass
class StoredResults:
    """What all kinds of results share. A subclass declares its settings, a dataclass, and what it has measured."""

    command: ClassVar[str]
    """that measures them"""
    way_out: ClassVar[str] = WAY_OUT_BY_NAME
    """what a user can do with a file that cannot be continued"""
    is_finite: ClassVar[bool] = False
    """whether a NaN or an infinity makes a file unreadable"""
    readers: ClassVar[Mapping[type, Callable[[Any], Any]]] = {}
    """of structures that have one of their own"""
    packages: ClassVar[tuple[str, ...]] = ("transformers",)
    """whose versions count as part of the machine, where they are installed"""
    indent: ClassVar[int | None] = None
    """of the lines of a file, which is one line without it"""

    machine: dict[str, Any]
    settings: Any
    commands: list[str] = field(default_factory=list)

    @property
    def named(self) -> Iterable[str]:
        """Attentions whose numbers are here, by their full names."""
        raise NotImplementedError

    def check(self) -> None:
        """A ValueError if what was read does not fit together."""

    @classmethod
    def modernised(cls, document: dict[str, Any]) -> dict[str, Any]:
        """What was read, in the form that is written now."""
        return document

    def as_document(self) -> dict[str, Any]:
        """What is written."""
        attentions = [{"attention": name, "config": settings_of(name)} for name in dict.fromkeys(self.named)]
        return {"version": VERSION, **as_json(self), "attentions": attentions}

    @classmethod
    def start(cls, settings: Any, path: Path, *, overwrite: bool = False, way_out: str = "") -> Self:
        """The results in the file; empty ones of this machine if there is no file, or with `overwrite`.

        Raises ValueError, with the `way_out` of the class unless there is another, if those in the file have other
        settings, or were measured on another machine.
        """
        empty = cls({**describe_machine(), **_versions(cls.packages)}, settings)
        wanted, way_out = empty.conditions(), way_out or cls.way_out
        earlier = find_earlier(path, cls.read, cls.conditions, wanted, overwrite=overwrite, way_out=way_out)
        return empty if earlier is None else earlier

    @classmethod
    def check_readable(cls, path: Path, *, overwrite: bool = False) -> None:
        """Raise ValueError if there is a file that does not hold such results, unless it is to be replaced."""
        find_earlier(path, cls.read, vars, {}, overwrite=overwrite, way_out=cls.way_out)

    def conditions(self) -> dict[str, Any]:
        """What numbers that stand in one table have in common: settings, machine and versions, but not the day."""
        machine = {name: value for name, value in self.machine.items() if name != "date"}
        return {**vars(self.settings), **machine}

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `write` wrote, in this version or before; a ValueError if it is something else."""
        try:
            document = cls.modernised(with_full_names(parse_json(read_regular(path), finite=cls.is_finite)))
            version = document.pop("version", 1)
            if lacking := {one.metadata.get("name") or one.name for one in dataclasses.fields(cls)} - document.keys():
                raise ValueError(f"there is no {', '.join(sorted(lacking))}")
            meanings = list(_meanings(document))
            results: Self = _from_json(cls, document, cls.readers)
            check_types(results)
            results.check()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold the results of {cls.command}") from error
        if version not in range(1, VERSION + 1):
            raise ValueError(f"{path} has version {version} of its results; install a newer muse-attention to read it")
        for attention, settings in meanings:
            check_meaning(attention, settings)
        return results

    def write(self, path: Path) -> None:
        """Replace the file in one step, so that it is whole at any moment."""
        separators = (",", ":") if self.indent is None else None
        replace_file(path, json.dumps(self.as_document(), indent=self.indent, separators=separators) + "\n")

    @contextlib.contextmanager
    def saving(self, path: Path) -> Iterator[Callable[[], None]]:
        """Gives what to call after each step: it writes the file now and then. The end of the steps writes it too."""
        written, is_changed = time.monotonic(), False

        def save() -> None:
            nonlocal written, is_changed
            is_changed = True
            if time.monotonic() - written > SECONDS_BETWEEN_WRITES:
                self.write(path)
                written = time.monotonic()

        try:
            yield save
        finally:
            if is_changed:
                self.write(path)


def rounded(numbers: Tensor, digits: int) -> list[float]:
    """To so many significant digits: files stay small."""
    return [float(f"{number:.{digits}g}") for number in numbers.tolist()]


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


def _versions(packages: Iterable[str]) -> dict[str, str]:
    versions = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _meanings(document: Any) -> Iterator[tuple[str, Any]]:
    """Names and the settings behind them, which are taken out of the document."""
    document.setdefault("attentions", [])

    def found_in(part: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(part, dict):
            if "attention" in part and "config" in part:
                yield part["attention"], part.pop("config")
            part = part.values()
        elif not isinstance(part, list) or (part and isinstance(part[0], float | int)):
            return
        for inside in part:
            yield from found_in(inside)

    yield from found_in(document)
    del document["attentions"]


def called(name: str) -> Mapping[str, Any]:
    """Metadata of a field that has another name in the file."""
    return {"name": name}


def as_json(value: Any, listed: Mapping[str, Any] | None = None) -> Any:
    """Structures as what JSON has; `listed` describes a dict by `entries`."""
    if listed and "keys" in listed:
        return [_entry(key, one, listed) for key, one in value.items()]
    if dataclasses.is_dataclass(value):
        return {
            one.metadata.get("name") or one.name: as_json(getattr(value, one.name), one.metadata)
            for one in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {key: as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple) and not (value and isinstance(value[0], float | int | str)):
        return [as_json(one) for one in value]
    return value


def _entry(key: Any, value: Any, listed: Mapping[str, Any]) -> dict[str, Any]:
    parts = dataclasses.astuple(key) if dataclasses.is_dataclass(key) else key if isinstance(key, tuple) else (key,)  # type: ignore[arg-type]
    shown = as_json(value, listed["of_values"])
    return dict(zip(listed["keys"], parts, strict=True)) | ({listed["value"]: shown} if listed["value"] else shown)


def _from_json(declared: Any, found: Any, readers: Mapping[type, Any], listed: Mapping[str, Any] | None = None) -> Any:
    """Structures of what JSON made of them, without checking types. Fields that are not declared are left out."""
    inside, origin = typing.get_args(declared), typing.get_origin(declared) or declared
    if listed and "keys" in listed:
        return dict(_from_entry(inside, one, readers, listed) for one in found)
    if declared in readers:
        return readers[declared](found)
    if origin in (typing.Union, types.UnionType):
        arms = [arm for arm in inside if arm is not type(None)]
        return found if found is None or len(arms) > 1 else _from_json(arms[0], found, readers)
    if dataclasses.is_dataclass(declared):
        hints = typing.get_type_hints(declared)
        named = {one.metadata.get("name") or one.name: one for one in dataclasses.fields(declared) if one.init}
        return origin(
            **{
                one.name: _from_json(hints[one.name], found[name], readers, one.metadata)
                for name, one in named.items()
                if name in found
            }
        )
    if hasattr(declared, "_fields"):
        hints = typing.get_type_hints(declared)
        return declared(*(_from_json(hint, one, readers) for hint, one in zip(hints.values(), found, strict=False)))
    if origin in (list, tuple) and inside:
        return origin(
            found if inside[0] in (int, float, str) else [_from_json(inside[0], one, readers) for one in found]
        )
    if origin is dict and inside[1:] != (Any,):
        return {
            (int(key) if inside[0] is int else key): _from_json(inside[1], one, readers) for key, one in found.items()
        }
    return found


def _from_entry(declared: Any, entry: Any, readers: Mapping[type, Any], listed: Mapping[str, Any]) -> tuple[Any, Any]:
    keys, values = declared
    parts = [entry[name] for name in listed["keys"]]
    origin = typing.get_origin(keys) or keys
    key = tuple(parts) if origin is tuple else parts[0] if origin in (str, int) else origin(*parts)
    found = entry[listed["value"]] if listed["value"] else entry
    return key, _from_json(values, found, readers, listed["of_values"])
