"""The batches of a run, one after the other, read by processes of their own while the model computes.

A needle document takes as long to write as a GPU takes to learn from it.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from muse_lab.pretraining.batches import Batches

READERS = 2
"""Processes, which take turns."""
_SECONDS_BETWEEN_CHECKS = 0.5


class ReadingError(RuntimeError):
    """A batch cannot be read any more."""


class ReaderError(RuntimeError):
    """A reading process cannot be started or has died."""


def can_read_ahead() -> bool:
    """Forked processes do not import the running script again; forking is safe on Linux only."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


def read_batches(batches: Batches, steps: range, rank: int = 0) -> Generator[Tensor]:
    """Those of a rank, in order, each when it is asked for."""
    for step in steps:
        try:
            yield batches.read(step, rank)
        except (OSError, ValueError) as error:
            raise ReadingError(str(error)) from None


def read_ahead(
    batches: Batches, steps: range, rank: int = 0, while_waiting: Callable[[], None] = lambda: None
) -> Generator[Tensor]:
    """The same, but the next ones are read meanwhile. Close the iterator if it is left early.

    Args:
        while_waiting: called now and then while the next batch is not there yet; it may raise
    """
    readers: list[_Reader] = []
    try:
        readers += (_Reader(batches, steps[number::READERS], rank) for number in range(READERS))
        for step, reader in zip(steps, itertools.cycle(readers), strict=False):
            yield reader.take(step, while_waiting)
    finally:
        for reader in readers:
            reader.stop()


class _Reader:
    """A process that reads some of the batches."""

    def __init__(self, batches: Batches, steps: range, rank: int) -> None:
        self._here, there = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.get_context("fork").Process(
            target=_send, args=(batches, steps, rank, self._here, there), name="read batches", daemon=True
        )
        try:
            with _quiet_fork():
                self._process.start()
        except OSError as error:
            raise ReaderError(f"no process can be started to read ahead ({error.strerror})") from None
        there.close()  # so that the end of the process is the end of what comes from it

    def take(self, step: int, while_waiting: Callable[[], None]) -> Tensor:
        """The next one, which is of this step."""
        try:
            while not self._here.poll(_SECONDS_BETWEEN_CHECKS):
                while_waiting()
            found = self._here.recv()
        except (EOFError, OSError):  # between two batches, or within one
            raise ReaderError(f"a process that reads ahead has died before step {step + 1}") from None
        if isinstance(found, str):
            raise ReadingError(found)
        return torch.from_numpy(found)

    def stop(self) -> None:
        self._here.close()
        self._process.kill()
        self._process.join()


def _send(batches: Batches, steps: range, rank: int, here: Connection, there: Connection) -> None:
    """In the other process. It waits when it is ahead by what a pipe holds, or by one batch if that is more."""
    here.close()  # so that this process ends with the run, when there is no reader left
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # threads do not survive a fork
    with contextlib.suppress(BrokenPipeError):
        try:
            for tokens in read_batches(batches, steps, rank):
                there.send(tokens.numpy())
        except ReadingError as error:
            there.send(str(error))


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """Python and tokenizers advise against a fork where there are threads: the new process uses none of them."""
    name = "TOKENIZERS_PARALLELISM"
    is_set = name in os.environ
    os.environ.setdefault(name, "false")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
            yield
    finally:
        if not is_set:
            del os.environ[name]
