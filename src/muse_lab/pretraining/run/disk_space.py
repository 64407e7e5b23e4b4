"""Whether a disk has room for what is to be written, before it is half written."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

_MARGIN = 2**20
"""Bytes for manifests, metrics and folders."""


def has_room(folder: Path, size: int) -> bool:
    return _free(folder) >= size + _MARGIN


def check_room(folder: Path, size: int) -> None:
    """Raise an OSError, as of a full disk, that says how much is missing."""
    if not has_room(folder, size):
        raise OSError(errno.ENOSPC, f"{describe_room(folder, size)}; free some space", str(folder))


def describe_room(folder: Path, size: int) -> str:
    return f"a checkpoint takes {_format(size)} and {_format(_free(folder))} are free"


def _free(folder: Path) -> int:
    """On the disk that a folder is on, or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _format(size: int) -> str:
    for unit, bytes_of in (("GB", 10**9), ("MB", 10**6)):
        if size >= bytes_of:
            return f"{size / bytes_of:.1f} {unit}"
    return f"{size:,} bytes"
