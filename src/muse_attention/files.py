"""Atomic writes of files and folders (written aside, then renamed), and a lock on a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace the file `path` by `content` atomically: if the disk is full, the old file stays.

    Every OSError names the file, also that of a full disk.
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


def replace_folder(unfinished: Path, folder: Path) -> None:
    """Replace `folder` by a folder of files that is written aside; its contents are on disk before it is renamed."""
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
        shutil.rmtree(removed, ignore_errors=True)
        if folder.exists():
            os.rename(folder, removed)
            shutil.rmtree(removed, ignore_errors=True)


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

    The lock ends with the process and with those that it forked. A folder that was made here and is empty is removed
    again. Where the system has no locks, none is taken.
    """
    with errors_naming(folder):
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder):
            yield
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()


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
