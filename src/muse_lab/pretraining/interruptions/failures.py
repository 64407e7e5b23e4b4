"""Runs that fail repeatedly at the same step.

A resumed run computes the same numbers, so a failure usually recurs: a state that was damaged before it was saved, for
example, has valid hashes. A run that has failed twice at the same step goes on from one checkpoint earlier, once. If it
does not get past that step then, it is not resumed any more. `failures.json` records it, and is removed when a
checkpoint after the step is written.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from muse_lab.records.dataclass_json import from_json
from muse_lab.records.files import errors_naming, replace_file
from muse_lab.records.untrusted import read_json

FILE = "failures.json"
_TWICE = 2
_SHOWN = 300
"""Characters of a cause."""


class TrainingError(RuntimeError):
    """A run cannot continue; its state so far is in its checkpoints."""


class StepError(TrainingError):
    """A step failed because of the state of the run, so it may fail again."""


@dataclass(frozen=True)
class Failures:
    """Failures at one step."""

    step: int
    times: int
    cause: str
    """of the last failure"""
    fell_back: bool = False
    """whether the run went on from an earlier checkpoint because of them"""

    @property
    def calls_for_fallback(self) -> bool:
        return self.times >= _TWICE and not self.fell_back

    def describe(self) -> str:
        return f"the run failed {self.times} times at step {self.step} ({self.cause})"

    def check_may_resume(self, output: Path) -> None:
        """Raise TrainingError for a run that failed again after its fallback."""
        if self.fell_back and self.times > _TWICE:
            raise TrainingError(
                f"the run failed {self.times} times up to step {self.step}, the last time from an earlier checkpoint, "
                f"and is not resumed again; the cause was: {self.cause}; start again with another recipe, or remove "
                f"{output / FILE} to try once more"
            )


def read_failures(output: Path) -> Failures | None:
    """The recorded failures; None if there were none, or if the file cannot be read."""
    try:
        failures: Failures = from_json(Failures, read_json(output / FILE))
    except (OSError, ValueError, TypeError):
        return None
    return failures


def note_failure(output: Path, step: int, cause: str) -> None:
    """Record that a run failed at a step, counted from 1."""
    before = read_failures(output)
    is_again = before is not None and (step == before.step or (before.fell_back and step <= before.step))
    words = " ".join(cause.split())[:_SHOWN]
    if before is not None and is_again:
        _write(output, dataclasses.replace(before, times=before.times + 1, cause=words))
    else:
        _write(output, Failures(step, 1, words))


def note_fallback(output: Path, failures: Failures) -> None:
    _write(output, dataclasses.replace(failures, fell_back=True))


def forget_failures(output: Path, step: int | None = None) -> None:
    """Remove the record of failures up to `step`, after which there is a checkpoint, or of all failures."""
    before = read_failures(output)
    if before is not None and (step is None or step >= before.step):
        with errors_naming(output / FILE):
            (output / FILE).unlink(missing_ok=True)


def _write(output: Path, failures: Failures) -> None:
    replace_file(output / FILE, json.dumps(dataclasses.asdict(failures), indent=2) + "\n")
