"""Source archives, read without unpacking them: nothing is written, nothing is followed, and sizes have limits.

Members that are links or devices, or whose paths lead elsewhere, are refused one by one. An archive that is cut short,
damaged, encrypted or unpacks to too much raises BrokenSourceError. It is read to its end before its first file is
yielded: the checksum of a `.tar.gz` comes last.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import io
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from muse_lab.pretraining.data.repositories import BrokenSourceError, File, is_plain_path

SUFFIXES = (".tar.gz", ".tgz", ".zip", ".whl")
_READ_AT_ONCE = 2**16
_ZIP_END = 22
"""Bytes at the end of a zip, before its comment; the number of its members is in them."""
_LARGE_NUMBER = 2**16 - 1
"""Marks a number that is stored elsewhere because it does not fit."""


@dataclass(frozen=True)
class ArchiveLimits:
    members: int = 200_000
    unpacked: int = 2**30
    """bytes in all"""
    ratio: int = 100
    """of unpacked to packed bytes, above `free_bytes`"""
    free_bytes: int = 2**24


def read_archive(
    path: Path, wanted: Callable[[str], bool], *, largest: int, limits: ArchiveLimits | None = None
) -> Iterator[File]:
    """The files of an archive with a `wanted` path: sorted by path in a zip, in stored order in a tar.

    A folder that holds everything else is left out of the paths. Files above `largest` bytes are yielded, but not read
    to their end.
    """
    limits = limits or ArchiveLimits()
    members = _zip_members if path.suffix in (".zip", ".whl") else _tar_members
    names, files = [], []
    try:
        limit = min(limits.unpacked, max(limits.free_bytes, path.stat().st_size * limits.ratio))
        for file in members(path, wanted, largest, _Allowance(limit)):
            names.append(file.path)
            if wanted(file.path):
                files.append(file)
            if len(names) > limits.members:
                raise BrokenSourceError(f"has more than {limits.members} members")
    except (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise BrokenSourceError(f"cut short or damaged ({error})") from error
    except OSError as error:
        raise BrokenSourceError(error.strerror or str(error)) from error
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:  # invalid headers
        raise BrokenSourceError(f"damaged ({error})") from error
    prefix = _common_folder(names)
    for file in files:
        inner = file.path.removeprefix(prefix)
        refused = file.refused or ("" if is_plain_path(inner) else "unsafe path")
        yield dataclasses.replace(file, path=inner, refused=refused)


class _Allowance:
    """Bytes that an archive may still unpack."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._unpacked = 0

    def read(self, stream: Any, size: int) -> bytes:
        content: bytes = stream.read(size)
        self._unpacked += len(content)
        if self._unpacked > self._limit:
            raise BrokenSourceError(f"unpacks to more than {self._limit} bytes")
        return content


def _zip_members(path: Path, wanted: Callable[[str], bool], largest: int, allowance: _Allowance) -> Iterator[File]:
    """All members but folders. Each is opened, because its header must agree with the directory of the zip."""
    with open(path, "rb") as packed, zipfile.ZipFile(packed) as archive:
        packed.seek(-_ZIP_END - len(archive.comment), io.SEEK_END)
        listed = int.from_bytes(packed.read(_ZIP_END)[10:12], "little")
        if listed not in (len(archive.infolist()), _LARGE_NUMBER):
            raise BrokenSourceError("damaged (its directory is not as long as it says)")
        for member in sorted(archive.infolist(), key=lambda member: member.filename):
            if member.is_dir():
                continue
            content, refused = b"", ""
            if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
                refused = "link or device"
            else:
                with archive.open(member) as file:
                    if wanted(member.filename):
                        content = allowance.read(file, min(member.file_size, largest))
                        if len(content) < min(member.file_size, largest):
                            raise BrokenSourceError("cut short")
            yield File(member.filename, member.file_size, functools.partial(bytes, content), refused)


def _tar_members(path: Path, wanted: Callable[[str], bool], largest: int, allowance: _Allowance) -> Iterator[File]:
    """All members but folders."""
    with gzip.open(path) as packed:
        unpacked: Any = _Counted(packed, allowance)
        archive: Any = tarfile.open(fileobj=unpacked, mode="r|", tarinfo=_Member)  # noqa: SIM115
        while (member := archive.next()) is not None:
            archive.members.clear()  # else it keeps every member
            if member.isdir():
                continue
            content, refused = b"", ""
            if not member.isreg() or member.issparse():
                refused = "link or device"
            elif wanted(member.name) and member.size <= largest:
                content = archive.extractfile(member).read()
            yield File(member.name, member.size, functools.partial(bytes, content), refused)
        while unpacked.read(_READ_AT_ONCE):
            pass  # the checksum comes after what tarfile reads


class _Counted:
    """A stream whose bytes are counted."""

    def __init__(self, stream: Any, allowance: _Allowance) -> None:
        self.read = functools.partial(allowance.read, stream)


class _Member(tarfile.TarInfo):
    """Raises BrokenSourceError for an invalid header, which tarfile takes for the end unless it is the first."""

    @classmethod
    def fromtarfile(cls, archive: Any) -> Self:
        start = archive.fileobj.tell()
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]  # the end mark
                raise
            raise BrokenSourceError(f"cut short or damaged ({error} at byte {start})") from error


def _common_folder(names: Iterable[str]) -> str:
    """`name-1.0/` if everything is inside of it, else nothing."""
    folders = {name.partition("/")[0] if "/" in name else "" for name in names}
    (common,) = folders if len(folders) == 1 else ("",)
    return f"{common}/" if common not in ("", "..") else ""
