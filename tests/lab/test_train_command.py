"""`muse train`: what it says, and one line for every mistake and mishap."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

from muse_lab.pretraining import training
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.interruptions.failures import TrainingError
from muse_lab.pretraining.loop import Loop
from muse_lab.pretraining.parallel import World
from muse_lab.pretraining.recipes import RECIPES, override
from muse_lab.pretraining.run.folder import run_recipe
from tests.command_line import assert_done_quietly, assert_refused, run_muse
from tests.training_runs import SMALL, STEPS, assert_same_run, losses


@pytest.fixture
def asked(corpus: Corpus, tmp_path: Path) -> list[object]:
    fields = [f"{name}={value}" for name, value in dataclasses.asdict(SMALL).items()]
    return ["train", corpus.folder, *fields, "--output", tmp_path / "out", "--device", "cpu"]


@pytest.mark.long
def test_the_command_trains_and_says_how_it_went(asked: list[object], whole_run: Path, tmp_path: Path) -> None:
    out = assert_done_quietly(run_muse(*asked))
    assert f"step {STEPS} of {STEPS}: loss " in out
    for said in ("tokens/s", "ETA 0:00:00", "RSE", f"wrote {tmp_path / 'out' / 'model'}"):
        assert said in out
    assert_same_run(tmp_path / "out", whole_run)


def test_few_steps_shorten_the_warmup_unless_it_is_set(tmp_path: Path) -> None:
    asked = ("train", tmp_path / "nowhere", "--device", "cpu", "--output", tmp_path / "out", "--steps", "4")
    code, _, err = run_muse(*asked)
    assert code == 2
    shortened, refused = err.splitlines()
    assert shortened == "muse: the warm-up is shortened from 16 updates to 4; --warmup sets another"
    assert "there is no corpus" in refused
    assert run_muse(*asked, "--warmup", "16")[2] == "muse: warmup=16 is longer than steps=4; choose fewer\n"


def test_a_recipe_that_goes_on_from_another_asks_for_its_model(tmp_path: Path) -> None:
    asked = ("train", tmp_path / "nowhere", "--recipe", "far", "--device", "cpu", "--output", tmp_path / "out")
    assert run_muse(*asked)[2].splitlines()[0] == (
        "muse: far has the rate of a run that starts from a model of the recipe near; give that model with "
        "--initial, or another --peak-rate"
    )
    for more in (["--initial", "near/model"], ["--peak-rate", "0.002"]):
        assert len(run_muse(*asked, *more)[2].splitlines()) == 1


def test_the_same_run_is_continued_another_is_refused_and_overwritten_on_request(
    asked: list[object], whole_run: Path, run_copy: Path
) -> None:
    output = run_copy
    shutil.rmtree(output / "checkpoints" / f"step-{STEPS:08}")
    code, _, err = run_muse(*asked)
    assert (code, err) == (0, f"muse: the run in {output} goes on from step {STEPS - 2} of {STEPS}\n")
    assert_same_run(output, whole_run)
    other = [word for word in asked if word != f"steps={STEPS}"]
    assert_refused(
        run_muse(*other, "--steps", "2", "--recipe", "tiny"),
        f"has steps={STEPS}, not 2: it would not be the same run; leave it as it was, choose another output",
    )
    assert_same_run(output, whole_run)
    code, _, err = run_muse(*other, "--steps", "2", "steps=3", "--overwrite")
    assert (code, err) == (2, "muse: steps is given twice, as steps=3 and as an option: 2; leave one out\n")
    (output / "notes.txt").write_text("mine")
    assert_done_quietly(run_muse(*other, "--steps", "2", "--recipe", "tiny", "--overwrite"))
    assert len(losses(output)) == run_recipe(output).steps == 2
    assert (output / "notes.txt").read_text() == "mine"


def test_options_are_fields_of_the_recipe(asked: list[object], tmp_path: Path) -> None:
    names = ("attention", "steps", "batch", "micro_batch", "peak_rate")
    kept = [word for word in asked if not str(word).startswith(tuple(f"{name}=" for name in names))]
    options = ["--attention", "exact", "--steps", "2", "--batch", "4", "--micro-batch", "2", "--learning-rate", "1e-4"]
    assert_done_quietly(run_muse(*kept, *options))
    recipe = run_recipe(tmp_path / "out")
    assert [getattr(recipe, name) for name in names] == ["exact", 2, 4, 2, 1e-4]


def test_the_fields_of_recipes_are_listed_with_their_values() -> None:
    code, out, _ = run_muse("train", "--help")
    assert code == 0
    assert all(field.name in out.replace("\n", "") for field in dataclasses.fields(SMALL))
    for words, rate in ((["recipes"], "0.003"), (["recipes", "s3"], "0.001732")):
        code, out, _ = run_muse(*words)
        assert code == 0
        assert f" {rate} " in out
        for field in dataclasses.fields(SMALL):
            assert f"\n {field.name} " in out
    code, _, err = run_muse("recipes", "s7")
    assert code == 2
    assert err == f"muse: unknown recipe 's7'; use one of {', '.join(RECIPES)}\n"


def test_a_run_that_would_take_days_on_a_cpu_is_announced(
    asked: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "make_batches", Mock(side_effect=KeyboardInterrupt))
    _, _, err = run_muse(*asked[:2], "--recipe", "s3", "--output", tmp_path / "out", "--device", "cpu")
    warning, _ = err.splitlines()
    assert re.fullmatch(
        r"muse: about [\d,]+ days on a CPU, attention not counted: \d+M parameters, 15,259 updates of 128k tokens; "
        r"use a GPU, or --recipe tiny",
        warning,
    )


@pytest.mark.long
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(
    asked: list[object], corpus: Corpus, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync
    calls = 0

    def fail(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr("os.fsync", fail)
    outcome = run_muse(*asked)
    assert_refused(outcome, "No space left on device; the last good checkpoint is", code=1)
    assert "continue with: muse train" in outcome[2]
    assert list((tmp_path / "out" / "checkpoints").glob("*.tmp")) == []
    monkeypatch.undo()
    assert run_muse("train", corpus.folder, "--output", tmp_path / "out", "--resume", "--device", "cpu")[0] == 0
    assert_same_run(tmp_path / "out", whole_run)


@pytest.mark.long
def test_too_little_memory_is_one_line_that_says_what_to_try(
    asked: list[object], corpus: Corpus, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, other = tmp_path / "out", tmp_path / "other"
    shutil.copytree(whole_run, other)
    shutil.rmtree(other / "checkpoints" / "step-00000008")
    monkeypatch.setattr(Loop, "_update", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    less = "micro_batch=1 recompute=true"
    command = f"muse train {corpus.folder} --output {output} --device cpu --resume {less}"
    for _ in range(2):  # a run that has learnt nothing is in nobody's way
        code, _, err = run_muse(*asked)
        assert (code, err) == (1, f"muse: out of memory; there is no checkpoint yet; try {less}: {command}\n")
    code, _, err = run_muse("train", corpus.folder, "--output", other, "--resume")
    assert code == 1
    assert err.endswith(
        f"continue with: muse train {corpus.folder} --output {other} --resume, or try {less} in another output\n"
    )
    monkeypatch.undo()
    assert_done_quietly(run_muse(*shlex.split(command)[1:]))
    assert run_recipe(output) == override(SMALL, less.split())
    assert losses(output) == pytest.approx(losses(whole_run), rel=1e-4)


def test_a_run_is_known_before_anything_else_is_done(
    asked: list[object], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the line that says how to go on has all that is not in its recipe."""

    @contextlib.contextmanager
    def open_world(device: str) -> Iterator[World]:
        yield World(torch.device(device))

    output, interrupt = tmp_path / "out", Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setattr("muse_lab.pretraining.parallel.open_world", open_world)
    with monkeypatch.context() as earlier:
        earlier.setattr(training, "make_batches", interrupt)
        code, _, err = run_muse(*asked)
    assert (code, err) == (130, "muse: interrupted; nothing is written yet: start again\n")
    monkeypatch.setattr(training, "make_model", interrupt)
    code, _, err = run_muse(*asked, "--tensorboard")
    assert code == 130
    options = f"train {corpus.folder} --output {output} --device cpu --tensorboard --resume"
    assert err == f"muse: interrupted; there is no checkpoint yet; continue with: muse {options}\n"
    assert run_recipe(output) == SMALL
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run_muse(*shlex.split(options))
    assert err.endswith(f"; continue with: torchrun ... -m muse_lab.cli {options}\n")
    assert run_recipe(output) == SMALL


