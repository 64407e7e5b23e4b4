"""Updates that are skipped: not finite or far off, up to a budget, and the same ones when a run is resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from muse_lab.evaluation.comparison.training_curves import TrainingCurves
from muse_lab.pretraining.batches import Batches, Windows
from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.interruptions.failures import TrainingError
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.monitoring.metrics import read_metrics
from muse_lab.pretraining.recipes import differences, override
from muse_lab.pretraining.run import state as run_state
from muse_lab.pretraining.run.state import FEWEST, WINDOW, RunState, after_update, read_state, why_skipped
from muse_lab.pretraining.training import train
from tests.training_runs import QUICK, SMALL, assert_same_run, train_until

Poison = Callable[..., None]


@pytest.fixture
def poison(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> Poison:
    """A function that makes the loss of some steps, counted from 1, so many times as large, wherever they are seen."""
    forward = DecoderForCausalLM.forward

    def poison(*steps: int, factor: float = math.nan) -> None:
        batches = Batches(Windows(corpus, QUICK.length), QUICK.batch)
        bad = [row[:-1] for step in steps for row in batches.read(step - 1)[:1]]

        def spoilt(model: DecoderForCausalLM, input_ids: torch.Tensor, *arguments: Any, **others: Any) -> Any:
            out = forward(model, input_ids, *arguments, **others)
            if out.loss is not None and any(torch.equal(input_ids[0], row) for row in bad):
                out.loss = out.loss * factor
            return out

        monkeypatch.setattr(DecoderForCausalLM, "forward", spoilt)

    return poison


def test_a_batch_that_is_not_finite_is_skipped(corpus: Corpus, tmp_path: Path, poison: Poison) -> None:
    poison(4)
    notes: list[str] = []
    train(corpus, override(QUICK, ["checkpoint_every=1", "keep=9"]), tmp_path, on_note=notes.append)
    assert notes == ["step 4 is skipped: its loss is nan; 1 of skip_budget=10"]
    before, after, later = (
        dict(checkpoints.read_tensors(checkpoints.verify(tmp_path / "checkpoints", step))) for step in (3, 4, 5)
    )
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not all(torch.equal(tensor, later[name]) for name, tensor in before.items())
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[3]["skipped"] == "its loss is nan"
    assert not {"loss", "gradient_norm"} & lines[3].keys()
    assert all("skipped" not in line for line in lines if line["step"] != 4)
    curves = TrainingCurves.of(lines)
    assert all(math.isfinite(number) for point in curves.points for number in point)
    assert curves.points[-1].tokens == lines[-1]["tokens"]


def test_a_run_that_is_resumed_skips_the_same(corpus: Corpus, tmp_path: Path, poison: Poison) -> None:
    """And AdamW counts the updates that were made: else its bias correction would be another."""
    poison(1, 4, 6)
    train(corpus, QUICK, tmp_path / "whole")
    train_until(5, corpus, QUICK, tmp_path / "out")
    train(corpus, QUICK, tmp_path / "out")
    assert_same_run(tmp_path / "out", tmp_path / "whole")
    assert [line["step"] for line in read_metrics(tmp_path / "out") if "skipped" in line] == [1, 4, 6]


def test_a_run_stops_behind_its_budget(corpus: Corpus, tmp_path: Path, poison: Poison) -> None:
    poison(3, 5, 6)
    with pytest.raises(TrainingError, match=r"^step 6 failed: its loss is nan; skip_budget=2 allows no more") as raised:
        train(corpus, override(QUICK, ["skip_budget=2"]), tmp_path)
    assert "the last good checkpoint is" in str(raised.value)
    assert "step-00000004; start again" in str(raised.value)
    assert "\n" not in str(raised.value)
    train(corpus, override(QUICK, ["skip_budget=3"]), tmp_path)
    assert read_metrics(tmp_path)[5]["skipped"] == "its loss is nan"


def test_a_gradient_that_is_not_finite_is_skipped(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = torch.nn.utils.clip_grad_norm_
    calls = 0

    def spoil(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return clip(*arguments) * (math.inf if calls == 2 else 1)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spoil)
    train(corpus, override(QUICK, ["steps=2"]), tmp_path)
    second = read_metrics(tmp_path)[1]
    assert second["skipped"] == "its gradient is inf"
    assert math.isfinite(second["loss"])


@pytest.mark.long
def test_an_outlier_is_skipped_if_asked_for(
    corpus: Corpus, tmp_path: Path, poison: Poison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "FEWEST", 3)
    poison(6, factor=30.0)
    train(corpus, override(QUICK, ["skip_sigma=6"]), tmp_path / "whole")
    lines = read_metrics(tmp_path / "whole")
    assert [line["step"] for line in lines if "skipped" in line] == [6]
    assert "more than 6 sigma" in lines[5]["skipped"]
    train_until(
        6, corpus, override(QUICK, ["skip_sigma=6"]), tmp_path / "out"
    )  # what recent losses were is in the checkpoint
    train(corpus, override(QUICK, ["skip_sigma=6"]), tmp_path / "out")
    assert_same_run(tmp_path / "out", tmp_path / "whole")


def test_few_updates_have_no_outliers_and_old_ones_are_forgotten() -> None:
    state = RunState()
    for step in range(WINDOW + 40):
        loss = 5 + 0.1 * (step % 2) + (100 if step == FEWEST - 2 else 0)
        reason = why_skipped(loss, 1.0, state, 6)
        assert reason is None, step
        state = after_update(state, loss, 1.0, is_skipped=False, sigma=6)
    assert len(state.recent) == WINDOW
    assert max(loss for loss, _ in state.recent) == pytest.approx(5.1)
    assert why_skipped(6.0, 1.0, state, 6) is not None
    assert why_skipped(4.0, 1.0, state, 6) is None, "a low loss is no fault"
    assert why_skipped(6.0, 1.0, state, 0) is None


def test_a_run_in_which_nothing_is_wrong_has_no_state(whole_run: Path) -> None:
    manifest = json.loads((whole_run / "checkpoints" / "step-00000008" / "manifest.json").read_text())
    assert not {"state", "until_next"} & manifest["about"].keys()
    assert after_update(RunState(), 1.0, 1.0, is_skipped=False, sigma=0) == RunState()


def test_a_state_is_read_as_it_was_written() -> None:
    state = RunState(3, ((0.1, 1e-300), (2.0, 3.0)), {3: 1, 11: 2})
    assert read_state(json.loads(json.dumps(state.to_document()))) == state
    assert read_state({}) == RunState()
    for broken in (
        *([], {"skipped": -1}, {"skipped": True}, {"skipped": 1.0}, {"other": 1}, {"recent": 3}, {"recent": [[1]]}),
        *({"recent": [[1, "2"]]}, {"levels": []}, {"levels": {"a": 1}}, {"levels": {"3": 0}}, {"levels": {"3": "1"}}),
    ):
        with pytest.raises(ValueError, match=r"^no "):
            read_state(broken)


def test_what_may_differ_and_what_may_not() -> None:
    free = ["skip_budget=3", "stall_minutes=5", "checkpoint_minutes=1", "evaluate_every=2", "evaluate_samples=2"]
    assert differences(SMALL, override(SMALL, [*free, "evaluate_needles=0", "probe_every=1"])) == []
    assert differences(SMALL, override(SMALL, ["skip_sigma=6", "error_limit=0.1"])) == ["error_limit", "skip_sigma"]
    limited = override(SMALL, ["error_limit=0.1"])
    assert differences(limited, override(limited, ["probe_every=1"])) == ["probe_every"]
