"""Evaluation in the loop: what is measured is right, and measuring changes nothing."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from muse_attention.huggingface import use_attention
from muse_lab.evaluation.loss.positions import position_losses
from muse_lab.pretraining.batches import Windows
from muse_lab.pretraining.data.corpus import HELD_OUT, Corpus
from muse_lab.pretraining.initial_model import make_model
from muse_lab.pretraining.monitoring.held_out import Evaluation
from muse_lab.pretraining.monitoring.metrics import read_metrics
from muse_lab.pretraining.needles.mixture import NeedleDocuments
from muse_lab.pretraining.needles.writer import EVALUATION
from muse_lab.pretraining.parallel import World
from muse_lab.pretraining.recipes import override
from muse_lab.pretraining.training import train
from tests.command_line import assert_refused, run_muse
from tests.training_runs import QUICK, SMALL, assert_same_run, losses, train_until

RECIPE = override(SMALL, ["evaluate_every=3", "evaluate_samples=3", "evaluate_needles=0"])
ASKED = override(SMALL, ["length=512", "attention=muse:QK4R1B64", "evaluate_every=1", "evaluate_needles=3"])


def nothing() -> None:
    pass


@pytest.mark.long
def test_a_run_is_evaluated_now_and_then_and_learns_the_same(corpus: Corpus, whole_run: Path, tmp_path: Path) -> None:
    train(corpus, RECIPE, tmp_path / "whole")
    assert losses(tmp_path / "whole") == losses(whole_run)
    lines = read_metrics(tmp_path / "whole")
    assert [line["step"] for line in lines if "evaluation" in line] == [3, 6]
    for line in lines:
        for value in line.get("evaluation", {}).values():
            assert 0 < value < 1.2 * math.log(corpus.manifest.vocabulary)
    assert lines[5]["evaluation"]["held_out_loss"] < lines[2]["evaluation"]["held_out_loss"]
    train_until(3, corpus, RECIPE, tmp_path / "out")
    train(corpus, RECIPE, tmp_path / "out")
    assert_same_run(tmp_path / "out", tmp_path / "whole")


def test_the_loss_is_that_of_evenly_spaced_held_out_windows(corpus: Corpus) -> None:
    model = make_model(corpus, RECIPE)
    windows = Windows(corpus, RECIPE.length, split=HELD_OUT)
    assert len(windows) > 3
    found = Evaluation(corpus, RECIPE, World(torch.device("cpu"))).run(model, nothing)
    for name, attention in (("held_out_loss", RECIPE.attention), ("held_out_loss_exact", "exact")):
        expected = []
        for number in range(3):
            tokens = windows[number * len(windows) // 3]
            with torch.no_grad():
                model.set_attention(attention)
                expected.append(model(tokens[None, :-1], shift_labels=tokens[None, 1:]).loss)
        assert found[name] == pytest.approx(float(torch.stack(expected).mean()), rel=1e-6)
    assert found["held_out_loss"] != found["held_out_loss_exact"]
    assert position_losses(model, windows[0], "exact").mean() == pytest.approx(found["held_out_loss_exact"], rel=0.1)
    model.set_attention("exact")
    assert Evaluation(corpus, RECIPE, World(torch.device("cpu"))).run(model, nothing).keys() == {"held_out_loss"}


@pytest.mark.long
def test_needles_are_asked_for_in_held_out_files(needles: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(needles, ASKED)
    evaluation = Evaluation(needles, ASKED, World(torch.device("cpu")))
    found = evaluation.run(model, nothing)
    documents = NeedleDocuments(needles, 512, share=1.0, split=HELD_OUT, purpose=EVALUATION)
    for end, attention in (("", ASKED.attention), ("_exact", "exact")):
        total, number = 0.0, 0
        for index in range(3):
            tokens, distances = documents.make_with_answers(index)
            with torch.no_grad(), use_attention(model, attention):
                logits = model(tokens[None, :-1]).logits[0].double()
            places = torch.nonzero(distances[1:])[:, 0]
            total -= float(logits.log_softmax(-1)[places, tokens[1:][places]].sum())
            number += len(places)
        assert found[f"needles_loss{end}"] == pytest.approx(total / number, rel=1e-5)
        assert found[f"needles_right{end}"] == 0
    assert found["needles_loss"] != found["needles_loss_exact"]
    assert not torch.equal(tokens, NeedleDocuments(needles, 512, share=1.0).make(2))

    forward = type(model).forward

    def know(model: object, input_ids: torch.Tensor, *, shift_labels: torch.Tensor, **others: object) -> object:
        """All answers, but for one token."""
        out = forward(model, input_ids, shift_labels=shift_labels, **others)
        if out.logits is not None:
            answers = shift_labels[0][shift_labels[0] >= 0]
            out.logits = torch.nn.functional.one_hot(answers, out.logits.shape[-1])[None].float()
            out.logits[0, :1] *= -1
        return out

    monkeypatch.setattr(type(model), "forward", know)
    share = evaluation.run(model, nothing)["needles_right"]
    assert 0.2 < share < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["length=1m", "evaluate_every=1"], "or set evaluate_every=0"),
        (["evaluate_every=1"], "; or set evaluate_needles=0"),
        (["evaluate_samples=0"], "evaluate_samples=0 must be 1 to 1048576"),
    ],
)
def test_what_cannot_be_evaluated_is_said_first(
    changes: list[str], message: str, corpus: Corpus, tmp_path: Path
) -> None:
    if "length=1m" in changes:  # the training split has samples of that length
        with pytest.raises(ValueError, match=message):
            Evaluation(corpus, override(SMALL, changes), World(torch.device("cpu")))
        return
    words = ("train", corpus.folder, "length=64", "steps=4", "warmup=1", *changes, "--device", "cpu")
    assert_refused(run_muse(*words, "--output", tmp_path / "out"), message)


@pytest.mark.long
def test_weights_and_biases_is_told_the_same(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for that package."""
    package = Mock()
    monkeypatch.setitem(sys.modules, "wandb", package)
    output = tmp_path / "out"
    train_until(5, corpus, RECIPE, output, wandb=True)
    train(corpus, RECIPE, output, wandb=True)
    first, second = (call.kwargs for call in package.init.call_args_list)
    assert first["id"] == second["id"]
    assert (first["resume"], first["dir"]) == ("allow", str(output))
    assert first["config"]["steps"] == RECIPE.steps
    board = package.init.return_value
    assert board.finish.call_count == 2
    logged = {call.kwargs["step"]: call.args[0] for call in board.log.call_args_list}
    assert [logged[step]["loss"] for step in range(1, 9)] == losses(output)
    assert logged[3]["evaluation/held_out_loss"] == read_metrics(output)[2]["evaluation"]["held_out_loss"]
    assert {"rse/layer 1", "attention/error_p99"} <= logged[6].keys()
    train(corpus, override(RECIPE, ["steps=1", "warmup=1"]), output, overwrite=True)
    assert not (output / "wandb-id.txt").exists()


@pytest.mark.parametrize(("broken", "logged"), [("init", 0), ("log", 1), ("finish", 2)])
def test_a_board_that_fails_is_left_out(
    broken: str, logged: int, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Mock()
    board = package.init.return_value
    {"init": package.init, "log": board.log, "finish": board.finish}[broken].side_effect = RuntimeError("no\nnetwork")
    notes: list[str] = []
    monkeypatch.setitem(sys.modules, "wandb", package)
    train(corpus, override(QUICK, ["steps=2"]), tmp_path, wandb=True, on_note=notes.append)
    assert notes == ["Weights & Biases is left out from now on: no network"]
    assert board.log.call_count == logged
    assert len(losses(tmp_path)) == 2


def test_what_is_not_installed_is_one_line(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    outcome = run_muse("train", corpus.folder, "--output", tmp_path, "--device", "cpu", "--wandb", "length=64")
    assert_refused(outcome, "muse: Weights & Biases is not installed: pip install 'muse-attention[wandb]'")
