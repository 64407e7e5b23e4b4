"""Contents of The Stack v2, by their ids: gzip files as Software Heritage stores them, in a folder or behind a URL."""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path

from muse_lab.pretraining.data.repositories import SkippedFileError
from muse_lab.records.untrusted import open_regular

Fetch = Callable[[str], bytes]
"""Returns the content of a blob by its id; raises SkippedFileError if there is none."""
_BLOB_ID = re.compile(r"[0-9a-f]{40}")
_MISSING = (403, 404, 410)
_ATTEMPTS = 4
_HEADROOM = 2**16
"""Bytes by which a packed content may be larger than it is unpacked."""


def open_contents(place: str, *, largest: int) -> Fetch:
    """A function that reads `place/content/ID`; raises ValueError if `place` is neither a folder nor an http URL."""
    if re.match(r"https?://", place):
        return lambda blob_id: _fetch(f"{place.rstrip('/')}/content/{_checked(blob_id)}", largest)
    folder = Path(place).expanduser() / "content"
    if not folder.is_dir():
        raise ValueError(
            f"there are no contents in {place!r}; give a folder with content/ID files, or a URL, with --contents"
        )

    def read(blob_id: str) -> bytes:
        try:
            with open_regular(folder / _checked(blob_id)) as file:
                packed = file.read(largest + _HEADROOM)
        except FileNotFoundError:
            raise SkippedFileError("missing content") from None
        return _unpack(packed, largest)

    return read


def _checked(blob_id: str) -> str:
    """The id if it is a hash: anything else could be a path to another place."""
    if not isinstance(blob_id, str) or not _BLOB_ID.fullmatch(blob_id):
        raise SkippedFileError("missing content")
    return blob_id


def _fetch(url: str, largest: int) -> bytes:
    """Retry after a pause if the server or the network fails; raises ValueError if all attempts fail."""
    for attempt in range(_ATTEMPTS):
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                packed = response.read(largest + _HEADROOM)
                length = int(response.headers.get("Content-Length", len(packed)))
            if len(packed) >= min(length, largest + _HEADROOM):
                return _unpack(packed, largest)
            reason: object = f"it ends after {len(packed)} of {length} bytes"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in _MISSING:
                raise SkippedFileError("missing content") from None
            reason = f"{error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or " ".join(str(error).split()) or type(error).__name__
        except ValueError as error:  # not a URL
            raise ValueError(f"cannot fetch {url}: {error}; check --contents") from None
        if attempt + 1 < _ATTEMPTS:
            time.sleep(0.5 * 2**attempt)
    raise ValueError(f"cannot fetch {url}: {reason}; check --contents and the network, then run it again")


def _unpack(packed: bytes, largest: int) -> bytes:
    """The content, cut just after `largest` bytes, which is enough to see that it is too large."""
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        content = unpacker.decompress(packed, largest + 1)
    except zlib.error:
        raise SkippedFileError("unreadable") from None
    is_whole = unpacker.eof and not unpacker.unused_data
    if not is_whole and len(content) <= largest:
        raise SkippedFileError("unreadable")
    return content
