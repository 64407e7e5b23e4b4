"""Sources on this machine: Python's own libraries, folders of repositories and of source archives, and plain texts.

Everything is listed in the order of names, and no link is followed.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from muse_lab.pretraining.data.archives import SUFFIXES as ARCHIVE_SUFFIXES
from muse_lab.pretraining.data.archives import read_archive
from muse_lab.pretraining.data.filters import TEXT_SUFFIXES, is_prose, is_python
from muse_lab.pretraining.data.folders import Entry, list_folder, walk_files
from muse_lab.pretraining.data.repositories import BrokenSourceError, File, Repository, is_plain_path

_NO_SOURCES = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
"""Folders that are skipped, as are those whose names begin with a dot."""
_ONE_REPOSITORY = {".git", "pyproject.toml", "setup.py", "setup.cfg", "__init__.py"}
"""Entries of a repository, which a folder of repositories does not have."""
_ARCHIVE_NAME = re.compile(r"(?P<project>.+?)-v?\d.*")


def python_libraries() -> Iterator[Repository]:
    """The standard library, and each installed package."""
    library = Path(sysconfig.get_path("stdlib"))
    yield Repository(f"python-{sys.version_info.major}.{sys.version_info.minor}", _files_in(library, is_python))
    for folder in sorted({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}):
        if folder.is_dir():
            yield from _packages_in(folder)


def standard_library() -> Iterator[Repository]:
    """Each package and module of the standard library, so that some can be held out."""
    return _packages_in(Path(sysconfig.get_path("stdlib")))


def repositories_in(paths: Sequence[Path], *, largest: int, prose: bool = False) -> Iterator[Repository]:
    """Each path: an archive, a repository, or a folder of archives and repositories.

    Args:
        prose: take documentation and other texts, in place of Python files
    """
    wanted = is_prose if prose else is_python
    for path in paths:
        if path.name.endswith(ARCHIVE_SUFFIXES) and path.is_file():
            yield _archive(path, largest, prose=prose)
        elif not path.is_dir():
            endings = ", ".join(ARCHIVE_SUFFIXES)
            raise ValueError(f"there is no folder or archive {str(path)!r}; give folders, or files in {endings}")
        elif any((path / name).exists() for name in _ONE_REPOSITORY):
            yield Repository(path.resolve().name, _files_in(path, wanted), is_prose=prose)
        else:
            for entry in _listing(path):
                if entry.is_dir(follow_symlinks=False) and _has_sources(entry.name):
                    yield Repository(entry.name, _files_in(Path(entry.path), wanted), is_prose=prose)
                elif entry.is_file(follow_symlinks=False) and entry.name.endswith(ARCHIVE_SUFFIXES):
                    yield _archive(Path(entry.path), largest, prose=prose)


def texts_in(paths: Sequence[Path]) -> Iterator[Repository]:
    """Each text file, and each of those in folders, is a document."""
    for path in paths:
        if path.is_file():
            yield Repository(path.name, [_file(path, path.name)], is_text=True)
        elif path.is_dir():
            _listing(path)
            for file in _files_in(path, lambda name: name.endswith(TEXT_SUFFIXES)):
                yield Repository(file.path, [file], is_text=True)
        else:
            raise ValueError(
                f"there is no text {str(path)!r}; give files, or folders of {', '.join(TEXT_SUFFIXES)} files"
            )


def project_name(archive: str) -> str:
    """`name` of `name-1.0.tar.gz` and of `name-1.0-py3-none-any.whl`: all versions are one repository."""
    stem = archive.removesuffix(next((suffix for suffix in ARCHIVE_SUFFIXES if archive.endswith(suffix)), ""))
    match = _ARCHIVE_NAME.fullmatch(stem)
    return match["project"] if match else stem


def _packages_in(folder: Path) -> Iterator[Repository]:
    """Each package and module of a folder that Python imports from."""
    for entry in _listing(folder):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False) and _has_sources(entry.name):
            yield Repository(entry.name, _files_in(path, is_python, inside=f"{entry.name}/"))
        elif entry.is_file(follow_symlinks=False) and is_python(entry.name):
            yield Repository(path.stem, [_file(path, entry.name)])


def _archive(path: Path, largest: int, *, prose: bool) -> Repository:
    files = read_archive(path, is_prose if prose else is_python, largest=largest)
    return Repository(project_name(path.name), files, is_prose=prose)


def _files_in(folder: Path, wanted: Callable[[str], bool], inside: str = "") -> Iterator[File]:
    try:
        for path, entry in walk_files(folder, _has_sources):
            if entry is None:
                yield File(inside + path, 0, bytes, "unreadable folder")
            elif not wanted(entry.name):
                continue
            elif not entry.is_file(follow_symlinks=False):
                yield File(inside + path, 0, bytes, "link or device")
            elif not is_plain_path(inside + path):
                yield File(inside + path, 0, bytes, "unsafe path")
            else:
                yield _file(Path(entry.path), inside + path)
    except OSError as error:
        raise BrokenSourceError(f"{folder.name}: {error.strerror}") from error


def _file(file: Path, path: str) -> File:
    try:
        size = file.stat().st_size
    except OSError:
        return File(path, 0, bytes, "unreadable")
    return File(path, size, file.read_bytes)


def _listing(folder: Path) -> list[Entry]:
    """The entries of a folder that a user named."""
    try:
        return list_folder(folder)
    except OSError as error:
        raise ValueError(f"cannot read the folder {folder}: {error.strerror}; give one that can be read") from None


def _has_sources(folder: str) -> bool:
    return folder not in _NO_SOURCES and not folder.startswith(".") and not folder.endswith((".dist-info", ".egg-info"))
