"""The JSON files in a folder that `muse report` looks into."""

from __future__ import annotations

import os
from pathlib import Path

_MOST_ENTRIES = 10_000
"""Of a folder of results, with all in it: more are a home folder, or a disk."""
_LEFT_OUT = {"node_modules", "site-packages"}
_ENVIRONMENT = "pyvenv.cfg"
"""In the folder of a virtual environment."""


def find_json(folder: Path) -> list[Path]:
    """In the order of their names; those in hidden folders, in virtual environments and behind links are left out.

    Raises ValueError for a folder that holds too much, or that cannot be read.
    """
    found: list[Path] = []
    waiting, seen = [folder], 0
    while waiting:
        inner = waiting.pop()
        try:
            with os.scandir(inner) as entries:
                for entry in entries:
                    seen += 1
                    if seen > _MOST_ENTRIES:
                        raise ValueError(
                            f"{folder} holds more than {_MOST_ENTRIES:,} files; give the folder of the results alone"
                        )
                    if entry.is_dir(follow_symlinks=False):
                        waiting += [Path(entry.path)] if _is_entered(entry) else []
                    elif entry.name.endswith(".json") and not entry.is_dir():
                        found.append(Path(entry.path))
        except OSError as error:
            raise ValueError(
                f"cannot read the folder {inner}: {error.strerror}; make it readable, or name the files to report"
            ) from None
    return sorted(found)


def _is_entered(folder: os.DirEntry[str]) -> bool:
    if folder.name.startswith(".") or folder.name in _LEFT_OUT:
        return False
    return not os.path.exists(os.path.join(folder.path, _ENVIRONMENT))
