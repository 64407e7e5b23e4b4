"""JSON from files that may be damaged or untrusted."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


def parse_json(content: str | bytes, *, finite: bool = True) -> Any:
    """`json.loads`, but raises ValueError for whatever cannot be read, and for an object that has a key twice.

    Args:
        finite: also refuse NaN, infinities and numbers beyond the range of a float
    """
    numbers: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _parse_finite} if finite else {}
    try:
        return json.loads(content, object_pairs_hook=_unique_keys, **numbers)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key occurs twice")
    return members


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _refuse(text)
    return number


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")
