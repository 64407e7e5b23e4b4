"""Reading untrusted files: regular files of limited size, and nothing else.

Reading a pipe can wait forever, and a device has no end. Both, folders, and files that are too large raise an OSError
that names the file.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

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


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", str(path))
