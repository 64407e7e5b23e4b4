"""Reading untrusted files: regular files of limited size, and nothing else, and the JSON in them.

Reading a pipe can wait forever, and a device has no end. Both, folders, and files that are too large raise an OSError
that names the file.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

LARGEST = 2**26
"""Default limit on the bytes of a file."""


def read_regular(path: Path, largest: int = LARGEST) -> bytes:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than the {largest:,} that are read", str(path))
        return file.read(largest)


def open_regular(path: Path) -> BufferedReader:
    stat_regular(path)  # first: opening a device may already have effects
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # replaced meanwhile
        file.close()
        raise _not_regular(path)
    return file


def stat_regular(path: Path) -> os.stat_result:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise _not_regular(path)
    return status


def read_json(path: Path, largest: int = LARGEST, *, finite: bool = True) -> Any:
    """`parse_json` of a regular file."""
    return parse_json(read_regular(path, largest), finite=finite)


def parse_json(content: str | bytes, *, finite: bool = True) -> Any:
    """`json.loads`, but raises ValueError for whatever cannot be read, and for an object that has a key twice.

    Args:
        finite: also refuse NaN, infinities and numbers beyond the range of a float
    """
    numbers: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _parse_finite} if finite else {}
    try:
        return json.loads(content, object_pairs_hook=_unique_keys, **numbers)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", str(path))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key occurs twice")
    return members


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _refuse(text)
    return number


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")
