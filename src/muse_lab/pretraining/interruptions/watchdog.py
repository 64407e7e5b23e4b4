"""A watchdog that ends a run without progress, and writes the stacks of all threads to a file.

A thread counts the time since the last sign of life. While it does not run itself, as when the process is suspended,
no time is counted. Clocks are monotonic.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Self

from muse_lab.pretraining.interruptions.failures import StepError

STALLED = 1
"""Exit code of a process that the watchdog had to end."""
_TICK = 1.0
_PATIENCE = 5.0
"""Seconds that a run has to raise an error itself: where it waits for a batch, it can."""


class Watchdog:
    def __init__(self, seconds: float, stacks: Path, on_stall: Callable[[str], None]) -> None:
        """
        Args:
            seconds: longest time without a sign of life; 0 for no limit
            stacks: file for the stacks of all threads
            on_stall: called in another thread with what happened, before the process is ended
        """
        self._seconds = seconds
        self._stacks = stacks
        self._on_stall = on_stall
        self._quiet = 0.0
        self._doing = "starting"
        self._stalled: str | None = None
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, doing: str) -> None:
        """A sign of life; `doing` is what comes next, in words."""
        self._doing = doing
        self._quiet = 0.0

    def check(self) -> None:
        """Raise StepError if the run stands still; called where the run waits."""
        if self._stalled is not None:
            raise StepError(self._stalled)

    def __enter__(self) -> Self:
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_ended.set()
        if self._seconds:
            self._thread.join()

    def _watch(self) -> None:
        tick = min(_TICK, self._seconds / 4)
        before = time.monotonic()
        while not self._has_ended.wait(tick):
            now = time.monotonic()
            self._quiet += min(now - before, 2 * tick)
            before = now
            if self._quiet > self._seconds:
                break
        else:
            return
        message = f"no progress for {self._seconds / 60:g} minutes while {self._doing}; stacks are in {self._stacks}"
        with contextlib.suppress(OSError):
            self._stacks.unlink(missing_ok=True)
            with open(self._stacks, "x") as file:  # a link there is not followed
                faulthandler.dump_traceback(file, all_threads=True)
        self._stalled = message
        if not self._has_ended.wait(_PATIENCE):
            try:
                self._on_stall(message)
            finally:
                end_process(STALLED)


def end_process(exit_code: int) -> NoReturn:
    """End the process at once, from any thread, even if the main thread is in a call that does not return.

    Processes that read ahead end too: they would keep the folder of the run locked.
    """
    try:
        for child in multiprocessing.active_children():
            child.kill()
    finally:
        os._exit(exit_code)
