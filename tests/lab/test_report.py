"""`muse report`: which results are reported, and which are left out, with the reason."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muse_lab.cli import report as report_command
from muse_lab.report.files import check_replaceable
from tests.command_line import assert_refused, run_muse
from tests.lab.test_gradient_command import hand_made


def report(*paths: Path) -> tuple[int, str, list[str]]:
    """Exit code, stdout and the lines of stderr."""
    code, out, err = run_muse("report", *paths)
    return code, out, err.splitlines()


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.json"
    hand_made().write(path)
    return path


def spoilt(good: Path, spoil: Callable[[Any], Any]) -> str:
    document = json.loads(good.read_text())
    spoil(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda good: '{"machine": ' * 100_000,
        lambda good: good.read_text().replace("{", '{"machine": {}, ', 1),
        lambda good: spoilt(good, lambda document: document.update(commands=[None])),
        lambda good: spoilt(good, lambda document: document.update(machine={})),
        lambda good: spoilt(good, lambda document: document["machine"].update(os=3)),
        lambda good: spoilt(good, lambda document: document["settings"].update(seed="0")),
        lambda good: spoilt(good, lambda document: document["gradients"][0].update(number=10**400)),
        lambda good: spoilt(good, lambda document: document["gradients"][0].update(all_weights=[1])),
    ],
)
def test_results_of_other_types_are_left_out_by_one_line(spoil: Callable[[Path], str], good: Path) -> None:
    bad = good.with_name("bad.json")
    bad.write_text(spoil(good))
    code, _, err = report(bad, good)
    assert code == 1
    assert len(err) == 1
    assert f"{bad} is left out: " in err[0]
    assert not bad.with_suffix(".html").exists()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda good: good.read_text()[:-100], "it is incomplete"),
        (
            lambda good: spoilt(good, lambda document: document["settings"].pop("model")),
            "{bad} does not hold the results of muse eval needles --gradients",
        ),
        (
            lambda good: spoilt(good, lambda document: document["gradients"].clear()),
            "no sample has been differentiated yet",
        ),
    ],
)
def test_results_that_cannot_be_reported_are_named(good: Path, spoil: Callable[[Path], str], reason: str) -> None:
    bad = good.with_name("bad.json")
    bad.write_text(spoil(good))
    line = f"muse: {bad} is left out: {reason.format(bad=bad)}"
    code, out, lines = report(good.parent)
    assert (code, lines) == (1, [line])
    assert "good.html" in out
    contents = (good.parent / "index.html").read_text()
    assert "good.html" in contents
    assert "bad" not in contents
    good.unlink()
    code, out, lines = report(good.parent)
    assert (code, out, lines) == (2, "", [line])


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"steps": 4}', '{"needles": []}'])
def test_other_json_files_of_a_folder_are_passed_over(good: Path, content: str) -> None:
    other = good.with_name("other.json")
    other.write_text(content)
    code, out, lines = report(good.parent)
    assert (code, lines) == (0, [])
    assert "other.json" not in out
    code, _, lines = report(good, other)  # but not where they are asked for
    assert (code, lines) == (
        1,
        [f"muse: {other} is left out: it holds no results of muse bench, fidelity, loss, compare, eval or tune"],
    )
    good.unlink()
    assert_refused(run_muse("report", good.parent), "none of these are results")


def test_pipes_devices_and_folders_are_left_out(good: Path) -> None:
    folder = good.parent
    os.mkfifo(folder / "a-pipe.json")
    (folder / "a-device.json").symlink_to("/dev/zero")
    (folder / "folder.json").mkdir()
    (folder / "huge.json").touch()
    os.truncate(folder / "huge.json", 2**40)
    code, out, lines = report(folder)
    assert code == 1
    assert "good.html" in out
    assert lines == [
        f"muse: {folder / 'a-device.json'} is left out: it is not a regular file",
        f"muse: {folder / 'a-pipe.json'} is left out: it is not a regular file",
        f"muse: {folder / 'huge.json'} is left out: it has 1,099,511,627,776 bytes, more than the 67,108,864 that "
        "are read",
    ]
    assert report(folder / "a-pipe.json")[::2] == (2, [lines[1]])


def test_files_of_others_are_not_replaced(good: Path) -> None:
    assert report(good.parent)[0] == 0
    (good.parent / "index.html").write_text("my page")
    good.with_suffix(".md").unlink()
    reason = "it exists and is not part of a report; move it away"
    code, _, lines = report(good.parent)
    assert (code, lines) == (1, [f"muse: {good.parent / 'index.html'} is not written: {reason}"])
    assert (good.parent / "index.html").read_text() == "my page"
    assert good.with_suffix(".md").exists()
    for name in ("good.md", "good.html"):
        for file in good.parent.glob("good.*"):
            if file != good:
                file.unlink()
        (good.parent / name).write_text("# Notes of mine\n")
        assert_refused(run_muse("report", good), f"muse: {good} is left out: {good.parent / name}: {reason}\n")
        assert {file.name for file in good.parent.glob("good.*")} == {"good.json", name}
        assert (good.parent / name).read_text() == "# Notes of mine\n"
        (good.parent / name).unlink()
    picture = good.with_name("good-curve.png")
    picture.touch()
    with pytest.raises(FileExistsError, match="not part of a report"):  # without a page of a report beside it
        check_replaceable([good.with_suffix(".md"), picture])


def test_only_what_may_hold_results_is_looked_into(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, outside = good.parent / "folder", good.parent / "outside"
    for place in (outside, folder / "in" / "here", folder / ".hidden", folder / "env" / "bin", folder / "node_modules"):
        place.mkdir(parents=True)
        shutil.copy(good, place)
    (folder / "env" / "pyvenv.cfg").touch()
    (folder / "linked").symlink_to(outside)
    code, _, lines = report(folder)
    assert (code, lines) == (0, [])
    assert sorted(folder.rglob("*.html")) == [folder / "in" / "here" / "good.html", folder / "index.html"]
    monkeypatch.setattr(report_command, "_MOST_FILES", 3)
    before = set(folder.rglob("*"))
    refused = f"muse: {folder} holds more than 3 files; give the folder of the results alone"
    assert_refused(run_muse("report", folder), refused)
    assert set(folder.rglob("*")) == before


def test_without_an_argument_it_says_what_to_give(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(good.parent)
    refused = "muse: give result files of muse bench, fidelity, loss, compare, eval or tune, or their folder"
    assert_refused(run_muse("report"), refused)
    assert list(good.parent.iterdir()) == [good]


def test_nothing_is_written_if_something_is_not_there(good: Path) -> None:
    assert_refused(run_muse("report", good, good.with_name("missing.json")), "there is no file or folder")
    assert not good.with_suffix(".html").exists()
