"""Results of any measurement as one JSON file: writing, reading and continuing it.

A file has the fields that the dataclass of its results declares, a `version`, and under `attentions` the fields of the
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
from typing import Any, ClassVar, Self

from torch import Tensor

from muse_lab.records.attention_names import recorded_config
from muse_lab.records.dataclass_json import as_json, from_json
from muse_lab.records.earlier_results import REMEDY_BY_NAME, find_earlier
from muse_lab.records.files import replace_file
from muse_lab.records.machine import describe_machine
from muse_lab.records.untrusted import read_json

OnStep = Callable[[str, int], None]
"""Called with the step that begins, in words, and the number of finished steps."""
VERSION = 1
SECONDS_BETWEEN_WRITES = 2.0
"""At most this much work is lost. (Writing a large file after every step can take longer than the step.)"""


@dataclass
class StoredResults:
    """Base class of results. A subclass declares its settings, as a dataclass, and its measurements."""

    command: ClassVar[str]
    """the command that measures them"""
    remedy: ClassVar[str] = REMEDY_BY_NAME
    """what a user can do with a file that cannot be continued"""
    is_finite: ClassVar[bool] = False
    """whether a NaN or an infinity makes a file unreadable"""
    packages: ClassVar[tuple[str, ...]] = ("transformers",)
    """packages whose versions are part of the machine, if they are installed"""

    machine: dict[str, Any]
    settings: Any
    commands: list[str] = field(default_factory=list)

    @property
    def named(self) -> Iterable[str]:
        """Full names of the attentions with results."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ValueError if the fields of a file contradict each other."""

    @classmethod
    def start(cls, settings: Any, path: Path, *, overwrite: bool = False, remedy: str = "") -> Self:
        """The results in the file, or empty ones of this machine if there is no file, or with `overwrite`.

        Raises ValueError, with `remedy` or that of the class, if those in the file have other settings or another
        machine.
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
        """What the numbers of one table have in common: settings, machine and versions, but not the date."""
        machine = {name: value for name, value in self.machine.items() if name != "date"}
        return {**vars(self.settings), **machine}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote; raises ValueError for any other file."""
        try:
            document = read_json(path, finite=cls.is_finite)
            empty = as_json(cls({}, None))
            if lacking := {"version", *(name for name in empty if empty[name] is not None)} - document.keys():
                raise ValueError(f"there is no {', '.join(sorted(lacking))}")
            results: Self = from_json(cls, document)
            results.check()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold the results of {cls.command}") from error
        if document["version"] != VERSION:
            raise ValueError(f"{path} has version {document['version']} of its results, not {VERSION}; measure again")
        return results

    def write(self, path: Path) -> None:
        """Replace the file atomically."""
        configs = {name: recorded_config(name) for name in self.named}
        attentions = {name: config and dataclasses.asdict(config) for name, config in configs.items()}
        document = {"version": VERSION, **as_json(self), "attentions": attentions}
        replace_file(path, json.dumps(document, separators=(",", ":")) + "\n")

    @contextlib.contextmanager
    def saving(self, path: Path) -> Iterator[Callable[[], None]]:
        """Yield a function to call after each step, which writes the file now and then; the end writes it too."""
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
    """The numbers with `digits` significant digits, so that files stay small."""
    return [float(f"{number:.{digits}g}") for number in numbers.tolist()]


def _versions(packages: Iterable[str]) -> dict[str, str]:
    versions = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
