"""Rows of a Parquet file, by pyarrow, which only this needs; a file that is cut short says so."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from muse_attention.core.extras import how_to_install

SUFFIX = ".parquet"
_ROWS_AT_ONCE = 16
"""A row of The Stack v2 names all files of a repository."""


def read_parquet(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Those of the columns that the file has; a ValueError if it is damaged or ends too early."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        damage = importlib.import_module("pyarrow").ArrowException
    except ImportError:
        raise ImportError(
            f"pyarrow is not installed, and {SUFFIX} files need it: {how_to_install('parquet')}"
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
        if error.errno is None:  # pyarrow's own, of contents that make no sense
            raise ValueError(f"{path} is cut short or damaged ({error}); get it again") from None
        raise OSError(error.errno, error.strerror, str(path)) from error