def test_mishaps_of_the_command_are_one_line(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code in ((KeyboardInterrupt(), 130), (TrainingError("the loss of step 3 is nan"), 1)):
        monkeypatch.setattr(Loop, "_update", Mock(side_effect=error))
        found, _, err = run_muse(*asked, "--recipe", "tiny", "--resume")
        assert found == code
        assert len(err.splitlines()) == 1
        assert ("there is no checkpoint yet; continue with: muse train" in err) == (code == 130)
    assert err == "muse: the loss of step 3 is nan\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["attention=sparse"], "unknown attention 'sparse'; the kinds are"),
        (["--recipe", "huge"], "unknown recipe 'huge'; use one of tiny, near, far, s1, s2, s3"),
        (["--resume"], "to resume; name a --recipe to start one"),
        (["length=64k"], "none has a sample of 65536 + 1"),
        (["peak_rate=1e38"], "peak_rate=1e+38 must be above 0"),
        (["--device", "abacus"], "abacus"),
        (["--tensorboard"], "TensorBoard is not installed"),
    ],
)
def test_every_mistake_is_answered_by_one_line(
    asked: list[object], changes: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert_refused(run_muse(*asked, *changes), message)
    assert not (tmp_path / "out" / "run.json").exists()


def test_a_path_of_several_lines_is_one_line(tmp_path: Path) -> None:
    assert_refused(run_muse("train", tmp_path / "no\nwhere\x1b[31m"), r"no where\x1b[31m: it has no manifest.json")


def test_what_a_resumed_run_should_know_is_said_in_a_line_each(
    asked: list[object], corpus: Corpus, whole_run: Path, run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run_copy / "checkpoints" / "step-00000008")
    lines = (run_copy / "metrics.jsonl").read_text().splitlines()
    (run_copy / "metrics.jsonl").write_text("\n".join([*lines[:2], "garbage", *lines[2:]]) + "\n")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    code, _, err = run_muse("train", corpus.folder, "--output", run_copy, "--resume", "--device", "cpu")
    assert code == 0
    threads, step, broken = err.splitlines()
    assert threads.endswith("was written with threads 1, now 7: the last bits of the run may differ")
    assert step == f"muse: the run in {run_copy} goes on from step 6 of 8"
    assert broken.endswith("metrics.jsonl is damaged: line 3 cannot be read and left out; all others are kept")
    assert_same_run(run_copy, whole_run)
