"""A run that fails at the same step again and again falls back once, and is then not resumed any more."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.interruptions.failures import (
    FILE,
    Failures,
    TrainingError,
    forget_failures,
    note_failure,
    note_fallback,
    read_failures,
)
from muse_lab.pretraining.recipes import override
from muse_lab.pretraining.training import train
from tests.training_runs import QUICK, assert_same_run, save_whole, train_until

RECIPE = override(QUICK, ["skip_budget=1"])


def poison(output: Path, step: int) -> None:
    """Make weights of a checkpoint so large that the next loss is not finite, with hashes that are right."""
    folder = output / "checkpoints"
    checkpoint = checkpoints.verify(folder, step)
    tensors = dict(checkpoints.read_tensors(checkpoint))
    tensors = {name: torch.full_like(tensor, 1e38) if "norm" in name else tensor for name, tensor in tensors.items()}
    save_whole(folder, step, checkpoint.about, tensors)


@pytest.mark.long
def test_a_poisoned_checkpoint_is_left_behind(corpus: Corpus, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    train(corpus, RECIPE, whole)
    tmp_path /= "out"
    train_until(5, corpus, RECIPE, tmp_path)
    poison(tmp_path, 4)
    for times in (1, 2):
        with pytest.raises(TrainingError, match=r"^step 6 failed: its loss is nan"):
            train(corpus, RECIPE, tmp_path, on_refused=pytest.fail)
        failures = read_failures(tmp_path)
        assert (failures.step, failures.times, failures.fell_back) == (6, times, False)
    notes: list[str] = []
    train(corpus, RECIPE, tmp_path, on_note=notes.append)
    (note,) = notes
    assert note.startswith("the run failed 2 times at step 6 (step 6 failed: its loss is nan; skip_budget=1")
    assert note.endswith("; the run goes on from step 2, once")
    assert_same_run(tmp_path, whole)
    assert not (tmp_path / FILE).exists()


@pytest.mark.long
def test_a_run_that_fails_behind_its_fallback_is_not_resumed(corpus: Corpus, tmp_path: Path) -> None:
    train_until(5, corpus, RECIPE, tmp_path)
    for step in (2, 4):
        poison(tmp_path, step)
    for step in (6, 6, 4):  # the last one from the checkpoint before
        with pytest.raises(TrainingError, match=f"^step {step} failed"):
            train(corpus, RECIPE, tmp_path)
    assert checkpoints.steps_in(tmp_path / "checkpoints") == [2]
    for _ in range(2):
        with pytest.raises(
            TrainingError, match=r"^the run failed 3 times up to step 6, the last time from an"
        ) as raised:
            train(corpus, RECIPE, tmp_path)
    assert str(raised.value).endswith(f"or remove {tmp_path / FILE} to try once more")
    assert "\n" not in str(raised.value)
    (tmp_path / FILE).unlink()
    with pytest.raises(TrainingError, match=r"^step 4 failed"):
        train(corpus, RECIPE, tmp_path)
    train(corpus, RECIPE, tmp_path, overwrite=True)
    assert not (tmp_path / FILE).exists()


def test_one_checkpoint_is_not_left_behind(corpus: Corpus, tmp_path: Path) -> None:
    """There is nothing to fall back to but the beginning."""
    train_until(3, corpus, RECIPE, tmp_path)
    poison(tmp_path, 2)
    for _ in range(3):
        with pytest.raises(TrainingError, match=r"^step 4 failed"):
            train(corpus, RECIPE, tmp_path)
    with pytest.raises(TrainingError, match="is not resumed again"):
        train(corpus, RECIPE, tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device", "out")])
def test_a_run_that_was_stopped_has_not_failed(error: BaseException, corpus: Corpus, tmp_path: Path) -> None:
    for _ in range(3):
        with pytest.raises(type(error)):
            train(corpus, QUICK, tmp_path, on_step=Mock(side_effect=error))
    assert read_failures(tmp_path) is None


def test_failures_are_counted_by_step(tmp_path: Path) -> None:
    note_failure(tmp_path, 5, "one\ncause")
    assert read_failures(tmp_path) == Failures(5, 1, "one cause")
    note_failure(tmp_path, 7, "other")
    assert read_failures(tmp_path) == Failures(7, 1, "other")
    note_failure(tmp_path, 7, "other")
    found = read_failures(tmp_path)
    assert found.calls_for_fallback
    note_fallback(tmp_path, found)
    note_failure(tmp_path, 6, "earlier")
    assert read_failures(tmp_path) == Failures(7, 3, "earlier", fell_back=True)
    forget_failures(tmp_path, 6)
    assert read_failures(tmp_path) is not None
    forget_failures(tmp_path, 7)
    assert read_failures(tmp_path) is None


@pytest.mark.parametrize("content", ["", "[]", '{"step": 1}', '{"step": "1", "times": 1, "cause": "x"}', "[" * 9999])
def test_a_file_that_cannot_be_read_is_no_failure(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    assert read_failures(tmp_path) is None
