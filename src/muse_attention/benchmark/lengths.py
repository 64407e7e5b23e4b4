"""Lengths as people write them: `32k` is 32 * 1024."""

from __future__ import annotations

import re

_LENGTH = re.compile(r"(\d+)(k?)", re.IGNORECASE)


def parse_length(text: str) -> int:
    match = _LENGTH.fullmatch(text.strip())
    length = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if length < 1:
        raise ValueError(f"cannot read the length {text.strip()!r}; write a positive number like 4096 or 32k")
    return length


def parse_lengths(text: str) -> tuple[int, ...]:
    """`"32k,64k"`, in the order given, each once."""
    return tuple(dict.fromkeys(parse_length(part) for part in text.split(",")))


def format_length(length: int) -> str:
    return f"{length // 1024}k" if length and length % 1024 == 0 else str(length)
