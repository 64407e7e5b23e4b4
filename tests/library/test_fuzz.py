"""The first cases of the fuzzer. `make fuzz` goes on from there."""

from __future__ import annotations

import pytest

from tests.fuzz import check
from tests.fuzz_cases import draw

CASES, AT_ONCE = 60, 20
MENDED = [
    pytest.param(36, 2318, id="summaries far below one that is retrieved"),
]
"""Seeds and numbers of cases that were wrong once."""


@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
def test_random_calls(first: int) -> None:
    for number in range(first, first + AT_ONCE):
        case = draw(0, number)
        try:
            check(case)
        except Exception as error:
            error.add_note(f"again: python -m tests.fuzz --case {number}\n{case}")
            raise


@pytest.mark.parametrize(("seed", "number"), MENDED)
def test_what_was_wrong_once(seed: int, number: int) -> None:
    check(draw(seed, number))
