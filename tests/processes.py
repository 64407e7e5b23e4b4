"""Processes that a test starts: a port to meet at, an end for all of them, and what went wrong in each check."""

from __future__ import annotations

import contextlib
import socket
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def running(*processes: Any) -> Iterator[None]:
    """They are started, and killed at the end if they have not ended."""
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def send_reports(checks: Iterable[Callable[[Any], None]], given: Any, report: Any) -> None:
    """Sends (check, what went wrong or None) for each check of what is given, up to the first that fails."""
    for check in checks:
        try:
            check(given)
            report.send((check.__name__, None))
        except BaseException:  # what pytest raises is no Exception
            report.send((check.__name__, traceback.format_exc()))
            break  # the other ranks may wait for this one
    report.close()
