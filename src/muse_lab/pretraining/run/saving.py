"""When and how a run is saved: its checkpoints, by updates, by time and on request, written by all ranks together.

Checkpoints after every `checkpoint_every` updates are regular, and the newest `keep` of them are kept. All others are
there to resume from, and are removed when a newer checkpoint is on disk.

The state is copied to host memory, and written by a thread while training goes on. There is one write at a time: the
next one waits for it, and so does the end of the run. The thread is our own instead of `async_save` of
torch.distributed.checkpoint, because it also writes the manifest, renames, and removes older checkpoints, and because
one process needs it without a process group.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import torch.distributed as dist
from torch import Tensor

from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.checkpoints.manifest import StoredPart
from muse_lab.pretraining.checkpoints.shards import Piece, whole_pieces
from muse_lab.pretraining.interruptions.failures import StepError, TrainingError, forget_failures
from muse_lab.pretraining.interruptions.stopping import Stopped
from muse_lab.pretraining.monitoring.metrics import Metrics
from muse_lab.pretraining.optimiser import are_finite
from muse_lab.pretraining.parallel import World, is_of_lost_rank, local_part
from muse_lab.pretraining.recipes import Recipe
from muse_lab.pretraining.run.folder import describe_last_good
from muse_lab.pretraining.run.state import RunState

_PATIENCE = 60.0
"""Seconds that a write has to end, when an error has ended the run."""
_MARGIN = 2**20
"""Bytes for manifests, metrics and folders."""


@dataclass
class Saver:
    """As a context manager, it waits for the write in flight, unless a second signal stopped the run."""

    folder: Path
    """of the checkpoints"""
    about: dict[str, Any]
    """record of the run in each of them"""
    recipe: Recipe
    world: World
    metrics: Metrics | None
    """on the first rank"""
    newest: int
    """step of the newest checkpoint, written or in flight; 0 if there is none"""
    on_note: Callable[[str], None] = lambda message: None
    """told on the first rank when space runs out, in another thread"""

    def __post_init__(self) -> None:
        """Collective: every rank must call it."""
        self._saved_at = time.monotonic()
        self._in_flight: Future[None] | None = None
        # A separate group: the thread exchanges plans while the run exchanges gradients.
        self._group = None if self.world.mesh is None else dist.new_group(backend="gloo")

    def is_due(self) -> bool:
        """Whether it is time for a checkpoint, by the first rank's clock."""
        minutes = self.recipe.checkpoint_minutes
        return self.world.is_first and minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes

    def has_failed(self) -> bool:
        """Whether the write in flight has failed."""
        return self._in_flight is not None and self._in_flight.done() and self._in_flight.exception() is not None

    def check_room(self, parameters: int) -> None:
        """Raise an OSError if there is no room for one checkpoint. Collective: every rank must call it.

        Args:
            parameters: number of them in the whole model; each has a weight and two moments in float32
        """
        try:
            self.world.let_first(lambda: _check_room(self.folder, 3 * 4 * parameters), "write a checkpoint")
        except ValueError as error:  # of the other ranks
            raise TrainingError(str(error)) from None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: RunState, *, until_next: bool = False) -> None:
        """Copy the state and begin to write a checkpoint of it. Collective: every rank must call it.

        Raises the error of the previous write, if it failed.

        Args:
            tensors: weights and moments, sharded or not
            until_next: remove it when there is a newer one
        """
        self.wait()
        if not self.world.all_succeed(are_finite(local_part(tensor) for tensor in tensors.values())):
            raise StepError(
                f"the weights after step {step} are not finite, and are not kept; {describe_last_good(self.folder)}; "
                "start again from its recipe with a lower peak_rate"
            )
        notes = {"state": state.to_document(), checkpoints.UNTIL_NEXT: until_next}
        about = {**self.about, **{name: note for name, note in notes.items() if note}}
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self._in_flight = _in_background(self._prepare(step, tensors, about, size), f"save step {step}")
        self.newest = step
        self._saved_at = time.monotonic()

    def wait(self) -> None:
        """Return when no write is in flight; raises the error of the one that was."""
        error = None if self._in_flight is None else self._in_flight.exception()
        self._in_flight = None
        if error is not None:
            raise self._as_own(error) from error

    def fail(self) -> NoReturn:
        """Raise the error of the write that has failed on any rank. Collective: every rank must call it."""
        self.wait()
        raise self._describe_failure_elsewhere()

    def describe_last_good(self) -> str:
        """The newest checkpoint that is whole, in words, when no write is in flight."""
        if self._in_flight is not None:
            wait([self._in_flight], _PATIENCE)
        return describe_last_good(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.wait()
        elif not isinstance(error, Stopped) and self._in_flight is not None:
            # The error that ends the run is reported, not that of a write. A lost rank may never write its part.
            wait([self._in_flight], None if self._group is None else _PATIENCE)

    def _prepare(
        self, step: int, tensors: Mapping[str, Tensor], about: dict[str, Any], size: int
    ) -> Callable[[], None]:
        """Copy the tensors, and return a function that writes them."""
        folder = self.folder

        def begin() -> None:
            _check_room(folder, size)
            checkpoints.begin(folder, step)

        def write(pieces: Sequence[Piece]) -> list[StoredPart]:
            return checkpoints.write_shard(folder, step, self.world.rank, pieces)

        def finish(parts: list[StoredPart]) -> None:
            if self.metrics is not None:
                self.metrics.sync()  # a run that goes on from this checkpoint has all lines before it
            checkpoints.finish(folder, step, about, parts)
            checkpoints.prune(folder, step, self.recipe.keep)
            forget_failures(folder.parent, step)
            if shortage := _shortage(folder, size):
                self.on_note(f"{folder}: {shortage}: the next one will stop the run; free some space")

        if self._group is None:
            pieces = whole_pieces(tensors)

            def write_all() -> None:
                begin()
                finish(write(pieces))

        else:
            from muse_lab.pretraining.checkpoints.together import StagedTensors, save_together

            staged, group = StagedTensors(tensors, is_first=self.world.is_first), self._group

            def write_all() -> None:
                save_together(staged, group, begin=begin, write=write, finish=finish)

        def write_or_clear() -> None:
            with contextlib.ExitStack() as on_error:
                if self.world.is_first:
                    on_error.callback(checkpoints.clear_unfinished, folder)  # it may be what fills the disk
                write_all()
                on_error.pop_all()

        return write_or_clear

    def _as_own(self, error: BaseException) -> BaseException:
        """The error of this rank, if several ranks have one."""
        if self._group is None:
            return error
        from torch.distributed.checkpoint.api import CheckpointException

        if isinstance(error, CheckpointException):
            own = error.failures.get(self.world.rank)
            return self._describe_failure_elsewhere() if own is None else own[0]
        if is_of_lost_rank(error):
            return TrainingError(f"another rank is gone; {describe_last_good(self.folder)}; resume the run")
        return error

    def _describe_failure_elsewhere(self) -> TrainingError:
        return TrainingError(f"another rank cannot write its checkpoint; {describe_last_good(self.folder)}")


def _in_background(action: Callable[[], None], name: str) -> Future[None]:
    """Run an action while training goes on. Its thread ends with the process: what it writes is whole or absent."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            action()
        except BaseException as error:  # torch.distributed.checkpoint raises one that is no Exception
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def _check_room(folder: Path, size: int) -> None:
    """Raise an OSError, as of a full disk, that says how much is missing."""
    if shortage := _shortage(folder, size):
        raise OSError(errno.ENOSPC, f"{shortage}; free some space", str(folder))


def _shortage(folder: Path, size: int) -> str:
    """What a checkpoint takes, and what is free on the disk of a folder, which need not exist; empty if it fits."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return "" if free >= size + _MARGIN else f"a checkpoint takes {_format(size)} and {_format(free)} are free"


def _format(size: int) -> str:
    for unit, unit_bytes in (("GB", 10**9), ("MB", 10**6)):
        if size >= unit_bytes:
            return f"{size / unit_bytes:.1f} {unit}"
    return f"{size:,} bytes"
