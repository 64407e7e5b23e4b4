"""A run that stands still is ended, with the stacks of its threads, and so is one whose reader does."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muse_lab.pretraining.batches import Batches
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.interruptions import watchdog
from muse_lab.pretraining.interruptions.failures import TrainingError, read_failures
from muse_lab.pretraining.interruptions.stopping import Request, Stopped, Stopping
from muse_lab.pretraining.interruptions.watchdog import Watchdog
from muse_lab.pretraining.recipes import override
from muse_lab.pretraining.training import train
from tests.patience import PATIENCE
from tests.ranks import Mishap, training_alone
from tests.training_runs import QUICK

NEEDLES = override(QUICK, ["length=256", "steps=6", "mixture=niah", "stall_minutes=0.05"])


def stall(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The processes that read ahead never come to this step."""
    read = Batches.read

    def slow(batches: Batches, step: int, rank: int = 0) -> torch.Tensor:
        if step == at:
            time.sleep(1000)
        return read(batches, step, rank)

    monkeypatch.setattr(Batches, "read", slow)


@pytest.mark.long
def test_a_reader_that_stalls_ends_the_run(needles: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stall(monkeypatch, at=3)
    message = r"^no progress for 0.05 minutes while reading the batch of step 4; stacks are in .*stacks.txt$"
    with pytest.raises(TrainingError, match=message):
        train(needles, NEEDLES, tmp_path)
    assert "reading.py" in (tmp_path / "stacks.txt").read_text()
    assert read_failures(tmp_path).step == 4
    monkeypatch.undo()
    train(needles, NEEDLES, tmp_path)
    assert read_failures(tmp_path) is None


@pytest.mark.long
def test_a_run_is_stopped_while_it_waits_for_a_batch(
    needles: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall(monkeypatch, at=3)
    asked = Stopping()

    def ask(done: Any) -> None:
        if done.step == 3:
            timer.start()

    timer = threading.Timer(1, asked.ask, [Request("stopped by a test", 3)])
    with pytest.raises(Stopped, match="stopped by a test after step 3"):
        train(needles, override(NEEDLES, ["stall_minutes=0"]), tmp_path, stopping=asked, on_step=ask)
    assert (tmp_path / "checkpoints" / "step-00000003").is_dir()


def read_all(pipe: int, seconds: float) -> str:
    """What is in a pipe, once nobody has it open any more: a child that was told to end needs a moment."""
    said, ends = b"", time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            if not (more := os.read(pipe, 1 << 16)):
                return said.decode()
            said += more
        except BlockingIOError:
            time.sleep(0.05)
    raise AssertionError(f"somebody has the pipe still open, after {said!r}")


@pytest.mark.long
def test_a_step_that_hangs_ends_the_process(corpus: Corpus, tmp_path: Path) -> None:
    """And its children, which would keep stderr open."""
    recipe = override(QUICK, ["stall_minutes=0.05"])
    errors = tmp_path / "errors"
    os.mkfifo(errors)
    reading = os.open(errors, os.O_RDONLY | os.O_NONBLOCK)
    with training_alone(corpus, recipe, tmp_path / "out", errors, Mishap(0, "hang", 4)) as process:
        process.join(timeout=PATIENCE)
    (line,) = read_all(reading, seconds=PATIENCE).splitlines()
    os.close(reading)
    assert process.exitcode == 1
    stacks = tmp_path / "out" / "stacks.txt"
    assert line.startswith(
        f"muse: no progress for 0.05 minutes while changing the weights at step 4; stacks are in {stacks}; the last "
    )
    assert line.endswith("step-00000002; resume the run")
    assert "in hanging" in stacks.read_text()
    assert read_failures(tmp_path / "out").step == 4


class Ticks:
    """A clock, and an event that is waited for: each wait takes as long as the next of some numbers."""

    def __init__(self, ticks: list[float]) -> None:
        self.now, self.ticks, self.quiet = 0.0, iter(ticks), []

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        tick = next(self.ticks, None)
        self.now += tick or 0
        return tick is None


@pytest.mark.parametrize(
    ("ticks", "is_stalled"),
    [([1.0] * 59, False), ([1.0] * 61 + [0.0], True), ([1.0] * 20 + [36000.0] + [1.0] * 20, False)],
    ids=["a minute less", "a minute", "a process that was suspended"],
)
def test_only_time_in_which_it_runs_is_counted(
    ticks: list[float], is_stalled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    clock = Ticks(ticks)
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (tmp_path / "stacks.txt").symlink_to(outside)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(watchdog, "end_process", lambda code: told.append(f"ended with {code}"))
    dog = Watchdog(60.0, tmp_path / "stacks.txt", told.append)
    dog._has_ended = clock  # type: ignore[assignment]
    dog.beat("testing")
    dog._watch()
    if not is_stalled:
        assert told == []
        dog.check()
        return
    assert "_watch" in (tmp_path / "stacks.txt").read_text()
    assert outside.read_text() == "kept", "no link is followed"
    message = f"no progress for 1 minutes while testing; stacks are in {tmp_path / 'stacks.txt'}"
    assert told == [message, "ended with 1"]
    with pytest.raises(TrainingError, match="no progress for 1 minutes"):
        dog.check()


def test_no_thread_is_left(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, override(QUICK, ["steps=2"]), tmp_path)
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]
