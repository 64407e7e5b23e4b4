"""The training loop: what is learnt, measured and written, the same bits twice, and one line for mishaps."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from muse_lab.evaluation.loss.positions import position_losses
from muse_lab.models import load_model
from muse_lab.pretraining import loop, training
from muse_lab.pretraining.batches import Batches, Windows
from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.data.corpus import Corpus, read_corpus
from muse_lab.pretraining.determinism import determinism
from muse_lab.pretraining.initial_model import make_model
from muse_lab.pretraining.interruptions.failures import TrainingError
from muse_lab.pretraining.model.decoder import DecoderLayer
from muse_lab.pretraining.monitoring.error_limit import ErrorLimit, Probed
from muse_lab.pretraining.monitoring.metrics import Metrics, Step, read_metrics
from muse_lab.pretraining.parallel import World
from muse_lab.pretraining.recipes import override, tiny
from muse_lab.pretraining.run.folder import run_hardware, run_recipe
from muse_lab.pretraining.training import make_ready, train
from muse_lab.records.files import alone_in
from tests.lab.test_prepare import SMALL as PREPARED
from tests.lab.test_prepare import make
from tests.training_runs import QUICK, SMALL, STEPS, attentions_called, learnt, losses, train_until

GOLDEN = [5.84777, 5.24782, 4.80704, 4.40503, 3.94399, 3.69187, 3.46842, 3.36457]


def test_first_losses(whole_run: Path) -> None:
    """Golden: whatever changes them changes what is learnt. To rounding, which differs between processors."""
    assert losses(whole_run) == pytest.approx(GOLDEN, rel=1e-3)


def test_the_first_loss_is_that_of_the_model_on_the_first_batch(corpus: Corpus, whole_run: Path) -> None:
    model = make_model(corpus, SMALL)
    tokens = Batches(Windows(corpus, 64), 2).read(0)
    loss = model(tokens[:, :-1], shift_labels=tokens[:, 1:]).loss.item()
    assert losses(whole_run)[0] == pytest.approx(loss, rel=1e-6)
    assert abs(loss - math.log(corpus.manifest.vocabulary)) < 0.3


def test_metrics_have_a_line_for_every_step(whole_run: Path) -> None:
    steps = read_metrics(whole_run)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["attention"] for step in steps] == [SMALL.attention] * 6 + ["exact"] * 2
    assert [step["tokens"] for step in steps] == [128 * step for step in range(1, STEPS + 1)]
    assert [step["step"] for step in steps if "rse" in step] == [3, 6]
    for step in steps:
        assert all(0 < error < 1 for error in step.get("rse", {}).values())
        assert set(step.get("rse", "13")) == {"1", "3"}
        assert ("attention_means" in step) == ("rse" in step)
    means = steps[2]["attention_means"]
    assert means["relative_squared_error"] == pytest.approx(sum(steps[2]["rse"].values()) / 2)
    assert means["pairs_per_query"] == pytest.approx(3 / 4)  # one, in all blocks but the first of four
    assert 0 < means["keys_per_query"] <= 16
    assert means["error_p999"] >= means["error_p99"] > 0


@pytest.mark.long
def test_every_update_attends_as_its_line_says(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the layers call, as the weights of so small a run are about the same under any attention."""
    called = attentions_called(monkeypatch)
    updates: list[list[str]] = []

    def note(done: Step) -> None:
        updates.append(list(called))
        called.clear()

    train(corpus, override(SMALL, ["micro_batch=1", "probe_every=0", "exact_start=0.125"]), tmp_path, on_step=note)
    calls = 2 * 2  # global layers, and parts of a batch
    exact = [["exact"] * calls]
    assert updates == exact + [[SMALL.attention] * calls] * 5 + exact * 2


def test_the_speed_is_that_of_the_update_without_its_probe(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0

    def tick() -> int:
        nonlocal now
        now += 1
        return now

    def probe(*_: object) -> Probed:
        nonlocal now
        now += 1000
        return Probed({1: {"relative_squared_error": 0.5}}, {}, [])

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=tick))
    monkeypatch.setattr(ErrorLimit, "probe", probe)
    train(corpus, override(SMALL, ["steps=2", "probe_every=2"]), tmp_path)
    first, second = read_metrics(tmp_path)
    assert (first.get("rse"), second.get("rse")) == (None, {"1": 0.5})
    assert first["tokens_per_second"] == second["tokens_per_second"] > 1


