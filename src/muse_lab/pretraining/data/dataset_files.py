"""Lines of a file, plain or compressed by gzip or Zstandard, and rows of Parquet; a file that is cut short says so."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from muse_attention.core.extras import how_to_install

PARQUET = ".parquet"
_ROWS_AT_ONCE = 16
"""A row of The Stack v2 names all files of a repository."""
_LONGEST_LINE = 2**28
"""Bytes; longer lines are cut, so that no file can fill the memory."""
_PACKED_AT_ONCE = 2048
"""Bytes given to Zstandard: they may become 30,000 times as many."""


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file; raises ValueError if it is damaged or ends too early."""
    unpacks, faults = _zstandard() if path.suffix == ".zst" else (None, [])
    damage: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error, *faults)
    try:
        with open(path, "rb") as file:
            lines: io.BufferedIOBase = file
            if unpacks is not None:
                lines = io.BufferedReader(_Unpacked(file, unpacks), 2**20)
            elif path.suffix == ".gz":
                lines = gzip.GzipFile(fileobj=file)
            while line := lines.readline(_LONGEST_LINE):
                yield line
    except damage as error:
        raise ValueError(f"{path} is cut short or damaged ({error}); get it again") from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class _Unpacked(io.RawIOBase):
    """The unpacked bytes of a file of Zstandard frames."""

    def __init__(self, file: io.BufferedReader, new_frame: Callable[[], Any]) -> None:
        self._file = file
        self._new_frame = new_frame
        self._frame: Any = None
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked and self._unpack():
            pass
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count

    def _unpack(self) -> bool:
        """Whether there was more to unpack."""
        packed = self._file.read(_PACKED_AT_ONCE)
        if not packed and self._frame is not None:
            raise EOFError("it ends in the middle")
        chunks = []
        rest = packed
        while rest:
            self._frame = self._frame or self._new_frame()
            chunks.append(self._frame.decompress(rest))
            rest = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        self._unpacked = memoryview(b"".join(chunks))
        return bool(packed)


def _zstandard() -> tuple[Callable[[], Any], list[type[Exception]]]:
    """A function that starts a frame, and its errors: from Python since 3.14, from the package zstandard before."""
    try:
        library = importlib.import_module("compression.zstd")
        return library.ZstdDecompressor, [library.ZstdError]
    except ImportError:
        pass
    try:
        library = importlib.import_module("zstandard")
    except ImportError:
        raise ImportError(
            f"zstandard is not installed, and .zst files need it: {how_to_install('pretraining')}"
        ) from None
    return lambda: library.ZstdDecompressor().decompressobj(), [library.ZstdError]


def read_parquet(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of the `columns` that a file has, read by pyarrow; raises ValueError as `read_lines` does."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        damage = importlib.import_module("pyarrow").ArrowException
    except ImportError:
        raise ImportError(
            f"pyarrow is not installed, and {PARQUET} files need it: {how_to_install('parquet')}"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            present = [name for name in columns if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=present):
                yield from batch.to_pylist()
    except (damage, UnicodeDecodeError) as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"{path} is cut short or damaged ({first_line}); get it again") from None
    except OSError as error:
        if error.errno is None:  # pyarrow's own, for invalid contents
            raise ValueError(f"{path} is cut short or damaged ({error}); get it again") from None
        raise OSError(error.errno, error.strerror, str(path)) from error
