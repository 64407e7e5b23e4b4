"""Signals and time limits: a run stops with a checkpoint, says how to go on, and goes on bit for bit."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muse_lab.cli.train import parse_duration
from muse_lab.pretraining.batches import Batches
from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.interruptions import stopping
from muse_lab.pretraining.interruptions.stopping import Request, Stopped, Stopping, stop_on_signals
from muse_lab.pretraining.monitoring import error_limit
from muse_lab.pretraining.monitoring.held_out import Evaluation
from muse_lab.pretraining.monitoring.metrics import Metrics, Step, read_metrics
from muse_lab.pretraining.recipes import override
from muse_lab.pretraining.training import train
from tests.command_line import assert_refused, run_muse
from tests.patience import PATIENCE
from tests.processes import running
from tests.ranks import CONTEXT, Mishap, training_alone, wait_for
from tests.training_runs import QUICK, SMALL, assert_same_run, inode_of

EVALUATED = override(SMALL, ["evaluate_every=4", "evaluate_samples=2", "evaluate_needles=0"])


def calling_first(call: Callable[..., Any], action: Callable[[], None], *, at: int = 1) -> Callable[..., Any]:
    """A function that acts before its call of this number."""
    number = 0

    def wrapped(*arguments: Any, **others: Any) -> Any:
        nonlocal number
        number += 1
        if number == at:
            action()
        return call(*arguments, **others)

    return wrapped


MOMENTS: dict[str, tuple[object, str, int, int]] = {
    "while a batch is read": (Batches, "read", 4, 3),
    "during the backward pass": (torch.Tensor, "backward", 5, 4),
    "during a probe": (error_limit, "visit_layers", 1, 2),
    "during an evaluation": (Evaluation, "_ask", 2, 3),
    "while a checkpoint is written": (checkpoints, "write_shard", 2, 4),
    "while metrics are written": (Metrics, "add", 3, 3),
}
"""What is called then, its how manyth call it is, and the step after which the run stops.

Checkpoints are written while the run goes on, so that it may be one step further.
"""


@pytest.fixture(scope="module")
def evaluated_run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("evaluated")
    train(corpus, EVALUATED, output)
    return output


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "moment"), list(zip(itertools.cycle([signal.SIGTERM, signal.SIGINT]), MOMENTS, strict=False))
)
def test_a_signal_stops_a_run_at_the_next_safe_point(
    number: int, moment: str, corpus: Corpus, evaluated_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, at, first = MOMENTS[moment]
    told: list[str] = []
    asked = Stopping()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, calling_first(getattr(owner, name), lambda: os.kill(os.getpid(), number), at=at))
        with pytest.raises(Stopped) as raised, stop_on_signals(asked, told.append):
            train(corpus, EVALUATED, tmp_path, stopping=asked)
    name = signal.Signals(number).name
    step = len(read_metrics(tmp_path))
    assert step in ((first, first + 1) if owner is checkpoints else (first,))
    assert str(raised.value) == f"stopped by {name} after step {step}"
    assert raised.value.exit_code == 128 + number
    assert told == [f"{name}: the run stops at the next safe point; a second signal stops it at once"]
    assert checkpoints.steps_in(tmp_path / "checkpoints")[-1] == step
    train(corpus, EVALUATED, tmp_path, on_refused=pytest.fail)
    assert_same_run(tmp_path, evaluated_run)
    assert checkpoints.steps_in(tmp_path / "checkpoints") == [6, 8]


@pytest.mark.long
def test_a_finished_run_is_not_stopped(
    corpus: Corpus, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal while the last checkpoint is written leaves nothing to do for another command."""
    asked = Stopping()
    signalled = calling_first(checkpoints.finish, lambda: os.kill(os.getpid(), signal.SIGTERM), at=4)
    monkeypatch.setattr(checkpoints, "finish", signalled)
    with stop_on_signals(asked):
        train(corpus, SMALL, tmp_path, stopping=asked)
    assert asked.request is not None
    assert_same_run(tmp_path, whole_run)


def test_handlers_are_those_of_before_at_the_end() -> None:
    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    with stop_on_signals(Stopping()):
        assert [signal.getsignal(number) for number in stopping.SIGNALS] != before
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before
    assert "listen to signals" not in [thread.name for thread in threading.enumerate()]


def test_other_threads_have_no_handlers() -> None:
    def run() -> None:
        with stop_on_signals(Stopping()):
            found.append(signal.getsignal(signal.SIGTERM))

    found: list[object] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.long
