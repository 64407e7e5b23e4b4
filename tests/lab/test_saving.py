"""When a run is saved, what is kept, and what happens when the disk is full."""

from __future__ import annotations

import errno
import shutil
import threading
import time
import weakref
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from muse_lab.pretraining.checkpoints import shards
from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.monitoring.metrics import Step, read_metrics
from muse_lab.pretraining.recipes import override
from muse_lab.pretraining.run import saving
from muse_lab.pretraining.training import train
from tests.command_line import assert_refused, run_muse
from tests.patience import PATIENCE
from tests.training_runs import QUICK, assert_same_run, learnt, save_whole, train_until

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def quick_run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("quick")
    train(corpus, QUICK, output)
    return output


def test_checkpoints_are_also_made_by_time(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not among those that are kept, and a clock that goes backwards changes nothing."""
    now, wall = 1000.0, 1e9
    found: list[list[int]] = []

    def tick(done: Step) -> None:
        nonlocal now, wall
        wait_for_writes()
        found.append(checkpoints.steps_in(tmp_path / "checkpoints"))
        now += 60
        wall -= 86400

    monkeypatch.setattr(time, "time", lambda: wall)
    monkeypatch.setattr(saving.time, "monotonic", lambda: now)
    recipe = override(QUICK, ["steps=12", "checkpoint_every=5", "checkpoint_minutes=2", "stall_minutes=0", "keep=2"])
    train(corpus, recipe, tmp_path, on_step=tick)
    found.append(checkpoints.steps_in(tmp_path / "checkpoints"))
    assert found == [
        *([], [], [], [3], [3], [5], [5], [5], [5, 8], [5, 8]),
        *([5, 10], [5, 10], [10, 12]),
    ]


@pytest.mark.long
def test_what_is_saved_by_time_is_as_good(corpus: Corpus, quick_run: Path, tmp_path: Path) -> None:
    recipe = override(QUICK, ["checkpoint_every=1000", "checkpoint_minutes=1e-9"])
    train_until(6, corpus, recipe, tmp_path)
    assert checkpoints.steps_in(tmp_path / "checkpoints") == [5]
    steps: list[int] = []
    train(corpus, recipe, tmp_path, on_step=lambda done: steps.append(done.step))
    assert steps == [6, 7, 8]
    assert_same_run(tmp_path, quick_run)


def wait_for_writes() -> None:
    """Until a checkpoint that is being written is there."""
    for thread in threading.enumerate():
        if thread.name.startswith("save step "):
            thread.join()


@pytest.mark.long
def test_training_goes_on_while_a_checkpoint_is_written(
    corpus: Corpus, quick_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is the state of its step, and there is one write at a time."""
    goes_on, steps = threading.Event(), []
    write = checkpoints.write_shard

    def write_late(folder: Path, step: int, *others: Any) -> Any:
        steps.append((step, checkpoints.steps_in(folder)))
        assert goes_on.wait(PATIENCE) or step != 2
        return write(folder, step, *others)

    def set_at_4(done: Step) -> None:
        assert (done.step, checkpoints.steps_in(tmp_path / "checkpoints")) != (4, [2])
        if done.step == 4:
            goes_on.set()

    monkeypatch.setattr(checkpoints, "write_shard", write_late)
    train(corpus, override(QUICK, ["keep=4"]), tmp_path, on_step=set_at_4)
    assert steps == [(2, []), (4, [2]), (6, [2, 4]), (8, [2, 4, 6])]
    folder, expected = tmp_path / "checkpoints", quick_run / "checkpoints"
    assert (folder / "step-00000006" / "manifest.json").exists()
    name = "step-00000006/rank-00000-00000.safetensors"
    assert (folder / name).read_bytes() == (expected / name).read_bytes()
    for step in (2, 4):  # of other steps than the weights are of now
        train(corpus, QUICK, resumed_at(step, tmp_path, tmp_path / f"from-{step}"))
        assert_same_run(tmp_path / f"from-{step}", quick_run)


def test_copies_are_freed_when_they_are_written(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not only when the next ones are made."""
    copies: list[weakref.ref[torch.Tensor]] = []
    copy = shards.copy_to_host

    def note(tensor: torch.Tensor) -> torch.Tensor:
        copied = copy(tensor)
        copies.append(weakref.ref(copied))
        return copied

    def check(done: Step) -> None:
        if done.step > 1:
            wait_for_writes()
            assert copies
            assert not any(copied() is not None for copied in copies)

    monkeypatch.setattr(shards, "copy_to_host", note)
    train(corpus, override(QUICK, ["checkpoint_every=1", "steps=3"]), tmp_path, on_step=check)


def resumed_at(step: int, run: Path, output: Path) -> Path:
    """A copy of a run, with one checkpoint."""
    output.mkdir()
    for name in ("run.json", "metrics.jsonl"):
        shutil.copy(run / name, output)
    shutil.copytree(run / "checkpoints" / f"step-{step:08}", output / "checkpoints" / f"step-{step:08}")
    return output


def test_an_error_of_the_write_is_said_at_the_next_step(
    corpus: Corpus, quick_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoints.write_shard

    def fail(folder: Path, step: int, *others: Any) -> Any:
        if step == 4:
            (folder / "step-00000004.tmp" / "half").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        return write(folder, step, *others)

    monkeypatch.setattr(checkpoints, "write_shard", fail)
    recipe = override(QUICK, ["checkpoint_every=2", "steps=8"])
    with pytest.raises(OSError, match="No space left on device") as raised:
        train(corpus, recipe, tmp_path, on_step=lambda done: wait_for_writes())
    assert raised.value.filename == str(tmp_path / "checkpoints")
    assert len(read_metrics(tmp_path)) in (4, 5)  # as the write fails before or after the next loss is there
    assert checkpoints.steps_in(tmp_path / "checkpoints") == [2]
    assert list((tmp_path / "checkpoints").glob("*.tmp")) == []
    monkeypatch.undo()
    train(corpus, recipe, tmp_path)
    assert_same_run(tmp_path, quick_run)


def size_of(run: Path) -> int:
    return sum(tensor.nbytes for tensor in learnt(run).values())


def test_a_disk_without_room_is_said_before_anything_is_learnt(
    corpus: Corpus, quick_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = size_of(quick_run)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda folder: Usage(10**12, 0, size - 1))
    fields = ["steps=4", "length=64", "warmup=1", "attention=exact", "probe_every=0"]
    output, megabytes = tmp_path / "out", f"{size / 1e6:.1f} MB"
    outcome = run_muse("train", corpus.folder, *fields, "--output", output, "--device", "cpu")
    said = f"a checkpoint takes {megabytes} and {megabytes} are free; free some space; "
    assert_refused(outcome, f"muse: {output / 'checkpoints'}: {said}", code=1)
    assert "continue with: muse train" in outcome[2]
    assert read_metrics(output) == []


def test_a_disk_that_fills_up_is_announced_and_then_stops_the_run(
    corpus: Corpus, quick_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = size_of(quick_run)
    free = 10 * size
    notes: list[str] = []

    def fill(done: Step) -> None:
        nonlocal free
        if done.step == 4:
            free = size + 2**20
        if done.step > 4:
            free = size // 2

    def usage(folder: Path) -> Usage:
        assert folder.exists()
        written = sum(len(list(step.glob("*.safetensors"))) for step in folder.glob("step-00000004*"))
        return Usage(10**12, 0, max(0, free - written * size))

    monkeypatch.setattr(saving.shutil, "disk_usage", usage)
    with pytest.raises(OSError, match=r"a checkpoint takes .* are free; free some space") as raised:
        train(corpus, QUICK, tmp_path, on_step=fill, on_note=notes.append)
    assert raised.value.filename == str(tmp_path / "checkpoints")
    (note,) = notes
    assert note.startswith(f"{tmp_path / 'checkpoints'}: a checkpoint takes ")
    assert note.endswith(": the next one will stop the run; free some space")
    assert checkpoints.steps_in(tmp_path / "checkpoints") == [2, 4]
    assert list((tmp_path / "checkpoints").glob("*.tmp")) == []
    monkeypatch.undo()
    train(corpus, QUICK, tmp_path)
    assert_same_run(tmp_path, quick_run)


def test_a_finished_run_needs_no_room(
    corpus: Corpus, quick_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(quick_run, tmp_path / "out")
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda folder: Usage(10**12, 10**12, 0))
    train(corpus, QUICK, tmp_path / "out")


def test_checkpoints_until_the_next_one_are_removed(tmp_path: Path) -> None:
    for step, about in ((1, {}), (2, {"until_next": True}), (3, {}), (4, {}), (5, {"until_next": True})):
        save_whole(tmp_path, step, about, {"a": torch.zeros(3)})
    checkpoints.prune(tmp_path, 5, 2)
    assert checkpoints.steps_in(tmp_path) == [3, 4, 5]
    checkpoints.prune(tmp_path, 4, 1)
    assert checkpoints.steps_in(tmp_path) == [4, 5]
