"""Stopping a run from outside, by SIGTERM, SIGINT or the end of its time.

    stopping = Stopping(seconds=3 * 3600)
    with stop_on_signals(stopping):
        train(corpus, recipe, output, stopping=stopping)

A request is noticed at the next safe point of the run: between two updates, between the loss of an update and its
changes, between two parts of an evaluation, and while it waits for a batch. The run then writes a checkpoint and raises
`Stopped`. A second signal raises it at once, wherever the run is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple

from muse_lab.pretraining.interruptions.watchdog import end_process

TIME_IS_UP = 124
"""Exit code at the end of a time limit, the same as that of `timeout`."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TOGETHER = 0.5
"""Seconds within which several signals count as one: a terminal and `torchrun` both send one to every process."""
_PATIENCE = 2.0
"""Seconds that Python has to act on a second signal, before the process ends without it: a call may never return."""


class Stopped(KeyboardInterrupt):
    """The run has stopped on request."""

    def __init__(self, cause: str, exit_code: int) -> None:
        super().__init__(cause)
        self.exit_code = exit_code


class Request(NamedTuple):
    cause: str
    exit_code: int


OF_ANOTHER_RANK = Request("stopped as another rank was", 128 + signal.SIGTERM)


class Stopping:
    """Whether a run was asked to stop."""

    def __init__(self, seconds: float | None = None) -> None:
        """
        Args:
            seconds: time until the run is to stop; None for no limit
        """
        self._seconds = seconds
        self._began = time.monotonic()
        self._request: Request | None = None

    def ask(self, request: Request) -> None:
        """The first request counts."""
        self._request = self._request or request

    @property
    def request(self) -> Request | None:
        if self._seconds is not None and time.monotonic() - self._began >= self._seconds:
            self.ask(Request("the time limit is reached", TIME_IS_UP))
        return self._request


@contextlib.contextmanager
def stop_on_signals(stopping: Stopping, on_signal: Callable[[str], None] = lambda message: None) -> Iterator[None]:
    """Turn signals in this block into requests; outside of the main thread, where Python has no handlers, do nothing.

    Args:
        on_signal: called in another thread with what will happen
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = _Signals(stopping, on_signal)
    before = {number: signal.signal(number, signals.handle) for number in SIGNALS}
    try:
        with signals.listening():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Signals:
    def __init__(self, stopping: Stopping, on_signal: Callable[[str], None]) -> None:
        self._stopping = stopping
        self._on_signal = on_signal
        self._first: float | None = None
        self._has_left = threading.Event()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler, called in the main thread when it runs Python."""
        request = Request(f"stopped by {signal.Signals(number).name}", 128 + number)
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._stopping.ask(request)
        elif now - self._first > _TOGETHER:
            raise Stopped(*request)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Run a thread that receives signals while the main thread is in a call that may not return."""
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        thread = threading.Thread(target=self._listen, args=(receiver,), name="listen to signals", daemon=True)
        thread.start()
        before = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        try:
            yield
        finally:
            self._has_left.set()
            signal.set_wakeup_fd(before)
            os.close(sender)  # which ends the thread
            thread.join()
            os.close(receiver)

    def _listen(self, receiver: int) -> None:
        first: float | None = None
        while received := os.read(receiver, 1):
            number = received[0]
            if number not in SIGNALS:
                continue
            if first is None:
                first = time.monotonic()
                name = signal.Signals(number).name
                self._on_signal(f"{name}: the run stops at the next safe point; a second signal stops it at once")
            elif time.monotonic() - first > _TOGETHER and not self._has_left.wait(_PATIENCE):
                end_process(128 + number)