@pytest.mark.long
def test_bfloat16_is_close(corpus: Corpus, tmp_path: Path) -> None:
    """One small update: some processors take seconds for each product in bfloat16."""
    changes = ["steps=1", "warmup=1", "batch=1", "micro_batch=1", "length=32", "probe_every=0", "exact_tail=0"]
    for precision in ("float32", "bfloat16"):
        train(corpus, override(SMALL, [*changes, f"precision={precision}"]), tmp_path / precision)
    expected, found = losses(tmp_path / "float32"), losses(tmp_path / "bfloat16")
    assert found != expected
    assert found == pytest.approx(expected, rel=0.02)
    assert all(tensor.dtype == torch.float32 for tensor in learnt(tmp_path / "bfloat16").values())


@pytest.mark.long
def test_frozen_aggregation_needs_no_tail(corpus: Corpus, tmp_path: Path) -> None:
    name = "muse:Q4K4R1SP1B16,differentiable_aggregation=false,clustering=lloyd"
    train(corpus, override(SMALL, ["steps=2", f"attention={name}", "exact_tail=0"]), tmp_path)
    assert {step["attention"] for step in read_metrics(tmp_path)} == {name}


def test_the_library_loads_the_model(corpus: Corpus, whole_run: Path) -> None:
    model, tokenizer = load_model(whole_run / "model")
    assert model.config.attention == "exact"
    assert len(tokenizer) == corpus.manifest.vocabulary
    tokens = Windows(corpus, 64)[0]
    found = position_losses(model, tokens, "exact").mean()
    assert found < losses(whole_run)[0] - 1
    weights = load_file(whole_run / "model" / "model.safetensors")
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in weights.items())


@pytest.mark.slow
def test_a_compiled_model_learns_the_same(corpus: Corpus, whole_run: Path, tmp_path: Path) -> None:
    train(corpus, override(SMALL, ["compile=true"]), tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(whole_run), rel=1e-3)


BROKEN = [b"garbage", b'{"step": 3, "lo', b"", b"[" * 100_000, b'{"step": "3"}', b'{"step": true}', b"\xff\x00", b"3"]


@pytest.mark.parametrize("broken", [*BROKEN, b'{"step": NaN}', b'{"step": 3, "loss": NaN}', b'{"step": -3}'])
def test_a_broken_line_of_metrics_costs_no_other(broken: bytes, tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 1.0}).encode() for step in range(1, 6)]
    lines[2] = broken
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    told: list[str] = []
    assert [step["step"] for step in read_metrics(tmp_path, told.append)] == [1, 2, 4, 5]
    Metrics(tmp_path, 4, on_broken=told.append).close()
    assert [step["step"] for step in read_metrics(tmp_path, pytest.fail)] == [1, 2, 4]
    assert told == [f"{path} is damaged: line 3 cannot be read and left out; all others are kept"] * 2


