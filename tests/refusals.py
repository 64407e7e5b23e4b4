"""What is refused, in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def one_line_error(match: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """What is inside raises such an error, whose message has one line, in which the pattern is found."""
    with pytest.raises(kind, match=match) as raised:
        yield
    assert "\n" not in str(raised.value)
