"""A rank of a training run, or all of one, in a process forked from one that has imported everything already."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import muse_lab.cli.app
import muse_lab.cli.train
import muse_lab.pretraining.checkpoints.together
import muse_lab.pretraining.training  # imported once, for all ranks
from muse_lab.cli import main
from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.interruptions import watchdog
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.recipes import Recipe
from tests.patience import PATIENCE
from tests.processes import running

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])


class Mishap(NamedTuple):
    """What goes wrong on one rank."""

    rank: int
    kind: str
    """of those that `run_command` has"""
    number: int
    """which call it is that goes wrong, or how many milliseconds more each takes"""


def words_of(corpus: Corpus, recipe: Recipe) -> list[str]:
    """Arguments of `muse train`."""
    fields = [f"{name}={value}" for name, value in dataclasses.asdict(recipe).items()]
    return [str(corpus.folder), *fields, "--recipe", "tiny"]


@contextlib.contextmanager
def training_alone(
    corpus: Corpus, recipe: Recipe, output: Path, errors: Path, mishap: Mishap | None = None
) -> Iterator[Any]:
    """A process of `muse train`, which is killed at the end if it has not ended; `errors` is what it says on stderr."""
    arguments = ["train", *words_of(corpus, recipe), "--output", str(output), "--device", "cpu"]
    process = CONTEXT.Process(target=run_command, args=(arguments, {"RANK": "0"}, errors, mishap))
    with running(process):
        yield process


def wait_for(condition: Callable[[], bool], process: Any, seconds: float = PATIENCE) -> None:
    """Returns also where the process has ended; a TimeoutError if neither happens."""
    end = time.monotonic() + seconds
    while process.exitcode is None and not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"nothing has happened for {seconds:g} s")
        time.sleep(0.001)


def run_command(
    arguments: Sequence[str], environment: Mapping[str, str], errors: Path, mishap: Mishap | None = None
) -> None:
    """`muse` with some arguments; what it says on stderr goes to a file."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    muse_lab.cli.app.SECONDS_BEFORE_FIRST_LINE = 3600.0  # as in conftest.py
    if mishap is not None and mishap.rank == int(environment["RANK"]):
        {
            "poison": poison,
            "die_in_save": die_in_save,
            "all_die_in_save": lambda number: die_in_save(number, errors.parent),
            "fill_disk": fill_disk,
            "save_slowly": save_slowly,
            "hang": hang,
        }[mishap.kind](mishap.number)
    errors.with_suffix(".pid").write_text(str(os.getpid()))
    sys.argv = ["muse", *arguments]
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    with open(os.devnull, "w") as file:
        os.dup2(file.fileno(), 1)
    main()


def poison(number: int) -> None:
    """The loss of this backward pass is not finite."""
    forward = DecoderForCausalLM.forward
    calls = 0

    def spoilt(*arguments: Any, **others: Any) -> Any:
        nonlocal calls
        out = forward(*arguments, **others)
        if out.loss is not None and torch.is_grad_enabled():
            calls += 1
            out.loss = out.loss * (math.nan if calls == number else 1.0)
        return out

    DecoderForCausalLM.forward = spoilt


def die_in_save(number: int, ranks: Path | None = None) -> None:
    """`kill -9` at this call to the file system by the thread that saves.

    Args:
        ranks: folder with the numbers of all processes, which are killed first
    """
    calls = 0

    def kill() -> None:
        processes = set() if ranks is None else {int(path.read_text()) for path in ranks.glob("*.pid")}
        for process in [*(processes - {os.getpid()}), os.getpid()]:
            os.kill(process, signal.SIGKILL)

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **others: Any) -> Any:
            nonlocal calls
            if threading.current_thread().name.startswith("save step "):
                calls += 1
                if calls == number:
                    kill()
            return call(*arguments, **others)

        return counted

    for name in ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir"):
        setattr(os, name, counting(getattr(os, name)))


def fill_disk(number: int) -> None:
    """This shard of the rank does not fit on its disk."""
    write, calls = checkpoints.write_shard, 0

    def failing(folder: Path, *others: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        return write(folder, *others)

    checkpoints.write_shard = failing


def save_slowly(milliseconds: int) -> None:
    write = checkpoints.write_shard

    def slow(*arguments: Any) -> Any:
        time.sleep(milliseconds / 1000)
        return write(*arguments)

    checkpoints.write_shard = slow


def hang(number: int) -> None:
    """In this update of the weights, with a child."""
    watchdog._PATIENCE = 0.5
    step, updates = torch.optim.AdamW.step, 0

    def hanging(optimiser: torch.optim.AdamW) -> None:
        nonlocal updates
        updates += 1
        if updates == number:
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[1000])
            child.start()  # which would hold the lock, and what is read of stderr
            time.sleep(1000)
        step(optimiser)

    torch.optim.AdamW.step = hanging
