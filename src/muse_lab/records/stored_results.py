"""Results of a measurement as one JSON file: written, read back and continued by the same few lines, whatever they are.

A file has what the dataclass of its results declares, a `version`, and under `attentions` the fields of the
configuration behind each name in it: names are for people.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from muse_lab.records.attention_names import recorded_config
from muse_lab.records.dataclass_json import as_json, from_json
from muse_lab.records.earlier_results import REMEDY_BY_NAME, find_earlier
from muse_lab.records.files import replace_file
from muse_lab.records.machine import describe_machine
from muse_lab.records.regular_files import read_regular
from muse_lab.records.strict_json import parse_json

if TYPE_CHECKING:
    from torch import Tensor

OnStep = Callable[[str, int], None]
"""Told what a measurement begins with, and how many steps are finished."""
VERSION = 1
SECONDS_BETWEEN_WRITES = 2.0
"""At most this much work is lost. (Writing a large file after every step can take longer than the step.)"""


@dataclass
class StoredResults:
    """What all kinds of results share. A subclass declares its settings, a dataclass, and what it has measured."""

    command: ClassVar[str]
    """that measures them"""
    remedy: ClassVar[str] = REMEDY_BY_NAME
    """what a user can do with a file that cannot be continued"""
    is_finite: ClassVar[bool] = False
    """whether a NaN or an infinity makes a file unreadable"""
    packages: ClassVar[tuple[str, ...]] = ("transformers",)
    """whose versions count as part of the machine, where they are installed"""

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
    def start(cls, settings: Any, path: Path, *, overwrite: bool = False, remedy: str = "") -> Self:
        """The results in the file; empty ones of this machine if there is no file, or with `overwrite`.

        Raises ValueError, with the `remedy` of the class unless there is another, if those in the file have other
        settings, or were measured on another machine.
        """
        empty = cls({**describe_machine(), **_versions(cls.packages)}, settings)
        wanted, remedy = empty.conditions(), remedy or cls.remedy
        earlier = find_earlier(path, cls.read, cls.conditions, wanted, overwrite=overwrite, remedy=remedy)
        return empty if earlier is None else earlier

    @classmethod
    def check_readable(cls, path: Path, *, overwrite: bool = False) -> None:
        """Raise ValueError if there is a file that does not hold such results, unless it is to be replaced."""
        find_earlier(path, cls.read, vars, {}, overwrite=overwrite, remedy=cls.remedy)

    def conditions(self) -> dict[str, Any]:
        """What numbers that stand in one table have in common: settings, machine and versions, but not the day."""
        machine = {name: value for name, value in self.machine.items() if name != "date"}
        return {**vars(self.settings), **machine}

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `write` wrote; a ValueError if it is something else."""
        try:
            document = parse_json(read_regular(path), finite=cls.is_finite)
            if lacking := {"version", *as_json(cls({}, None))} - document.keys():
                raise ValueError(f"there is no {', '.join(sorted(lacking))}")
            results: Self = from_json(cls, document)
            results.check()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold the results of {cls.command}") from error
        if document["version"] != VERSION:
            raise ValueError(f"{path} has version {document['version']} of its results, not {VERSION}; measure again")
        return results

    def write(self, path: Path) -> None:
        """Replace the file in one step, so that it is whole at any moment."""
        configs = {name: recorded_config(name) for name in self.named}
        attentions = {name: config and dataclasses.asdict(config) for name, config in configs.items()}
        document = {"version": VERSION, **as_json(self), "attentions": attentions}
        replace_file(path, json.dumps(document, separators=(",", ":")) + "\n")

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


def _versions(packages: Iterable[str]) -> dict[str, str]:
    versions = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
