"""Files that are not what they seem: links where something is written, pipes and devices where something is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from muse_lab.records.files import alone_in, new_folder, remove_folder, replace_file
from muse_lab.records.untrusted import open_regular, read_regular

HOUR = 3600.0


def test_writing_follows_no_link(tmp_path: Path) -> None:
    """Whether the link is in the place of the file, or of an unfinished one of an earlier version."""
    victim, path = tmp_path / "victim", tmp_path / "folder" / "metrics.jsonl"
    path.parent.mkdir()
    victim.write_text("kept")
    for name in (path.name, f"{path.name}.tmp"):
        path.with_name(name).symlink_to(victim)
    replace_file(path, "new")
    assert victim.read_text() == "kept"
    assert path.read_text() == "new"
    assert not path.is_symlink()
    assert path.with_name(f"{path.name}.tmp").is_symlink(), "it is not ours"
    assert path.stat().st_mode == victim.stat().st_mode, "others may read it as any new file"


@pytest.mark.parametrize("remove", [remove_folder, new_folder])
def test_removing_follows_no_link(remove: Any, tmp_path: Path) -> None:
    """Whether the link is in the place of the folder, or of one that is half removed."""
    target, folder = tmp_path / "target", tmp_path / "model"
    target.mkdir()
    (target / "kept").touch()
    for name in ("model", "model.old.tmp"):
        (tmp_path / name).symlink_to(target)
    remove(folder)
    assert (target / "kept").exists()
    assert not folder.is_symlink()
    folder.mkdir(exist_ok=True)
    remove_folder(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]


def test_the_next_write_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"

    def die(descriptor: int) -> None:
        os._exit(9)

    for _ in range(2):
        if not (child := os.fork()):
            monkeypatch.setattr(os, "fsync", die)
            replace_file(path, "half")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left, busy = sorted(tmp_path.iterdir())
    token = left.name.split(".")[2]
    others = [
        tmp_path / name for name in ("run.json.tmp", f"other.json.{token}.tmp", f"run.json.{token}", "run.json.0.tmp")
    ]
    for old in (left, *others):
        old.touch()
        os.utime(old, (0, busy.stat().st_mtime - 2 * HOUR))
    replace_file(path, "whole")
    assert set(tmp_path.iterdir()) == {path, busy, *others}, "another process may still write to a new one"


def test_only_regular_files_of_a_sane_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"whole")
    (tmp_path / "link").symlink_to(path)
    assert read_regular(tmp_path / "link") == b"whole"
    with pytest.raises(OSError, match="it has 5 bytes, more than the 4 that are read"):
        read_regular(path, largest=4)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "endless", ""):
        for read in (read_regular, open_regular):
            with pytest.raises(OSError, match="it is not a regular file") as refused:
                read(tmp_path / name)
            assert refused.value.filename == str(tmp_path / name)


def test_folders_that_stay_empty_are_removed_with_their_parents(tmp_path: Path) -> None:
    with alone_in(tmp_path / "a" / "b" / "c"):
        (tmp_path / "a" / "kept").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "kept"]
