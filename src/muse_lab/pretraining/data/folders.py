"""Folders, listed in the order of names, whatever the order of the file system."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

Entry = os.DirEntry[str]


def list_folder(folder: str | Path) -> list[Entry]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def walk_files(
    folder: str | Path, enters: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Entry | None]]:
    """Paths, relative to `folder`, of all entries but folders, in folders whose name `enters` accepts.

    None stands for a folder that cannot be read; an OSError is raised if that is `folder` itself. No link to a folder
    is followed. There is no recursion: paths can be deeper than Python's stack.
    """
    waiting = [(entry.name, entry) for entry in reversed(list_folder(folder))]
    while waiting:
        path, entry = waiting.pop()
        if not entry.is_dir(follow_symlinks=False):
            yield path, entry
        elif enters(entry.name):
            try:
                inner = list_folder(entry.path)
            except OSError:
                yield path, None
            else:
                waiting += [(f"{path}/{child.name}", child) for child in reversed(inner)]
