"""The batches of a run, one after the other, read by a process of their own while the model computes.

A needle document takes longer to write than a GPU takes to learn from it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from muse_attention.pretraining.batches import Batches

CAN_READ_AHEAD = sys.platform == "linux"
"""A process that is forked needs nothing of the script that runs; elsewhere to fork is not safe."""


class ReadingError(RuntimeError):
    """A batch cannot be read any more."""


def read_batches(batches: Batches, steps: range, rank: int = 0) -> Generator[Tensor]:
    """Those of a rank, in order, each when it is asked for."""
    for step in steps:
        try:
            yield batches.read(step, rank)
        except (OSError, ValueError) as error:
            raise ReadingError(str(error)) from None


def read_ahead(batches: Batches, steps: range, rank: int = 0) -> Generator[Tensor]:
    """The same, but the next one is read meanwhile. Close the iterator if it is left early."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_send, args=(batches, steps, rank, here, there), name="read batches", daemon=True
    )
    with _quiet_fork():
        process.start()
    there.close()  # so that the end of the process is the end of what comes from it
    try:
        for step in steps:
            try:
                found = here.recv()
            except (EOFError, OSError):  # between two batches, or within one
                raise ReadingError(f"the process that reads ahead has died before step {step + 1}") from None
            if isinstance(found, str):
                raise ReadingError(found)
            yield torch.from_numpy(found)
    finally:
        here.close()  # the process has nobody to send to, and ends
        process.kill()
        process.join()


def _send(batches: Batches, steps: range, rank: int, here: Connection, there: Connection) -> None:
    """In the other process. It waits until a batch is taken before it reads the one after the next."""
    here.close()  # so that the end of the run is the end of this process
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