@pytest.mark.parametrize(("together", "is_at_once"), [(60.0, False), (0.01, True)])
def test_a_second_signal_stops_at_once(
    together: float, is_at_once: bool, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But two of the same moment are one, as those of a terminal and of torchrun."""

    def send() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)

    def wait_long() -> None:
        sender.start()
        sender.join()
        time.sleep(0.1)

    asked = Stopping()
    monkeypatch.setattr(stopping, "_TOGETHER", together)
    monkeypatch.setattr(torch.optim.AdamW, "step", calling_first(torch.optim.AdamW.step, wait_long, at=4))
    with pytest.raises(Stopped) as raised, stop_on_signals(asked):
        train(corpus, QUICK, tmp_path, stopping=asked)
    sender.join()
    assert raised.value.exit_code == (143 if is_at_once else 130)
    assert str(raised.value) == ("stopped by SIGTERM" if is_at_once else "stopped by SIGINT after step 4")
    assert len(read_metrics(tmp_path)) == (3 if is_at_once else 4)


def hang_in_a_lock(hangs: Any) -> None:
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(256)
    with stop_on_signals(Stopping()):
        libc.pthread_mutex_lock(mutex)
        hangs.set()
        libc.pthread_mutex_lock(mutex)  # which no signal interrupts


@pytest.mark.long
def test_a_second_signal_ends_a_process_that_hangs() -> None:
    """As in an exchange with a rank that is gone: Python never runs a handler there."""
    hangs = CONTEXT.Event()
    process = CONTEXT.Process(target=hang_in_a_lock, args=(hangs,))
    with running(process):
        assert hangs.wait(PATIENCE)
        os.kill(process.pid, signal.SIGTERM)
        process.join(timeout=1)
        assert process.exitcode is None
        for _ in range(30):  # the second one may be the first that is heard of, on a busy machine
            os.kill(process.pid, signal.SIGTERM)
            process.join(timeout=4)
            if process.exitcode is not None:
                break
        assert process.exitcode == 143


@pytest.mark.long
def test_a_time_limit_stops_a_run(
    corpus: Corpus, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that never goes backwards, whatever the other one does."""
    now, wall = 100.0, 1e9

    def go_back() -> float:
        nonlocal wall
        wall -= 1000
        return wall

    def tick(done: Step) -> None:
        nonlocal now
        now += 60

    monkeypatch.setattr(time, "time", go_back)
    with monkeypatch.context() as patch:
        patch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now))
        with pytest.raises(Stopped, match=r"^the time limit is reached after step 3$") as raised:
            train(corpus, SMALL, tmp_path, stopping=Stopping(180), on_step=tick)
    assert raised.value.exit_code == 124
    assert checkpoints.steps_in(tmp_path / "checkpoints") == [2, 3]
    train(corpus, SMALL, tmp_path)
    assert_same_run(tmp_path, whole_run)


def test_a_run_that_is_stopped_before_its_first_update_has_no_checkpoint(corpus: Corpus, tmp_path: Path) -> None:
    asked = Stopping()
    asked.ask(Request("stopped by somebody", 7))
    with pytest.raises(Stopped, match=r"^stopped by somebody after step 0$"):
        train(corpus, SMALL, tmp_path, stopping=asked)
    assert checkpoints.steps_in(tmp_path / "checkpoints") == []


def test_the_command_says_how_to_go_on(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def pass_a_minute() -> None:
        nonlocal now
        now += 60

    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(Metrics, "add", calling_first(Metrics.add, pass_a_minute, at=3))
    fields = [f"{name}={value}" for name, value in dataclasses.asdict(QUICK).items()]
    asked = ("train", corpus.folder, "--output", tmp_path / "out", "--device", "cpu", "--time-limit")
    code, _, err = run_muse(*asked, "1m", *fields)
    assert code == 124
    (line,) = err.splitlines()
    assert line.startswith("muse: the time limit is reached after step 3; the last good checkpoint is ")
    assert line.endswith(
        f"step-00000003; continue with: muse train {corpus.folder} --output {tmp_path / 'out'} --device cpu "
        "--time-limit 1m --resume"
    )
    assert_refused(run_muse(*asked, "soon"), "cannot read the duration 'soon': write it like 45s, 90m, 3h or 1h30m\n")


@pytest.mark.parametrize(
    ("text", "seconds"), [("45s", 45), ("90m", 5400), ("3h", 10800), ("1h30m", 5400), ("2d", 172800)]
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "3", "-1h", "30m1h", "1.5h", "h", "9999999s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 45s"):
        parse_duration(text)


@pytest.mark.long
def test_signals_at_four_random_moments_cost_nothing(corpus: Corpus, tmp_path: Path) -> None:
    """Some of them during a save. No update is made twice, and the run ends bit for bit as without."""
    recipe = override(QUICK, ["steps=48", "checkpoint_every=8"])
    train(corpus, recipe, tmp_path / "whole")
    output, errors = tmp_path / "out", tmp_path / "errors.txt"
    metrics, folder = output / "metrics.jsonl", output / "checkpoints"
    slow = Mishap(0, "save_slowly", 50)  # for the signal to arrive meanwhile
    draw = random.Random(0)
    done = 0
    for attempt in range(4):
        number = draw.choice([signal.SIGTERM, signal.SIGINT])
        before = inode_of(metrics)
        with training_alone(corpus, recipe, output, errors, slow) as process:
            # The file is replaced when training starts.
            wait_for(lambda before=before: inode_of(metrics) not in (None, before), process)
            if attempt % 3:
                time.sleep(draw.uniform(0, 0.15))
            else:  # during a save
                wait_for(lambda: any(folder.glob("*.tmp")), process)
            made = len(read_metrics(output))
            assert process.exitcode is None, errors.read_text()
            os.kill(process.pid, number)
            process.join(timeout=PATIENCE)
        lines = errors.read_text().splitlines()
        assert process.exitcode == 128 + number, (attempt, number, lines)
        *goes_on, told, ended = lines
        assert len(goes_on) == bool(done), lines
        assert all(line.endswith(f"goes on from step {done} of {recipe.steps}") for line in goes_on), lines
        assert told.endswith("a second signal stops it at once")
        assert "stopped by" in ended
        assert "continue with: muse train" in ended
        done = len(read_metrics(output))
        assert done <= made + 3, "it was not noticed"
        assert (checkpoints.steps_in(folder) or [0])[-1] == done, "an update was lost"
    assert 4 < done < recipe.steps
    with training_alone(corpus, recipe, output, errors, slow) as process:
        process.join(timeout=PATIENCE)
    assert process.exitcode == 0, errors.read_text()
    assert_same_run(output, tmp_path / "whole")
