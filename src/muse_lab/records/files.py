"""Atomic writes of files and folders (written aside, then renamed), and a lock on a folder.

Links are not followed: a link in the place of a written file or folder is replaced, and its target is left alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_RANDOM_BYTES = 8
"""In the name of an unfinished file, so that nobody can guess the name and create it first."""
_ABANDONED_SECONDS = 3600.0
"""Age of an unfinished file whose writer was killed: a write takes less."""


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace the file `path` by `content` atomically: if the disk is full, the old file stays.

    Every OSError names the file, also if the disk is full. Unfinished files of killed processes are removed.
    """
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(_RANDOM_BYTES)}.tmp")
    try:
        with errors_naming(path):
            with open(unfinished, "xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    _remove_abandoned(path)


def _remove_abandoned(path: Path) -> None:
    name = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}\.tmp")
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if not name.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                continue
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_SECONDS:
                os.unlink(entry.path)


def new_folder(folder: Path) -> None:
    """Make an empty folder, in place of what a killed process left there."""
    with errors_naming(folder):
        remove_tree(folder)
        folder.mkdir(parents=True)


def replace_folder(unfinished: Path, folder: Path) -> None:
    """Replace `folder` by the folder `unfinished`, whose files are flushed to disk before it is renamed."""
    with errors_naming(folder):
        for file in unfinished.iterdir():
            sync(file)
        sync(unfinished)
        remove_folder(folder)
        os.rename(unfinished, folder)
        sync(folder.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder, renamed first so that a half-removed one never looks complete. A missing one is no error."""
    removed = folder.with_name(f"{folder.name}.old.tmp")
    with errors_naming(folder):
        remove_tree(removed)
        if os.path.lexists(folder):
            os.rename(folder, removed)
            remove_tree(removed)


def remove_tree(path: Path) -> None:
    """Remove a folder and its contents, as far as possible, or a file, or a link but not its target."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of files, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a folder and lock it inside the `with` block; raises ValueError if another process holds the lock.

    The lock ends with the process and with those that it forked. Folders that were made here and are empty are removed
    again. Where the system has no locks, none is taken.
    """
    with errors_naming(folder):
        made = [missing for missing in (folder, *folder.parents) if not missing.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder):
            yield
    finally:
        with contextlib.suppress(OSError):
            for empty in made:
                empty.rmdir()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    with errors_naming(folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is at work in {folder}; wait for it, or choose another output") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Add `path` to an OSError that is raised in this block."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
