"""Sizes as people write them: `512`, `8k` (k means 1024)."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d{1,12})([kK]?)")
EXAMPLE = "a size is a positive integer like 512 or 8k"


def parse_size(text: str) -> int:
    """Read `512` or `8k`; a ValueError for anything else, and for 0."""
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if size < 1:
        raise ValueError(f"cannot read the size {text.strip()!r}: {EXAMPLE}")
    return size


def parse_sizes(text: str) -> tuple[int, ...]:
    """`"32k,64k"`, in the order given, each once."""
    return tuple(dict.fromkeys(parse_size(part) for part in text.split(",")))


def nearest_power_of_two(numerator: int, denominator: int, *, smallest: int) -> int:
    """To a fraction, by ratio, the lower one halfway; `smallest`, itself a power of two, or more."""
    power = smallest
    while 2 * (denominator * power) ** 2 < numerator**2:
        power *= 2
    return power


def format_size(size: int) -> str:
    return f"{size // 1024}k" if size and size % 1024 == 0 else str(size)
