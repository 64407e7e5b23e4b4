"""One policy for every command that writes results: continue equal ones, refuse others, replace by `--overwrite`.

earlier = find_earlier(path, read_results, described, wanted, overwrite=overwrite)
results = Results(...) if earlier is None else earlier
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

REMEDY = "choose another --output, or replace it with --overwrite"
"""What a user can do about results that differ."""
REMEDY_BY_NAME = "choose another --name or --output, or replace it with --overwrite"
"""The same, for a command that names its files."""
_LONGEST_VALUE = 60

Results = TypeVar("Results")


def find_earlier(
    path: Path,
    read: Callable[[Path], Results],
    described: Callable[[Results], Mapping[str, object]],
    wanted: Mapping[str, object],
    *,
    overwrite: bool,
    remedy: str = REMEDY,
) -> Results | None:
    """The results at a path if they can be continued, None if there are none or they are to be replaced.

    Args:
        read: raises ValueError if the file holds something else
        described: conditions of results, by name: settings, machine, versions
        wanted: conditions that the results must have

    Raises ValueError, with `remedy`, for a file that cannot be read, and for results under other conditions.
    """
    if overwrite or not path.exists():
        return None
    try:
        earlier = read(path)
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from error
    check_same(path, described(earlier), wanted, remedy=remedy)
    return earlier


def check_same(
    path: Path, earlier: Mapping[str, object], wanted: Mapping[str, object], *, remedy: str = REMEDY
) -> None:
    """Raise ValueError, naming what differs, unless earlier results have every value that is wanted."""
    differing = [name for name, value in wanted.items() if earlier.get(name) != value]
    if differing:
        changes = ", ".join(f"{name} was {_short(earlier.get(name))}, now {_short(wanted[name])}" for name in differing)
        raise ValueError(f"{path} has other results: {changes}; {remedy}")


def _short(value: object) -> str:
    text = "none" if value is None else " ".join(str(value).split())
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
