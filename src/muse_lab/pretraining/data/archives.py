"""Source archives, read without unpacking them: nothing is written, nothing is followed, and sizes have limits.

Members that are links or devices, that have paths which lead elsewhere, or that are packed as no source archive is, are
refused one by one. An archive that is cut short, damaged or blows up is a BrokenSourceError.

A `.tar.gz` has one checksum, behind everything: it is read to the end before the first file is given. A zip has one for
each member, which is checked if the member is read. Its directory has none, and is compared with the members' headers.
"""

from __future__ import annotations

import functools
import gzip
import io
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from muse_lab.pretraining.data.repositories import BrokenSourceError, File, is_plain_path

SUFFIXES = (".tar.gz", ".tgz", ".zip", ".whl")
_LARGEST_HEADER = 2**20
_LARGEST_DIRECTORY = 2**26
"""Bytes of a zip's directory, which zipfile reads as a whole."""
_READ_AT_ONCE = 2**16
_ZIP_HEADER = struct.Struct("<4s2xHH4xIIIHH")
"""Mark, flags, method, checksum, packed and unpacked size, lengths of name and extra field of a zip's member."""
_ZIP_END = struct.Struct("<4s6xH10x")
"""Mark, and number of members."""
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ZIP_HEADER_MARK, _ZIP_END_MARK = b"PK\3\4", b"PK\5\6"
_ENCRYPTED, _SIZES_FOLLOW, _UTF8 = 1, 8, 0x800
"""Flags of a zip's member."""
_LARGE_SIZE, _LARGE_NUMBER = 2**32 - 1, 2**16 - 1
"""Marks a size or a number that is stored elsewhere because it does not fit."""


@dataclass(frozen=True)
class ArchiveLimits:
    members: int = 200_000
    unpacked: int = 2**30
    """bytes of all that is read"""
    ratio: int = 100
    """of unpacked to packed bytes, above `free_bytes`"""
    free_bytes: int = 2**24


def read_archive(
    path: Path, wanted: Callable[[str], bool], *, largest: int, limits: ArchiveLimits | None = None
) -> Iterator[File]:
    """Its files with a `wanted` path, in the order of their paths in a zip, as they come in a tar.

    A folder that holds everything else is left out of the paths. Files above `largest` bytes are named, not unpacked.
    """
    limits = limits or ArchiveLimits()
    read = _read_zip if path.suffix in (".zip", ".whl") else _read_tar
    try:
        yield from read(path, wanted, largest, limits)
    except BrokenSourceError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise BrokenSourceError(f"cut short or damaged ({error})") from error
    except OSError as error:
        raise BrokenSourceError(error.strerror or str(error)) from error
    except (ArithmeticError, LookupError, RuntimeError, ValueError, struct.error) as error:  # headers make no sense
        raise BrokenSourceError(f"damaged ({error})") from error


class _Allowance:
    """What an archive may still unpack."""

    def __init__(self, path: Path, limits: ArchiveLimits) -> None:
        self._most = min(limits.unpacked, max(limits.free_bytes, path.stat().st_size * limits.ratio))
        self._unpacked = 0
        self._limits = limits
        self._members = 0

    def unpack(self, size: int) -> None:
        self._unpacked += size
        if self._unpacked > self._most:
            raise BrokenSourceError(f"unpacks to more than {self._most} bytes")

    def count(self, members: int = 1) -> None:
        self._members += members
        if self._members > self._limits.members:
            raise BrokenSourceError(f"has more than {self._limits.members} members")


def _read_zip(path: Path, wanted: Callable[[str], bool], largest: int, limits: ArchiveLimits) -> Iterator[File]:
    allowance = _Allowance(path, limits)
    most = max(largest, _LARGEST_DIRECTORY)
    with _Bounded(io.FileIO(path), most, "directory") as packed, zipfile.ZipFile(packed) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        allowance.count(len(members))
        _check_directory(packed, archive)
        prefix = _common_folder([member.filename for member in members])
        for member in sorted(members, key=lambda member: member.filename):
            inner = member.filename.removeprefix(prefix)
            if not wanted(inner):
                continue
            mode = member.external_attr >> 16
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                refused = "link or device"
            elif not is_plain_path(inner):
                refused = "unsafe path"
            elif member.flag_bits & _ENCRYPTED or member.compress_type not in _ZIP_METHODS:
                refused = "unreadable"
            else:
                refused = ""
            content = b""
            if not refused and member.file_size <= largest:
                with archive.open(member) as file:
                    content = file.read(largest + 1)
                allowance.unpack(len(content))
                if len(content) != member.file_size:
                    raise BrokenSourceError("cut short")
            yield File(inner, member.file_size, functools.partial(bytes, content), refused)