def test_lines_of_metrics_are_kept_by_step(tmp_path: Path) -> None:
    """One that is there twice, or not in its place, is no reason to lose others; nor is the torn end of a dead run."""
    lines = [json.dumps({"step": step, "loss": step}) for step in (1, 9, 2, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "los']))
    told: list[str] = []
    Metrics(tmp_path, 4, on_broken=told.append).close()
    assert [step["step"] for step in read_metrics(tmp_path)] == [1, 2, 3]
    assert len(told) == 1
    assert "line 4 cannot be read" in told[0]
    Metrics(tmp_path, 2).close()
    assert [step["step"] for step in read_metrics(tmp_path)] == [1, 2], "those behind a checkpoint are forgotten"


def test_an_error_that_is_not_finite_is_no_number_of_json(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    step = Step(1, 2.0, 0.1, 1.0, "muse", 64, 10.0, rse={1: math.inf, 3: 0.5}, answers_loss=0.0)
    metrics = Metrics(tmp_path, 0)
    metrics.add(step)
    metrics.add(dataclasses.replace(step, step=2, rse={1: math.nan}, answers_loss=math.nan))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert first["rse"] == {"3": 0.5}
    assert first["answers_loss"] == 0
    assert not {"rse", "answers_loss"} & second.keys()
    assert (second["step"], second["loss"]) == (2, 2.0)


@pytest.mark.long
def test_tensorboard_is_told_the_same(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Mock()
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    train(corpus, override(SMALL, ["steps=3", "exact_tail=0"]), tmp_path, tensorboard=True)
    board.SummaryWriter.assert_called_once_with(str(tmp_path / "tensorboard"), purge_step=1)
    writer = board.SummaryWriter.return_value
    told = [call.args for call in writer.add_scalar.call_args_list]
    assert [value for name, value, _ in told if name == "loss"] == losses(tmp_path)
    assert [(name, step) for name, _, step in told if "rse" in name] == [(f"rse/layer {layer}", 3) for layer in (1, 3)]
    writer.close.assert_called_once()


# The same bits twice


def test_another_number_of_threads_is_noted(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = override(SMALL, ["steps=2", "checkpoint_every=1", "probe_every=0"])
    train_until(2, corpus, recipe, tmp_path, on_note=pytest.fail)
    assert json.loads((tmp_path / "run.json").read_text())["threads"] == torch.get_num_threads() == 1
    notes: list[str] = []
    shutil.copytree(tmp_path, tmp_path / "same")
    train(corpus, recipe, tmp_path / "same", on_note=notes.append)
    assert notes == [f"the run in {tmp_path / 'same'} goes on from step 1 of 2"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 3)
        train(corpus, recipe, tmp_path, on_note=notes.append)
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    assert f"checkpoint {checkpoint} was written with threads 1, now 3: the last bits of the run may differ" in notes
    assert json.loads((tmp_path / "run.json").read_text())["threads"] == 3


def test_all_machines_that_trained_a_run_are_recorded(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = override(SMALL, ["steps=3", "checkpoint_every=1", "probe_every=0"])
    names = iter(["a slide rule", "an abacus", "an abacus", "a loom"])
    monkeypatch.setattr("muse_lab.pretraining.run.folder.device_name", lambda device: next(names))
    train_until(2, corpus, recipe, tmp_path)
    assert run_hardware(tmp_path) == "a slide rule"
    train_until(3, corpus, recipe, tmp_path)
    assert run_hardware(tmp_path) == "a slide rule, then an abacus"
    for _ in ("the last update", "nothing is left to train"):
        train(corpus, recipe, tmp_path)
        assert run_hardware(tmp_path) == "a slide rule, then an abacus"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_determinism_is_for_cuda_and_restores_what_was(device: str) -> None:
    with determinism(tiny(), torch.device(device)):
        assert torch.are_deterministic_algorithms_enabled() == (device == "cuda")
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_is_not_deterministic_says_how_to_go_on() -> None:
    """But a mishap of the trainer keeps its own words, whatever folder it names."""
    cuda = torch.device("cuda")
    with (
        pytest.raises(TrainingError, match=r"^that is not deterministic; with deterministic=f"),
        determinism(tiny(), cuda),
    ):
        raise RuntimeError("that is not deterministic\nand more")
    with pytest.raises(TrainingError, match=r"^deterministic/ is empty$"), determinism(tiny(), cuda):
        raise TrainingError("deterministic/ is empty")


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deterministic_run_lets_no_compiler_choose_by_time(
    deterministic: bool, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(DecoderLayer, "compile", lambda layer, options: found.append(options))
    recipe = override(SMALL, ["compile=true", f"deterministic={deterministic}"])
    make_ready(make_model(corpus, recipe), recipe, World(torch.device("cpu")))
    assert found == [{"deterministic": True} if deterministic else None] * 4


# Mishaps


@pytest.mark.long
def test_weights_that_are_not_finite_stop_the_run(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poison(done: Any) -> None:
        if done.step == 5:
            monkeypatch.setattr(torch.optim.AdamW, "step", spoil)

    def spoil(optimiser: torch.optim.AdamW) -> None:
        with torch.no_grad():
            optimiser.param_groups[0]["params"][0].fill_(math.nan)

    message = (
        r"^step 7 failed: its loss is nan, and the weights are not finite; the last good checkpoint is .*-00000004;"
    )
    with pytest.raises(TrainingError, match=message):
        train(corpus, override(QUICK, ["checkpoint_every=4"]), tmp_path, on_step=poison)
    assert learnt(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("spoilt", ["weight", "exp_avg_sq"])
def test_weights_that_are_not_finite_are_not_kept(
    spoilt: str, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update can spoil them behind a loss and a gradient that are finite, with a checkpoint before the next loss."""
    step = torch.optim.AdamW.step
    updates = 0

    def spoil(optimiser: torch.optim.AdamW) -> None:
        nonlocal updates
        step(optimiser)
        updates += 1
        if updates == 4:
            weight = optimiser.param_groups[0]["params"][0]
            with torch.no_grad():
                (weight if spoilt == "weight" else optimiser.state[weight][spoilt]).view(-1)[0] = math.inf

    monkeypatch.setattr(torch.optim.AdamW, "step", spoil)
    with pytest.raises(TrainingError, match=r"^the weights after step 4 are not finite") as raised:
        train(corpus, QUICK, tmp_path)
    assert "the last good checkpoint is " in str(raised.value)
    assert "step-00000002; start again from its recipe with a lower peak_rate" in str(raised.value)
    assert checkpoints.steps_in(tmp_path / "checkpoints") == [2]
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("change", ["prepared again", "cut short", "shards", "shards in place", "manifest", "gone"])
def test_a_corpus_that_is_written_again_stops_the_run(tmp_path: Path, change: str) -> None:
    """Even where there are as many tokens as before, and others could be read in their place."""
    corpus = make(tmp_path / "corpus")

    def write_again(done: Any) -> None:
        if done.step != 3:
            return
        if change == "prepared again":
            make(corpus.folder, dataclasses.replace(PREPARED, seed=5))
        elif change == "gone":
            shutil.rmtree(corpus.folder)
        for file in corpus.folder.glob("manifest.json" if change == "manifest" else "train-*.tokens"):
            content = file.read_bytes()
            if change == "shards":
                file.unlink()
            if change in ("shards", "shards in place", "manifest"):
                file.write_bytes(content[::-1])
            elif change == "cut short":
                os.truncate(file, 0)

    with pytest.raises(
        TrainingError, match=r"^the corpus in .* cannot be read any more \(.*(changed after|No such fi)"
    ) as raised:
        train(corpus, QUICK, tmp_path / "out", on_step=write_again)
    assert str(raised.value).endswith("step-00000002; run muse prepare again as before, then resume the run")
    assert "\n" not in str(raised.value)
    assert len(read_metrics(tmp_path / "out")) == 3
    if change == "gone":
        train(make(corpus.folder), QUICK, tmp_path / "out")
    elif change == "cut short":
        with pytest.raises(ValueError, match="it was cut short or changed"):
            read_corpus(corpus.folder)


@pytest.mark.long
def test_the_model_has_the_tokenizer_that_it_was_trained_with(tmp_path: Path) -> None:
    """Though the corpus is gone before the model is written."""
    corpus = make(tmp_path / "corpus")
    expected = {name: (corpus.folder / name).read_bytes() for name in corpus.manifest.files}

    def remove(done: Any) -> None:
        if done.step == STEPS:
            shutil.rmtree(corpus.folder)

    model = train(corpus, QUICK, tmp_path / "out", on_step=remove)
    assert {name: (model / name).read_bytes() for name in expected} == expected


def test_two_runs_do_not_share_a_folder(corpus: Corpus, tmp_path: Path) -> None:
    refused = []

    def start_another(done: Step) -> None:
        with pytest.raises(ValueError, match=r"another process is at work in .*; wait for it, or choose") as raised:
            train(corpus, override(SMALL, ["seed=1"]), tmp_path)
        refused.append(str(raised.value))

    recipe = override(SMALL, ["steps=2", "checkpoint_every=9", "probe_every=0"])
    train(corpus, recipe, tmp_path, on_step=start_another)
    assert len(refused) == 2
    assert run_recipe(tmp_path) == recipe
    assert len(read_metrics(tmp_path)) == 2
    train(corpus, recipe, tmp_path)  # nothing is left to do, and nobody is in the way


def test_a_folder_is_claimed_before_it_is_looked_at(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another run could begin and end between the look and the claim, and be overwritten."""
    look, looked = training.find_checkpoint, []

    def look_and_try(output: Path, *others: Any, **named: Any) -> Any:
        with pytest.raises(ValueError, match="another process is at work"), alone_in(output):
            pass
        looked.append(output)
        return look(output, *others, **named)

    monkeypatch.setattr(training, "find_checkpoint", look_and_try)
    train(corpus, override(SMALL, ["steps=1", "warmup=1"]), tmp_path)
    assert looked == [tmp_path]
