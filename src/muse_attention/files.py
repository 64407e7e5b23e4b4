"""Files and folders that are whole or absent: written beside, then renamed; and folders that one process has."""

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


def replace_folder(unfinished: Path, folder: Path) -> None:
    """Put a folder of files, written aside, where `folder` is; what it holds is on the disk before it has that name."""
    with errors_naming(folder):
        for file in unfinished.iterdir():
            sync(file)
        sync(unfinished)
        remove_folder(folder)
        os.rename(unfinished, folder)
        sync(folder.parent)


def remove_folder(folder: Path) -> None:
    """Its name goes first: what is half removed must not look whole. One that is not there is no error."""
    removed = folder.with_name(f"{folder.name}.old.tmp")
    with errors_naming(folder):
        shutil.rmtree(removed, ignore_errors=True)
        if folder.exists():
            os.rename(folder, removed)
            shutil.rmtree(removed, ignore_errors=True)


def sync(path: Path) -> None:
    """Return when a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a folder, and let no other process in here that asks the same; a ValueError if there is one already.

    Whatever ends a process, and those that it forked, ends its claim. A folder that was made here and has nothing in it
    is removed again. Where the system has no locks, nobody is refused.
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
    """An OSError in here is one of `path`, and says so."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
