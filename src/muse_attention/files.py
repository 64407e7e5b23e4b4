"""Files that are whole or absent: written beside, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Put `content` where `path` is, in one step: should the disk be full, the old file is still there.

    An OSError names the file, as that of a full disk does not by itself.
    """
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with errors_naming(path):
            with open(unfinished, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """An OSError in here is one of `path`, and says so."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