def _check_directory(packed: BinaryIO, archive: zipfile.ZipFile) -> None:
    """A zip says everything twice: in its directory, which decides what is read and has no checksum, and elsewhere."""
    packed.seek(-_ZIP_END.size - len(archive.comment), io.SEEK_END)
    mark, number = _ZIP_END.unpack(packed.read(_ZIP_END.size))
    is_sound = mark == _ZIP_END_MARK and number in (len(archive.infolist()), _LARGE_NUMBER)
    for member in archive.infolist():
        packed.seek(member.header_offset)
        mark, flags, method, checksum, packed_size, size, name_length, _ = _ZIP_HEADER.unpack(
            packed.read(_ZIP_HEADER.size)
        )
        name = member.orig_filename.encode("utf-8" if member.flag_bits & _UTF8 else "cp437")
        is_sound = is_sound and (
            mark == _ZIP_HEADER_MARK
            and not (flags ^ member.flag_bits) & (_ENCRYPTED | _UTF8)
            and method == member.compress_type
            and packed.read(name_length) == name
        )
        if not flags & _SIZES_FOLLOW:
            is_sound = is_sound and (
                checksum == member.CRC
                and packed_size in (member.compress_size, _LARGE_SIZE)
                and size in (member.file_size, _LARGE_SIZE)
            )
    if not is_sound:
        raise BrokenSourceError("damaged (its directory does not agree with its members)")


def _read_tar(path: Path, wanted: Callable[[str], bool], largest: int, limits: ArchiveLimits) -> Iterator[File]:
    """In two passes: the first finds the folder that holds everything, and every fault."""
    prefix = _common_folder(name for name, _ in _tar_members(path, lambda name: False, largest, limits))
    for name, file in _tar_members(path, lambda name: wanted(name.removeprefix(prefix)), largest, limits):
        if file is not None:
            inner = name.removeprefix(prefix)
            refused = file.refused or ("" if is_plain_path(inner) else "unsafe path")
            yield File(inner, file.size, file.read, refused)


def _tar_members(
    path: Path, wanted: Callable[[str], bool], largest: int, limits: ArchiveLimits
) -> Iterator[tuple[str, File | None]]:
    """The names of all that is no folder, and what is wanted."""
    allowance = _Allowance(path, limits)
    archive: Any
    with gzip.open(path) as packed:
        unpacked = _Bounded(_Unpacked(packed, allowance), max(largest, _LARGEST_HEADER), "header")
        archive = tarfile.open(fileobj=unpacked, mode="r:", tarinfo=_Member)  # noqa: SIM115
        while (member := archive.next()) is not None:
            archive.members.clear()  # it keeps all it has seen
            allowance.count()
            if member.isdir():
                continue
            if not wanted(member.name):
                yield member.name, None
                continue
            if not member.isreg() or member.issparse():
                yield member.name, File(member.name, member.size, bytes, "link or device")
                continue
            content = b""
            if member.size <= largest:
                file = archive.extractfile(member)
                content = file.read() if file else b""
                if len(content) != member.size:
                    raise BrokenSourceError("cut short")
            yield member.name, File(member.name, member.size, functools.partial(bytes, content))
        while unpacked.read(_READ_AT_ONCE):
            pass  # the checksum is behind what tarfile reads


def _common_folder(names: Iterable[str]) -> str:
    """`name-1.0/` if everything is inside of it, else nothing. All names are taken, and none is kept."""
    common: str | None = None
    for name in names:
        folder = name.partition("/")[0] if "/" in name else ""
        common = folder if common in (None, folder) else ""
    return f"{common}/" if common and common != ".." else ""


class _Member(tarfile.TarInfo):
    """A header that makes no sense is a fault: tarfile takes it for the end, unless it is the first."""

    @classmethod
    def fromtarfile(cls, archive: Any) -> Self:
        start = archive.fileobj.tell()
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]  # the mark of the end
                raise
            raise BrokenSourceError(f"cut short or damaged ({error} at byte {start})") from error


class _Unpacked(io.RawIOBase):
    """A gzip stream that counts what it unpacks, and goes forward only."""

    def __init__(self, packed: gzip.GzipFile, allowance: _Allowance) -> None:
        self._packed = packed
        self._allowance = allowance
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        content = self._packed.read(len(view))
        view[: len(content)] = content
        self._position += len(content)
        self._allowance.unpack(len(content))
        return len(content)

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_CUR:
            position += self._position
        if whence == io.SEEK_END or position < self._position:
            raise BrokenSourceError("damaged (a member lies before the one it follows)")
        while self._position < position:
            if not self.read(min(position - self._position, _READ_AT_ONCE)):
                raise BrokenSourceError("cut short")
        return self._position


class _Bounded(io.BufferedReader):
    """Bounds a single read: the headers of a tar and the directory of a zip declare their own lengths."""

    def __init__(self, stream: io.RawIOBase, most: int, what: str) -> None:
        super().__init__(stream)
        self._most = most
        self._what = what

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > self._most + tarfile.BLOCKSIZE:
            raise BrokenSourceError(f"damaged (a {self._what} of {size} bytes)")
        return super().read(size)
