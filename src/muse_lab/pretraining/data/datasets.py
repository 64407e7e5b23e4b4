"""Datasets as they are published: rows of ids of The Stack v2, and documents of Dolma (LongMino among them).

Rows are lines of JSON, plain or packed by gzip or Zstandard, or those of Parquet files, as The Stack v2 has them. An
invalid row is counted and skipped.
"""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from muse_lab.pretraining.data.contents import Fetch
from muse_lab.pretraining.data.dataset_files import PARQUET, read_lines, read_parquet
from muse_lab.pretraining.data.folders import walk_files
from muse_lab.pretraining.data.repositories import File, Repository, SkippedFileError, broken, is_plain_path

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", PARQUET)
_FETCHED_AT_ONCE = 16
_FOLDERS_NAMED = 8
_AHEAD = 256
"""Contents that are fetched ahead."""
_COLUMNS = ("repo_name", "files", "id", "text")
"""Columns that are read from a Parquet file."""


def stack_repositories(paths: Sequence[Path], fetch: Fetch) -> Iterator[Repository]:
    """Rows `{"repo_name": ..., "files": [{"blob_id", "path", "language", ...}]}`, as the dataset has them.

    Only Python files are taken; the row says which are vendored or generated. Contents are fetched concurrently.
    """
    for name, row in _rows(paths):
        files = row.get("files") if isinstance(row, dict) else None
        if not isinstance(files, list) or not isinstance(row.get("repo_name"), str):
            yield broken(name, "not a row of The Stack v2: it needs repo_name and files")
            continue
        kept = [file for file in files if isinstance(file, dict) and file.get("language") == "Python"]
        sizes = [_size(file) for file in kept if not _refusal(file)]
        yield Repository(row["repo_name"], _stack_files(kept, fetch), size=sum(sizes) if all(sizes) else None)


def dolma_documents(
    paths: Sequence[Path], *, topic: str | None = None, length_bucket: str | None = None
) -> Iterator[Repository]:
    """Rows `{"id": ..., "text": ..., ...}`, each a document.

    Args:
        topic: a topic of LongMino, like `science_tech`: a part of the name of a file's folder, `...-science_tech-2e16`
        length_bucket: a bucket of LongMino, like `2e16` for 2^16 tokens and more: the last part of that name
    """
    files = [file for file in _files(paths) if _matches(file.absolute().parent.name, topic, length_bucket)]
    if not files and (topic or length_bucket):
        folders = sorted({file.absolute().parent.name for file in _files(paths)})
        raise ValueError(
            f"no folder of the dataset has the topic {topic or 'any'} and the length bucket "
            f"{length_bucket or 'any'}; there are {', '.join(folders[:_FOLDERS_NAMED]) or 'none'}"
        )
    for name, row in _rows(files):
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            yield broken(name, "not a row of Dolma: it needs id and text")
            continue
        content = text.encode(errors="surrogatepass")
        row_id = row.get("id")
        yield Repository(
            row_id if isinstance(row_id, str) else name,
            [File("", len(content), functools.partial(bytes, content))],
            is_text=True,
        )


def _stack_files(files: Sequence[dict[str, Any]], fetch: Fetch) -> Iterator[File]:
    pool = ThreadPoolExecutor(_FETCHED_AT_ONCE)
    pending: deque[tuple[dict[str, Any], Future[bytes] | None]] = deque()
    try:
        for file in (*files, *[None] * _AHEAD):
            if file is not None:
                pending.append((file, None if _refusal(file) else pool.submit(fetch, file.get("blob_id", ""))))
            if pending and (file is None or len(pending) > _AHEAD):
                yield _stack_file(*pending.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _stack_file(file: dict[str, Any], fetched: Future[bytes] | None) -> File:
    path = str(file.get("path", "")).lstrip("/")
    if fetched is None:
        return File(path, _size(file), bytes, _refusal(file))
    return File(path, _size(file), functools.partial(_as_utf8, fetched, str(file.get("src_encoding") or "UTF-8")))


def _refusal(file: dict[str, Any]) -> str:
    if file.get("is_vendor"):
        return "vendored"
    if file.get("is_generated"):
        return "generated"
    return "" if is_plain_path(str(file.get("path", "")).lstrip("/")) else "unsafe path"


def _size(file: dict[str, Any]) -> int:
    """The size in bytes; 0 if the row does not have it."""
    size = file.get("length_bytes")
    return size if isinstance(size, int) else 0


def _as_utf8(fetched: Future[bytes], encoding: str) -> bytes:
    content = fetched.result()
    try:
        return content.decode(encoding).encode()
    except (LookupError, ValueError):
        raise SkippedFileError("undecodable") from None


def _matches(folder: str, topic: str | None, length_bucket: str | None) -> bool:
    parts = folder.split("-")
    return (topic is None or topic in parts) and (length_bucket is None or parts[-1] == length_bucket)


def _rows(paths: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """A name for each row, and the row; None if it is not JSON."""
    for path in _files(paths):
        if path.suffix == PARQUET:
            yield from ((f"{path.name}:{number}", row) for number, row in enumerate(read_parquet(path, _COLUMNS), 1))
            continue
        for number, line in enumerate(read_lines(path), start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield f"{path.name}:{number}", row


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_file() and path.name.endswith(SUFFIXES):
            files.append(path)
        elif path.is_dir():
            files += _files_in(path)
        else:
            raise ValueError(f"there is no dataset {str(path)!r}; give files, or folders, of {', '.join(SUFFIXES)}")
    return files


def _files_in(folder: Path) -> Iterator[Path]:
    for path, entry in walk_files(folder):
        if entry is None:
            raise ValueError(f"cannot read the folder {folder / path}; make it readable, or name the files to read")
        if entry.name.endswith(SUFFIXES) and entry.is_file():
            yield Path(entry.path)
