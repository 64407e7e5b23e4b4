"""The policy for results: continue what is the same, refuse what differs, replace on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from muse_lab.records.earlier_results import find_earlier


def read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"{path} is no JSON") from None
    return found


def find(path: Path, *, overwrite: bool = False, **wanted: object) -> dict[str, Any] | None:
    return find_earlier(path, read, lambda found: found["settings"], wanted, overwrite=overwrite)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"settings": {"length": 512, "seed": 0}, "cases": [1]}))
    return path


def test_what_is_the_same_is_continued(path: Path) -> None:
    found = find(path, length=512, seed=0)
    assert found is not None
    assert found["cases"] == [1]


def test_where_nothing_is_there_is_nothing_to_continue(path: Path) -> None:
    assert find(path.with_name("other.json"), length=512) is None


def test_what_differs_is_refused_and_named(path: Path) -> None:
    with pytest.raises(ValueError, match=r"length was 512, now 600, text was none, now x; choose .* --overwrite$"):
        find(path, length=600, seed=0, text="x")
    assert find(path, overwrite=True, length=600) is None


def test_a_file_of_something_else_is_refused_unless_it_is_to_be_replaced(path: Path) -> None:
    path.write_text("nothing of ours")
    with pytest.raises(ValueError, match=r"is no JSON; choose another --output, or replace it with --overwrite"):
        find(path, length=512)
    assert find(path, overwrite=True, length=512) is None
