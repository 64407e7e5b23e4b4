"""Sizes as people write them: `512`, `8k`, `1m` (k means 1024, m means 1024 k)."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SIZE = re.compile(r"(\d{1,12})([kKmM]?)")
_UNITS = {"": 1, "k": 1024, "m": 1024**2}
EXAMPLE = "a size is a positive integer like 512, 8k or 1m"


def parse_size(text: str) -> int:
    """Read `512`, `8k` or `1m`; a ValueError for anything else, and for 0."""
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if size < 1:
        raise ValueError(f"cannot read the size {text.strip()!r}: {EXAMPLE}")
    return size


def parse_size_list(texts: Iterable[str]) -> tuple[int, ...]:
    """The sizes of an option that may be repeated and hold commas, as in `["8k,16k", "1m"]`, each once."""
    return tuple(dict.fromkeys(parse_size(part) for text in texts for part in text.split(",")))


def nearest_power_of_two(numerator: int, denominator: int, *, smallest: int) -> int:
    """The power of two nearest to a fraction by ratio, the lower one halfway; at least `smallest`, a power of two."""
    power = smallest
    while 2 * (denominator * power) ** 2 < numerator**2:
        power *= 2
    return power


def format_size(size: int) -> str:
    for unit in ("m", "k"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)
