"""When and how a run is saved: its checkpoints, by updates, by time and on request, written by all ranks together.

Checkpoints after every `checkpoint_every` updates are regular, and the newest `keep` of them are kept. All others are
there for a run to go on from, and are removed when a newer checkpoint is on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from muse_attention.pretraining import checkpoints
from muse_attention.pretraining.disk_space import check_room, describe_room, has_room
from muse_attention.pretraining.failures import StepError, TrainingError, forget_failures
from muse_attention.pretraining.metrics import Metrics
from muse_attention.pretraining.optimiser import are_finite
from muse_attention.pretraining.parallel import World
from muse_attention.pretraining.recipes import Recipe
from muse_attention.pretraining.run_folder import describe_last_good
from muse_attention.pretraining.run_state import RunState


@dataclass
class Saver:
    folder: Path
    """of the checkpoints"""
    about: dict[str, Any]
    """what each of them says of the run"""
    recipe: Recipe
    world: World
    metrics: Metrics | None
    """on the first rank"""
    newest: int
    """step of the newest checkpoint; 0 if there is none"""
    on_note: Callable[[str], None] = lambda message: None
    """told on the first rank when space runs out"""

    def __post_init__(self) -> None:
        self._saved_at = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time for a checkpoint, by the first rank's clock."""
        minutes = self.recipe.checkpoint_minutes
        return self.world.is_first and minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes

    def check_room(self, parameters: int) -> None:
        """Raise an OSError if there is no room for one checkpoint. Collective: every rank must call it.

        Args:
            parameters: of the whole model; each has a weight and two moments in float32
        """
        self._together(lambda: check_room(self.folder, 3 * 4 * parameters), first_alone=True)

    def save(self, step: int, tensors: Mapping[str, Tensor], state: RunState, *, until_next: bool = False) -> None:
        """Write a checkpoint. Collective: every rank must call it.

        Args:
            tensors: what this rank has of all that was learnt
            until_next: remove it when there is a newer one
        """
        world, folder = self.world, self.folder
        if not world.all_succeed(are_finite(tensors.values())):
            raise StepError(
                f"the weights after step {step} are not finite, and are not kept; {describe_last_good(folder)}; "
                "start again from its recipe with a lower peak_rate"
            )
        size = world.ranks * sum(tensor.nbytes for tensor in tensors.values())
        notes = {"state": state.to_document(), checkpoints.UNTIL_NEXT: until_next}
        about = {**self.about, **{name: note for name, note in notes.items() if note}}

        def begin() -> None:
            check_room(folder, size)
            checkpoints.begin(folder, step)

        def finish() -> None:
            if self.metrics is not None:
                self.metrics.sync()  # a run that goes on from this checkpoint has all lines before it
            checkpoints.finish(folder, step, about, ranks=world.ranks)
            checkpoints.prune(folder, step, self.recipe.keep)
            forget_failures(folder.parent, step)
            if not has_room(folder, size):
                self.on_note(
                    f"{folder}: {describe_room(folder, size)}: the next one will stop the run; free some space"
                )

        self._together(begin, first_alone=True)
        self._together(lambda: checkpoints.write_shard(folder, step, world.rank, tensors))
        self._together(finish, first_alone=True)
        self.newest = step
        self._saved_at = time.monotonic()

    def _together(self, action: Callable[[], None], *, first_alone: bool = False) -> None:
        """No rank waits forever for one that failed."""
        mishap = None
        try:
            if self.world.is_first or not first_alone:
                action()
        except OSError as error:
            mishap = error
        if not self.world.all_succeed(mishap is None):
            if self.world.is_first:
                checkpoints.clear_unfinished(self.folder)  # it may be what fills the disk
            raise mishap or TrainingError(
                f"another rank cannot write its checkpoint; {describe_last_good(self.folder)}"
            )
