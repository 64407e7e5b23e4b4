"""LongBench's score of a completed line of code.

The definition is that of `longbench_lcc` and `longbench_repobench-p` in lm-eval, which is LongBench's own but for white
lines, which it skips. Theirs comes with three packages that scoring code does not need, one of them under the GPL.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

_NOT_CODE = ("`", "#", "//")


def edit_similarity(completion: str, answers: Sequence[str]) -> float:
    """Of the first line of code to the answer it is most like: 0 to 1, in hundredths."""
    line = first_line_of_code(completion)
    return max((ratio(line, answer) for answer in answers), default=0.0)


def first_line_of_code(completion: str) -> str:
    """The first line that has something in it, and nothing of a comment or of Markdown; empty if there is none."""
    lines = (line for line in completion.split("\n") if line.strip())
    return next((line for line in lines if not any(mark in line for mark in _NOT_CODE)), "")


def ratio(first: str, second: str) -> float:
    """`fuzz.ratio` of fuzzywuzzy, divided by 100: twice the characters in matching blocks over all characters.

    The blocks are those of difflib, as in fuzzywuzzy where python-Levenshtein is not installed.
    """
    if first == second:
        return 1.0
    return round(100 * SequenceMatcher(None, first, second).ratio()) / 100
