"""Attention over a mesh of 1, 2 and 4 processes is that of one process. `tests/mesh_checks.py` has what they check."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("typer")
pytest.importorskip("rich")

from muse_attention.distributed import ulysses_bytes
from tests.mesh_checks import CHECKS, run
from tests.reports_of_ranks import Reports, assert_nothing_went_wrong, gather_reports


@functools.cache
def reports(ranks: int) -> Reports:
    """All checks in the same processes."""
    return gather_reports(run, ranks)


@pytest.mark.parametrize(
    ("ranks", "check"), [(ranks, check.__name__) for ranks, checks in CHECKS.items() for check in checks]
)
def test_processes_together(ranks: int, check: str) -> None:
    assert_nothing_went_wrong(reports(ranks), check, ranks)


def test_bytes_of_a_large_model() -> None:
    """64k tokens, 32:8 heads, 8 ranks: 1/8 of the tokens, 7/8 of the heads, two bytes."""
    case = {"length": 1 << 16, "heads": 32, "head_dim": 128, "ranks": 8}
    assert ulysses_bytes(key_heads=8, **case) == (1 << 13) * (28 + 7) * 256 * 2
    assert ulysses_bytes(key_heads=2, **case) == ulysses_bytes(key_heads=8, **case)  # each of two is sent to four
    assert ulysses_bytes(key_heads=8, **case | {"ranks": 1}) == 0
    with pytest.raises(ValueError, match=r"the 12 ranks of the mesh; choose their number from 1, 2, 4, 8, 16, 32$"):
        ulysses_bytes(key_heads=8, **case | {"ranks": 12})
    with pytest.raises(ValueError, match=r"the 8 ranks of the mesh; choose their number from 1$"):
        ulysses_bytes(key_heads=1, **case | {"heads": 1})
