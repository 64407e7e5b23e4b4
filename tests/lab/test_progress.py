"""What commands say while they work, where there is no terminal: nothing takes long without a line on stderr."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muse_lab.cli.app import busy, phases_bar, progress_bar
from tests.command_line import assert_done, run_muse

WaitFor = Callable[[str], None]


@pytest.fixture
def wait_for(monkeypatch: pytest.MonkeyPatch) -> WaitFor:
    """Waits until a line of progress has this in it. Lines are said every few milliseconds."""
    said: list[str] = []
    monkeypatch.setattr("muse_lab.cli.app.say", said.append)
    for name in ("SECONDS_BEFORE_FIRST_LINE", "SECONDS_BETWEEN_LINES"):
        monkeypatch.setattr(f"muse_lab.cli.app.{name}", 0.005)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def wait(line: str) -> None:
        said.clear()
        end = time.monotonic() + 60
        while not any(line in one for one in list(said)):
            assert time.monotonic() < end, f"{line!r} is not among {set(said)}"
            time.sleep(0.002)

    return wait


def test_lines_say_what_is_done_however_long_a_step_takes(wait_for: WaitFor) -> None:
    with busy("loading a model"):
        wait_for("loading a model")
    with progress_bar(8, "warming up") as on_step:
        wait_for("warming up: 0 of 8")
        on_step("muse at 8k", 2)
        wait_for("muse at 8k: 2 of 8, ETA 0:0")
        wait_for("muse at 8k: 2 of 8, ETA 0:0")


def test_a_command_takes_over_with_lines_of_its_own(wait_for: WaitFor) -> None:
    threads = threading.active_count()
    with phases_bar(says_lines=False) as on_phase:
        on_phase("preparing", 0, None)
        wait_for("preparing")
        on_phase("its own line", 1, 8)
        assert threading.active_count() == threads


def test_of_several_processes_the_first_shows_progress(wait_for: WaitFor, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()
    monkeypatch.setenv("RANK", "1")
    with busy("loading a model"):
        assert threading.active_count() == threads
    monkeypatch.setenv("RANK", "0")
    with busy("loading a model"):
        wait_for("loading a model")


def test_a_long_run_is_estimated_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr("muse_lab.cli.app.time.monotonic", lambda: now)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with progress_bar(540) as on_step:
        for now in (1.0, 2.0):
            on_step("single of 2048 tokens", round(now))
    assert capsys.readouterr().err == "muse: single of 2048 tokens: 1 of 540, ETA 0:08:59\n"


LOADING, WRITING = ("language_model.load_model", "loading tiny"), ("measuring.write_report", "writing the report ")


@pytest.mark.parametrize(
    ("command", "slow"),
    [
        (
            ["tune", "--heads", "2", "--repeats", "1", "--only", "muse:QK4R1B32"],
            [
                LOADING,
                ("tune.read_samples", "reading text.txt"),
                ("tune.capture_heads", "capturing 2 heads of tiny on one sample of 128 tokens"),
                ("tune.measure", ": 0 of 3"),
                WRITING,
            ],
        ),
        (
            ["fidelity", "--attention", "muse:QK4R1B32"],
            [LOADING, ("language_model.read_samples", "reading text.txt"), ("fidelity.measure", ": 0 of 2"), WRITING],
        ),
    ],
    ids=["tune", "fidelity"],
)
def test_every_slow_part_of_a_command_is_announced(
    command: list[str],
    slow: list[tuple[str, str]],
    folder: Path,
    tmp_path: Path,
    wait_for: WaitFor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wait_in(place: str, line: str) -> None:
        module, _, name = place.rpartition(".")
        original: Any = getattr(importlib.import_module(f"muse_lab.cli.{module}"), name)

        def waiting(*given: Any, **named: Any) -> Any:
            wait_for(line)
            waited.append(line)
            return original(*given, **named)

        monkeypatch.setattr(f"muse_lab.cli.{module}.{name}", waiting)

    waited: list[str] = []
    for place, line in slow:
        wait_in(place, line)
    folders = (folder, "--text", folder.parent / "text.txt", "--output", tmp_path / "out")
    assert_done(run_muse(*command, *folders, "--length", "128", "--device", "cpu"))
    assert waited == [line for _, line in slow]
