"""Results as one file: what is written is read back, and others are refused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from muse_attention import MuSeConfig
from muse_lab.records import stored_results as stored
from muse_lab.records.dataclass_json import entries
from muse_lab.records.earlier_results import REMEDY_BY_NAME
from muse_lab.records.stored_results import StoredResults
from tests.refusals import one_line_error

NAME = "muse:Q8K8R2SP1B64,clustering=lloyd"


@dataclass(frozen=True)
class Where:
    device: str
    note: str = ""


class Key(NamedTuple):
    attention: str
    length: int


class Point(NamedTuple):
    x: int
    by_layer: dict[int, float]


@dataclass(frozen=True)
class Score:
    index: int
    right: bool
    points: tuple[Point, ...] = ()


@dataclass
class Measured(StoredResults):
    command = "muse measure"

    settings: Where
    numbers: dict[Key, list[list[float]]] = field(
        default_factory=dict, metadata=entries("attention", "length", value="samples")
    )
    scores: dict[str, Score] = field(default_factory=dict, metadata=entries("attention", name="marks"))
    best: Score | None = None

    @property
    def named(self) -> list[str]:
        return [*(key.attention for key in self.numbers), *self.scores]

    def check(self) -> None:
        if any(key.length < 1 for key in self.numbers):
            raise ValueError("a length of nothing")


def made_up() -> Measured:
    score = Score(3, True, (Point(1, {0: 0.5, 7: 1.0}),))
    return Measured({}, Where("cpu"), ["a"], {Key(NAME, 64): [[1.0, 2.0]]}, {"exact": score}, score)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    made_up().write(path)
    assert Measured.read(path) == made_up()
    document = json.loads(path.read_text())
    assert document["version"] == stored.VERSION
    assert document["numbers"] == [{"attention": NAME, "length": 64, "samples": [[1.0, 2.0]]}]
    assert document["marks"] == [
        {"attention": "exact", "index": 3, "right": True, "points": [[1, {"0": 0.5, "7": 1.0}]]}
    ]
    assert document["attentions"] == {NAME: asdict(MuSeConfig.parse(NAME.removeprefix("muse:"))), "exact": None}


def changed(path: Path, **changes: Any) -> Path:
    made_up().write(path)
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in document.items() if value is not ...}))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 99}, "has version 99 of its results, not 1; measure again"),
        ({"numbers": ...}, "does not hold the results of muse measure$"),
        ({"settings": {}}, "does not hold the results"),
        ({"best": {"index": "3", "right": True}}, "does not hold the results"),
        ({"numbers": [{"attention": NAME, "length": 0, "samples": []}]}, "does not hold the results"),
        ({"numbers": [{"attention": NAME, "samples": []}]}, "does not hold the results"),
        ({"numbers": 3}, "does not hold the results"),
    ],
)
def test_what_cannot_be_read_is_refused_by_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with one_line_error(message):
        Measured.read(changed(tmp_path / "a.json", **changes))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"numbers": 1}'])
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=r"a\.json does not hold the results of muse measure$"):
        Measured.read(tmp_path / "a.json")


def test_a_file_is_written_on_the_way_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, results = tmp_path / "a.json", made_up()
    with results.saving(path):
        pass
    assert not path.exists(), "nothing has changed"

    def interrupted() -> None:
        with results.saving(path) as save:
            save()
            assert not path.exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert Measured.read(path) == results
    monkeypatch.setattr(stored, "SECONDS_BETWEEN_WRITES", 0.0)
    with results.saving(path) as save:
        results.commands.append("b")
        save()
        assert Measured.read(path).commands == ["a", "b"]


def test_results_go_on_with_the_same_settings_only(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    Measured.start(Where("cpu"), path).write(path)
    assert Measured.start(Where("cpu"), path).settings == Where("cpu")
    with pytest.raises(
        ValueError, match=rf"a\.json has other results: device was cpu, now cuda, note was , now x; {REMEDY_BY_NAME}$"
    ):
        Measured.start(Where("cuda", "x"), path)
    assert Measured.start(Where("cpu", "x"), path, overwrite=True).settings.note == "x"
    elsewhere = Measured.start(Where("cpu"), path)
    elsewhere.machine["torch"] = "1.0"
    elsewhere.write(path)
    with pytest.raises(ValueError, match=r"torch was 1\.0, now "):
        Measured.start(Where("cpu"), path)
    path.write_text("{")
    with pytest.raises(
        ValueError, match=r"does not hold the results of muse measure; choose another --name or --output"
    ):
        Measured.start(Where("cpu"), path)
    assert Measured.start(Where("cpu"), path, overwrite=True).numbers == {}
