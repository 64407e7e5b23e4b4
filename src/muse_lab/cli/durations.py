"""Durations as people write them: `45s`, `90m`, `3h`, `1h30m`, `2d`."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?")
_SECONDS = (86400, 3600, 60, 1)


def parse_duration(text: str) -> int:
    """In seconds; a ValueError for anything else, and for 0."""
    match = _DURATION.fullmatch(text.strip())
    seconds = sum(int(count or 0) * unit for count, unit in zip(match.groups(), _SECONDS, strict=True)) if match else 0
    if seconds < 1:
        raise ValueError(f"cannot read the duration {text.strip()!r}: write it like 45s, 90m, 3h or 1h30m")
    return seconds
