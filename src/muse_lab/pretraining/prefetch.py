"""The batches of a run in order, read by separate processes while the model computes.

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
    """Whether to fork readers: forked processes do not import the running script again, but only Linux forks safely."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


def read_batches(batches: Batches, steps: range, rank: int = 0) -> Generator[Tensor]:
    """The batches of a rank, in order, each read on demand."""
    for step in steps:
        try:
            yield batches.read(step, rank)
        except (OSError, ValueError) as error:
            raise ReadingError(str(error)) from None


def read_ahead(
    batches: Batches, steps: range, rank: int = 0, while_waiting: Callable[[], None] = lambda: None
) -> Generator[Tensor]:
    """`read_batches`, but the next batches are read meanwhile. Close the iterator if it is left early.

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
        self._receiver, sender = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.get_context("fork").Process(
            target=_send, args=(batches, steps, rank, self._receiver, sender), name="read batches", daemon=True
        )
        try:
            with _quiet_fork():
                self._process.start()
        except OSError as error:
            raise ReaderError(f"no process can be started to read ahead ({error.strerror})") from None
        sender.close()  # so that the receiver sees the end of the process

    def take(self, step: int, while_waiting: Callable[[], None]) -> Tensor:
        """The next batch, which is that of `step`."""
        try:
            while not self._receiver.poll(_SECONDS_BETWEEN_CHECKS):
                while_waiting()
            received = self._receiver.recv()
        except (EOFError, OSError):  # between two batches, or within one
            raise ReaderError(f"a process that reads ahead has died before step {step + 1}") from None
        if isinstance(received, str):
            raise ReadingError(received)
        return torch.from_numpy(received)

    def stop(self) -> None:
        self._receiver.close()
        self._process.kill()
        self._process.join()


def _send(batches: Batches, steps: range, rank: int, receiver: Connection, sender: Connection) -> None:
    """Runs in the reader's process. It is ahead by as much as a pipe holds, or by one batch if that is more."""
    receiver.close()  # so that this process ends with the run, when there is no receiver left
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # threads do not survive a fork
    with contextlib.suppress(BrokenPipeError):
        try:
            for tokens in read_batches(batches, steps, rank):
                sender.send(tokens.numpy())
        except ReadingError as error:
            sender.send(str(error))


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
