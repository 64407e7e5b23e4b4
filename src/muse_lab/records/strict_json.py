"""JSON from files that may be damaged or untrusted."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


def parse_json(content: str | bytes, *, finite: bool = True) -> Any:
    """As `json.loads`, with a ValueError for whatever cannot be read, and for an object that has a key twice.

    Args:
        finite: refuse NaN, infinities and numbers beyond the range of a float too, which are no JSON
    """
    numbers: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _parse_finite} if finite else {}
    try:
        return json.loads(content, object_pairs_hook=_unique_keys, **numbers)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _refuse(text)
    return number


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")
