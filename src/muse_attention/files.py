"""Files that are whole or absent: written beside, then renamed."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Put `content` where `path` is, in one step: should the disk be full, the old file is still there.

    An OSError names the file, as that of a full disk does not by itself.
    """
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with open(unfinished, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)
