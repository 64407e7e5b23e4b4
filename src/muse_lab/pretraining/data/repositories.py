"""What every source gives: repositories of files, read one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


class SkippedFileError(Exception):
    """A file is left out; the message is the reason under which it is counted."""


class BrokenSourceError(Exception):
    """A repository is left out as a whole: it is cut short, damaged or hostile."""


@dataclass(frozen=True)
class File:
    path: str
    """inside its repository, separated by slashes"""
    size: int
    """in bytes, as far as the source knows"""
    read: Callable[[], bytes]
    """the content, until the next file is asked for; a SkippedFileError or OSError if there is none"""
    refused: str = ""
    """why the source refuses it, to be counted; empty if it can be read"""


@dataclass(frozen=True)
class Repository:
    name: str
    files: Iterable[File]
    """to be gone through once, without holding on to them; a BrokenSourceError ends it"""
    is_text: bool = False
    """a text that is a document as it is: one file, without delimiters"""
    is_prose: bool = False
    """its files are documentation and other texts, not code"""
    size: int | None = None
    """bytes of the files that would be read, where that is known before they are"""


def broken(name: str, reason: str) -> Repository:
    """A repository that cannot be read."""

    def files() -> Iterator[File]:
        raise BrokenSourceError(reason)
        yield

    return Repository(name, files())


def is_plain_path(path: str) -> bool:
    """Relative, inside its repository, printable: a path that means one thing everywhere."""
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and ":" not in parts[0] and not {"", ".", ".."} & set(parts)


def printable(name: str) -> str:
    """The name of a repository or a source, with `?` for characters that cannot be printed."""
    return "".join(character if character.isprintable() else "?" for character in name)
