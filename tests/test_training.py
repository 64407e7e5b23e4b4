"""`muse train`: the loop, its checkpoints, going on bit for bit, and one line for mishaps."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("typer")
pytest.importorskip("rich")

from safetensors.torch import load_file
from typer.testing import CliRunner

from muse_attention import huggingface
from muse_attention.cli import commands
from muse_attention.evaluation.loss import position_losses
from muse_attention.pretrained import load_model
from muse_attention.pretraining import checkpoints, training
from muse_attention.pretraining.batches import Batches, Windows
from muse_attention.pretraining.corpus import Corpus, read_corpus
from muse_attention.pretraining.decoder import DecoderLayer
from muse_attention.pretraining.metrics import Metrics, Step, read_metrics
from muse_attention.pretraining.parallel import World
from muse_attention.pretraining.recipes import Recipe, override, tiny
from muse_attention.pretraining.training import (
    TrainingError,
    describe_last_good,
    determinism,
    make_model,
    make_ready,
    run_recipe,
    train,
)
from tests.test_prepare import contents, make

STEPS = 8
SMALL = override(
    tiny(),
    [
        f"steps={STEPS}",
        "length=64",
        "batch=4",
        "micro_batch=2",
        "attention=muse:QK4R1B16",
        "exact_tail=0.25",
        "warmup=2",
        "checkpoint_every=2",
        "probe_every=3",
    ],
)
GOLDEN = [5.82854, 5.26275, 4.79373, 4.30235, 3.99389, 3.64250, 3.41044, 3.49443]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole_run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has disturbed."""
    output = tmp_path_factory.mktemp("whole")
    train(corpus, SMALL, output)
    return output


def losses(output: Path) -> list[float]:
    return [step["loss"] for step in read_metrics(output)]


def learnt(output: Path) -> dict[str, torch.Tensor]:
    checkpoint = checkpoints.latest_good(output / "checkpoints", pytest.fail)
    assert checkpoint is not None
    return dict(checkpoints.read_tensors(checkpoint))


def assert_same_run(output: Path, expected: Path) -> None:
    """Bit for bit: every loss, error and norm, the weights, and the optimiser."""
    found, other = ([{**step, "tokens_per_second": 0} for step in read_metrics(run)] for run in (output, expected))
    assert found == other
    tensors, others = learnt(output), learnt(expected)
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    assert contents(output / "model") == contents(expected / "model")


def stop_at(step: int) -> Callable[[Any], None]:
    def stop(done: Any) -> None:
        if done.step == step:
            raise KeyboardInterrupt

    return stop


# The loop


def test_first_losses(whole_run: Path) -> None:
    """Golden: whatever changes them changes what is learnt. To rounding, which differs between processors."""
    assert losses(whole_run) == pytest.approx(GOLDEN, rel=1e-3)


def test_the_first_loss_is_that_of_the_model_on_the_first_batch(corpus: Corpus, whole_run: Path) -> None:
    model = make_model(corpus, SMALL)
    tokens = Batches(Windows(corpus, 64), 4).read(0)
    loss = model(tokens[:, :-1], shift_labels=tokens[:, 1:]).loss.item()
    assert losses(whole_run)[0] == pytest.approx(loss, rel=1e-6)
    assert abs(loss - math.log(corpus.manifest.vocabulary)) < 0.3


def test_metrics_have_a_line_for_every_step(whole_run: Path) -> None:
    steps = read_metrics(whole_run)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["attention"] for step in steps] == ["muse:QK4R1B16"] * 6 + ["exact"] * 2
    assert [step["tokens"] for step in steps] == [256 * step for step in range(1, STEPS + 1)]
    assert [step["step"] for step in steps if "rse" in step] == [3, 6]
    for step in steps:
        assert all(0 < error < 1 for error in step.get("rse", {}).values())
        assert set(step.get("rse", "13")) == {"1", "3"}


def test_every_update_attends_as_its_line_says(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the layers call, as the weights of so small a run are about the same under any attention."""
    called: list[str] = []
    updates: list[list[str]] = []
    muse, exact = huggingface.muse_attention, huggingface.sdpa_attention_forward

    def spy_on_muse(*arguments: Any, config: str, **others: Any) -> Any:
        called.append(f"muse:{config}")
        return muse(*arguments, config=config, **others)

    def spy_on_exact(*arguments: Any, **others: Any) -> Any:
        called.append("exact")
        return exact(*arguments, **others)

    def note(done: Step) -> None:
        updates.append(list(called))
        called.clear()

    monkeypatch.setattr(huggingface, "muse_attention", spy_on_muse)
    monkeypatch.setattr(huggingface, "sdpa_attention_forward", spy_on_exact)
    train(corpus, override(SMALL, ["probe_every=0"]), tmp_path, on_step=note)
    calls = 2 * 2  # global layers, and parts of a batch
    assert updates == [["muse:QK4R1B16"] * calls] * 6 + [["exact"] * calls] * 2


def test_the_speed_is_that_of_the_update_without_its_probe(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0

    def tick() -> int:
        nonlocal now
        now += 1
        return now

    def probe(*_: object) -> dict[int, float]:
        nonlocal now
        now += 1000
        return {1: 0.5}

    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=tick))
    monkeypatch.setattr(training, "relative_squared_errors", probe)
    train(corpus, override(SMALL, ["steps=2", "probe_every=2"]), tmp_path)
    first, second = read_metrics(tmp_path)
    assert (first.get("rse"), second.get("rse")) == (None, {"1": 0.5})
    assert first["tokens_per_second"] == second["tokens_per_second"] > 1


def test_the_probe_changes_nothing(corpus: Corpus, whole_run: Path, tmp_path: Path) -> None:
    train(corpus, override(SMALL, ["probe_every=0"]), tmp_path)
    assert losses(tmp_path) == losses(whole_run)


@pytest.mark.parametrize("change", ["micro_batch=1", "micro_batch=4", "recompute=true"])
def test_memory_is_saved_without_changing_what_is_learnt(
    change: str, corpus: Corpus, whole_run: Path, tmp_path: Path
) -> None:
    train(corpus, override(SMALL, [change]), tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(whole_run), rel=1e-4)


def test_bfloat16_is_close(corpus: Corpus, whole_run: Path, tmp_path: Path) -> None:
    train(corpus, override(SMALL, ["precision=bfloat16"]), tmp_path)
    assert losses(tmp_path) != losses(whole_run)
    assert losses(tmp_path) == pytest.approx(losses(whole_run), rel=0.02)
    assert all(tensor.dtype == torch.float32 for tensor in learnt(tmp_path).values())


def test_frozen_aggregation_needs_no_tail(corpus: Corpus, tmp_path: Path) -> None:
    name = "muse:QK4R1B16,differentiable_aggregation=false"
    train(corpus, override(SMALL, [f"attention={name}", "exact_tail=0"]), tmp_path)
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


def test_metrics_behind_a_checkpoint_are_forgotten(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines)[:-5])
    Metrics(tmp_path, 4).close()
    assert [step["step"] for step in read_metrics(tmp_path)] == [1, 2, 3, 4]
    Metrics(tmp_path, 2).close()
    assert [step["step"] for step in read_metrics(tmp_path)] == [1, 2]


def test_an_error_that_is_not_finite_is_no_number_of_json(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    step = Step(1, 2.0, 0.1, 1.0, "muse", 64, 10.0, rse={1: math.inf, 3: 0.5})
    metrics = Metrics(tmp_path, 0)
    metrics.add(step)
    metrics.add(dataclasses.replace(step, step=2, rse={1: math.nan}))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert first["rse"] == {"3": 0.5}
    assert "rse" not in second
    assert (second["step"], second["loss"]) == (2, 2.0)


def test_tensorboard_is_told_the_same(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float, int]] = []
    opened: list[int] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert Path(folder) == tmp_path / "tensorboard"
            opened.append(purge_step)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append((name, value, step))

        def close(self) -> None:
            opened.append(0)

    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", cast(ModuleType, SimpleNamespace(SummaryWriter=Writer)))
    train(corpus, SMALL, tmp_path, tensorboard=True)
    assert [value for name, value, _ in told if name == "loss"] == losses(tmp_path)
    assert [(name, step) for name, _, step in told if "rse" in name] == [
        (f"rse/layer {layer}", step) for step in (3, 6) for layer in (1, 3)
    ]
    assert opened == [1, 0]


# Going on


@pytest.mark.parametrize("step", [1, 2, 5, 7, 8])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(step: int, corpus: Corpus, whole_run: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(corpus, SMALL, tmp_path, on_step=stop_at(step))
    assert checkpoints.steps_in(tmp_path / "checkpoints") == [made for made in (2, 4, 6) if made < step][-2:]
    train(corpus, SMALL, tmp_path, resume=True)
    assert_same_run(tmp_path, whole_run)
    train(corpus, SMALL, tmp_path, resume=True)
    assert_same_run(tmp_path, whole_run)


def test_a_run_that_was_killed_goes_on_bit_for_bit(corpus: Corpus, whole_run: Path, tmp_path: Path) -> None:
    """`kill -9` at random moments, until a run comes to its end."""
    fields = [f"{name}={value}" for name, value in dataclasses.asdict(SMALL).items()]
    command = [sys.executable, "-m", "muse_attention.cli", "train", str(corpus.folder), *fields, "--device", "cpu"]
    command += ["--recipe", "tiny", "--output", str(tmp_path), "--resume"]
    draw, kills = random.Random(0), 0
    metrics = tmp_path / "metrics.jsonl"
    for _ in range(5):
        before = metrics.stat().st_ino if metrics.exists() else None
        process = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        if kills < 4:
            while process.poll() is None and (not metrics.exists() or metrics.stat().st_ino == before):
                time.sleep(0.001)  # the file is replaced when training starts
            steps = len(metrics.read_text().splitlines()) + draw.choice([0, 1, 2])
            while process.poll() is None and len(metrics.read_text().splitlines()) <= steps:
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
        _, err = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, err.decode()
        kills += 1
    assert kills >= 2
    assert_same_run(tmp_path, whole_run)


def test_what_changes_nothing_may_change(corpus: Corpus, whole_run: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(corpus, SMALL, tmp_path, on_step=stop_at(5))
    train(corpus, override(SMALL, ["checkpoint_every=3", "keep=1", "probe_every=0"]), tmp_path, resume=True)
    assert losses(tmp_path) == losses(whole_run)
    assert checkpoints.steps_in(tmp_path / "checkpoints") == [8]


def test_another_run_is_refused(corpus: Corpus, whole_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"already; resume it, or choose another output"):
        train(corpus, SMALL, whole_run)
    with pytest.raises(ValueError, match=r"has peak_rate=0.003, not 0.1: it would not be the same run"):
        train(corpus, override(SMALL, ["peak_rate=0.1"]), whole_run, resume=True)
    with pytest.raises(ValueError, match="is of another corpus than"):
        train(dataclasses.replace(corpus, fingerprint="0"), SMALL, whole_run, resume=True)
    foreign = tmp_path / "foreign"
    train(corpus, override(SMALL, ["seed=1"]), foreign)
    shutil.copy(whole_run / "run.json", foreign / "run.json")
    with pytest.raises(ValueError, match=r"step-00000008 has seed=1, not 0"):
        train(corpus, SMALL, foreign, resume=True)


def test_a_run_that_has_learnt_nothing_may_become_another(corpus: Corpus, tmp_path: Path) -> None:
    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            train(corpus, override(SMALL, [f"seed={1 + resume}"]), tmp_path, resume=resume, on_step=stop_at(1))
        assert run_recipe(tmp_path).seed == 1 + resume
    (tmp_path / "run.json").write_text("of something else")
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"run.json is not of muse train; choose another output"):
            train(corpus, SMALL, tmp_path, resume=resume)
    assert (tmp_path / "run.json").read_text() == "of something else"


# Checkpoints


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def edit_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


TENSORS = "rank-00000-00000.safetensors"
DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit in the last tensor": lambda folder: flip(folder / TENSORS, -1),
    "a flipped bit in the header": lambda folder: flip(folder / TENSORS, 20),
    "a file cut short": lambda folder: os.truncate(folder / TENSORS, 1000),
    "an empty file": lambda folder: os.truncate(folder / TENSORS, 0),
    "a file that is missing": lambda folder: (folder / TENSORS).unlink(),
    "a manifest that is missing": lambda folder: (folder / "manifest.json").unlink(),
    "a manifest cut short": lambda folder: os.truncate(folder / "manifest.json", 100),
    "an empty manifest": lambda folder: os.truncate(folder / "manifest.json", 0),
    "a manifest that is no object": lambda folder: (folder / "manifest.json").write_text("[]"),
    "another step": lambda folder: edit_manifest(folder, step=4),
    "another recipe": lambda folder: edit_manifest(folder, about={}),
    "no files": lambda folder: edit_manifest(folder, files=[]),
    "another format": lambda folder: edit_manifest(folder, format=2),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_used(
    damage: str, corpus: Corpus, whole_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(corpus, SMALL, tmp_path, on_step=stop_at(7))
    DAMAGES[damage](tmp_path / "checkpoints" / "step-00000006")
    refused: list[str] = []
    steps: list[int] = []
    train(
        corpus,
        SMALL,
        tmp_path,
        resume=True,
        on_refused=refused.append,
        on_step=lambda done: steps.append(done.step),
    )
    assert len(refused) == 1
    assert "step-00000006 is torn" in refused[0] or "step-00000006 is damaged" in refused[0]
    assert "\n" not in refused[0]
    assert steps == [5, 6, 7, 8]
    assert_same_run(tmp_path, whole_run)


def test_no_whole_checkpoint_is_an_error(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(corpus, SMALL, tmp_path, on_step=stop_at(3))
    flip(tmp_path / "checkpoints" / "step-00000002" / TENSORS, -1)
    with pytest.raises(ValueError, match=r"none of the checkpoints in .* is whole"):
        train(corpus, SMALL, tmp_path, resume=True)
    assert "is whole; start again with another output" in describe_last_good(tmp_path / "checkpoints")


def test_a_damaged_checkpoint_is_not_among_those_that_are_kept(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(corpus, SMALL, tmp_path, on_step=stop_at(7))
    flip(tmp_path / "checkpoints" / "step-00000006" / TENSORS, -1)
    train(corpus, override(SMALL, ["checkpoint_every=5"]), tmp_path, resume=True)
    assert checkpoints.steps_in(tmp_path / "checkpoints") == [5, 8]


def test_checkpoints_that_cannot_be_listed_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    assert describe_last_good(tmp_path) == "there is no checkpoint yet"
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert describe_last_good(tmp_path) == f"the checkpoints in {tmp_path} cannot be read: Permission denied"


def test_what_has_its_name_is_on_the_disk(
    corpus: Corpus, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics before the checkpoint behind them, and all files of a checkpoint and a model before they are renamed."""
    output = tmp_path / "out"
    shutil.copytree(whole_run, output)
    shutil.rmtree(output / "checkpoints" / "step-00000008")
    synced: set[tuple[int, int]] = set()
    synced_before: dict[str, set[tuple[int, int]]] = {}
    sync, rename = os.fsync, os.rename

    def note_sync(descriptor: int) -> None:
        sync(descriptor)
        synced.add(identify(descriptor))

    def note_rename(source: Path, target: Path) -> None:
        synced_before[target.name] = set(synced)
        rename(source, target)

    def identify(place: int | Path) -> tuple[int, int]:
        found = os.stat(place)
        return found.st_ino, found.st_size

    monkeypatch.setattr("os.fsync", note_sync)
    monkeypatch.setattr("os.rename", note_rename)
    train(corpus, SMALL, output, resume=True)
    assert identify(output / "metrics.jsonl") in synced_before["step-00000008"]
    for folder in (output / "checkpoints" / "step-00000008", output / "model"):
        files = sorted(folder.iterdir())
        assert len(files) >= 2
        assert {identify(file) for file in (folder, *files)} <= synced_before[folder.name]
        assert os.stat(folder.parent).st_ino in {inode for inode, _ in synced}


def test_no_half_of_a_model_is_left(
    corpus: Corpus, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    shutil.copytree(whole_run, output)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", fail)
    with pytest.raises(OSError, match="No space left on device") as raised:
        train(corpus, SMALL, output, resume=True)
    assert raised.value.filename == str(output / "model")
    assert not (output / "model.tmp").exists()
    assert contents(output / "model") == contents(whole_run / "model")


def test_what_is_half_written_or_half_removed_is_no_checkpoint(corpus: Corpus, whole_run: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(corpus, SMALL, tmp_path, on_step=stop_at(5))
    for name in ("step-00000006.tmp", "step-00000002.old.tmp"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / TENSORS).write_bytes(b"half")
    train(corpus, SMALL, tmp_path, resume=True, on_refused=pytest.fail)
    assert_same_run(tmp_path, whole_run)
    assert list((tmp_path / "checkpoints").glob("*.tmp")) == []


def test_shards_of_several_ranks_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "BYTES_PER_FILE", 50)
    rows = torch.arange(30.0).view(10, 3)
    checkpoints.begin(tmp_path, 1)
    for rank, part in enumerate(rows.split(4)):
        checkpoints.write_shard(tmp_path, 1, rank, {"a": part, "b": 2 * part})
    checkpoints.finish(tmp_path, 1, {}, ranks=3)
    checkpoint = checkpoints.verify(tmp_path, 1)
    assert len(checkpoint.files) > 3
    found = dict(checkpoints.read_tensors(checkpoint))
    assert torch.equal(found["a"], rows)
    assert torch.equal(found["b"], 2 * rows)


DIE_AT_EVERY_CALL = """
import os, shutil, sys, torch
from pathlib import Path
from muse_attention.pretraining import checkpoints

def save(folder, step):
    checkpoints.begin(folder, step)
    checkpoints.write_shard(folder, step, 0, {"a": torch.full((3,), float(step))})
    checkpoints.finish(folder, step, {})
    checkpoints.prune(folder, step, 1)

def die_at(number):
    def counting(call):
        def counted(*arguments, **others):
            nonlocal number
            number -= 1
            if number < 0:
                os._exit(9)
            return call(*arguments, **others)
        return counted
    for name in ("open", "close", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "scandir"):
        setattr(os, name, counting(getattr(os, name)))

found, number, code = [], 0, 9
while code:
    folder = Path(sys.argv[1]) / str(number)
    save(folder, 1)
    child = os.fork()
    if not child:
        die_at(number)
        save(folder, 2)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    checkpoint = checkpoints.latest_good(folder, sys.exit)
    ((_, tensor),) = checkpoints.read_tensors(checkpoint)
    assert tensor.eq(checkpoint.step).all()
    found.append(checkpoint.step)
    checkpoints.clear_unfinished(folder)
    assert list(folder.glob("*.tmp")) == []
    number += 1
print(*found)
"""


def test_a_death_at_any_call_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The one before until the rename, the new one from then on, and never a torn one."""
    done = subprocess.run(
        [sys.executable, "-c", DIE_AT_EVERY_CALL, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    steps = [int(step) for step in done.stdout.split()]
    assert steps == sorted(steps)
    assert steps.count(1) >= 6
    assert steps.count(2) >= 3


# Several processes


def train_together(corpus: Corpus, recipe: Recipe, output: Path, ranks: int = 2) -> None:
    """As under `torchrun`, by the variables that it sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fields = [f"{name}={value}" for name, value in dataclasses.asdict(recipe).items()]
    command = [sys.executable, "-m", "muse_attention.cli", "train", str(corpus.folder), *fields, "--recipe", "tiny"]
    command += ["--output", str(output), "--resume", "--device", "cpu"]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            _, err = process.communicate(timeout=240)
            assert process.returncode == 0, err.decode()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def assert_close_runs(output: Path, expected: Path) -> None:
    for found, other in zip(read_metrics(output), read_metrics(expected), strict=True):
        assert found.get("rse", {}).keys() == other.get("rse", {}).keys()
        for name in ("loss", "gradient_norm", "learning_rate"):
            assert found[name] == pytest.approx(other[name], rel=1e-3), (found["step"], name)
    tensors, others = learnt(output), learnt(expected)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, others[name], atol=1e-5, rtol=1e-4)


def test_two_processes_learn_what_one_does(corpus: Corpus, tmp_path: Path) -> None:
    """And a checkpoint of theirs is for any number of processes: for two bit for bit, for one to rounding.

    The first update is probed, after a start and after going on.
    """
    recipe = override(SMALL, ["micro_batch=1", "probe_every=1"])
    alone, two, again, one = (tmp_path / name for name in ("alone", "two", "again", "one"))
    train(corpus, recipe, alone)
    train_together(corpus, recipe, two)
    assert_close_runs(two, alone)
    files = sorted(path.name for path in (two / "checkpoints" / "step-00000008").iterdir())
    assert files == ["manifest.json", TENSORS, "rank-00001-00000.safetensors"]
    for copy in (again, one):
        shutil.copytree(two, copy)
        shutil.rmtree(copy / "checkpoints" / "step-00000008")
    train_together(corpus, recipe, again)
    assert_same_run(again, two)
    train(corpus, recipe, one, resume=True)
    assert_close_runs(one, two)


@pytest.mark.slow
def test_two_processes_learn_the_same_with_all_that_saves_time_and_memory(
    corpus: Corpus, whole_run: Path, tmp_path: Path
) -> None:
    changes = ["micro_batch=1", "probe_every=1", "compile=true", "recompute=true", "precision=bfloat16"]
    train_together(corpus, override(SMALL, changes), tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(whole_run), rel=0.02)


@pytest.mark.parametrize(("mine", "theirs"), [(8, 6), (6, 8)])
def test_ranks_that_find_other_checkpoints_do_not_go_on(
    mine: int, theirs: int, corpus: Corpus, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a network's folder is listed before all of it is there."""
    output = tmp_path / "out"
    shutil.copytree(whole_run, output)
    if mine < STEPS:
        shutil.rmtree(output / "checkpoints" / f"step-{STEPS:08}")
    before = contents(output)

    def reduce(number: torch.Tensor, operation: object) -> None:
        choose = min if operation == torch.distributed.ReduceOp.MIN else max
        number.fill_(choose(int(number), theirs))

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    world = World(torch.device("cpu"), ranks=2, mesh=cast(Any, object()))
    with pytest.raises(TrainingError, match="some ranks would go on from step 6 and some from step 8"):
        train(corpus, SMALL, output, resume=True, world=world)
    assert contents(output) == before


# The same bits twice


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


def test_a_loss_that_is_not_finite_stops_the_run(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poison(done: Any) -> None:
        if done.step == 5:
            monkeypatch.setattr(torch.optim.AdamW, "step", spoil)

    def spoil(optimiser: torch.optim.AdamW) -> None:
        with torch.no_grad():
            optimiser.param_groups[0]["params"][0].fill_(math.nan)

    with pytest.raises(TrainingError, match=r"the loss of step 7 is nan; the last good checkpoint is .*step-00000004;"):
        train(corpus, override(SMALL, ["checkpoint_every=4"]), tmp_path, on_step=poison)
    assert learnt(tmp_path)


def test_a_corpus_that_is_cut_short_stops_the_run(tmp_path: Path) -> None:
    corpus = make(tmp_path / "corpus")

    def cut(done: Any) -> None:
        if done.step == 3:
            for file in corpus.folder.glob("train-*.tokens"):
                os.truncate(file, 0)

    with pytest.raises(TrainingError, match="cannot be read any more") as raised:
        train(corpus, SMALL, tmp_path / "out", on_step=cut)
    assert "step-00000002; run muse prepare again" in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="it was cut short or changed"):
        read_corpus(corpus.folder)


# The command


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(commands.app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def asked(corpus: Corpus, tmp_path: Path) -> list[object]:
    fields = [f"{name}={value}" for name, value in dataclasses.asdict(SMALL).items()]
    return ["train", corpus.folder, *fields, "--output", tmp_path / "out", "--device", "cpu"]


def test_the_command_trains_and_says_how_it_went(asked: list[object], whole_run: Path, tmp_path: Path) -> None:
    code, out, err = run(*asked)
    assert (code, err) == (0, "")
    assert f"step {STEPS} of {STEPS}: loss " in out
    for said in ("tokens/s", "ETA 0:00:00", "RSE", f"wrote {tmp_path / 'out' / 'model'}"):
        assert said in out
    assert_same_run(tmp_path / "out", whole_run)


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
    code, _, err = run(*asked)
    assert code == 1
    assert len(err.splitlines()) == 1
    assert "No space left on device; the last good checkpoint is" in err
    assert "continue with: muse train" in err
    assert list((tmp_path / "out" / "checkpoints").glob("*.tmp")) == []
    monkeypatch.undo()
    code, _, err = run("train", corpus.folder, "--output", tmp_path / "out", "--resume", "--device", "cpu")
    assert (code, err) == (0, "")
    assert_same_run(tmp_path / "out", whole_run)


def test_too_little_memory_is_one_line_that_says_what_to_try(
    asked: list[object], corpus: Corpus, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    output, other = tmp_path / "out", tmp_path / "other"
    shutil.copytree(whole_run, other)
    shutil.rmtree(other / "checkpoints" / "step-00000008")
    monkeypatch.setattr(training._Run, "_update", fail)
    less = "micro_batch=1 recompute=true"
    command = f"muse train {corpus.folder} --output {output} --device cpu --resume {less}"
    for _ in range(2):  # a run that has learnt nothing is in nobody's way
        code, _, err = run(*asked)
        assert (code, err) == (1, f"muse: out of memory; there is no checkpoint yet; try {less}: {command}\n")
    code, _, err = run("train", corpus.folder, "--output", other, "--resume")
    assert code == 1
    assert err.endswith(
        f"continue with: muse train {corpus.folder} --output {other} --resume, or try {less} in another output\n"
    )
    monkeypatch.undo()
    code, _, err = run(*shlex.split(command)[1:])
    assert (code, err) == (0, "")
    assert run_recipe(output) == override(SMALL, less.split())
    assert losses(output) == pytest.approx(losses(whole_run), rel=1e-4)


def test_a_run_is_known_before_anything_else_is_done(
    asked: list[object], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the line that says how to go on has all that is not in its recipe."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def open_world(device: str) -> Iterator[World]:
        yield World(torch.device(device))

    output = tmp_path / "out"
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setattr("muse_attention.pretraining.parallel.open_world", open_world)
    with monkeypatch.context() as earlier:
        earlier.setattr(training, "make_batches", interrupt)
        code, _, err = run(*asked)
    assert (code, err) == (130, "muse: interrupted; nothing is written yet: start again\n")
    monkeypatch.setattr(training, "make_model", interrupt)
    code, _, err = run(*asked, "--tensorboard")
    assert code == 130
    options = f"train {corpus.folder} --output {output} --device cpu --tensorboard --resume"
    assert err == f"muse: interrupted; there is no checkpoint yet; continue with: muse {options}\n"
    assert run_recipe(output) == SMALL
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run(*shlex.split(options))
    assert err.endswith(f"; continue with: torchrun ... -m muse_attention.cli {options}\n")
    assert run_recipe(output) == SMALL


def test_mishaps_of_the_command_are_one_line(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code in ((KeyboardInterrupt(), 130), (TrainingError("the loss of step 3 is nan"), 1)):

        def fail(*arguments: Any, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("muse_attention.pretraining.training._Run._update", fail)
        found, _, err = run(*asked, "--recipe", "tiny", "--resume")
        assert found == code
        assert len(err.splitlines()) == 1
        assert ("there is no checkpoint yet; continue with: muse train" in err) == (code == 130)
    assert err == "muse: the loss of step 3 is nan\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["attention=sparse"], "unknown attention 'sparse'; the kinds are"),
        (["--recipe", "huge"], "unknown recipe 'huge'; use one of tiny, s3, s4, s5, s6, s8"),
        (["--resume"], "to go on with; name a --recipe to start one"),
        (["length=64k"], "none has a sample of 65536 + 1"),
        (["--device", "abacus"], "abacus"),
        (["--tensorboard"], "TensorBoard is not installed"),
    ],
)
def test_every_mistake_is_answered_by_one_line(
    asked: list[object], changes: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    code, out, err = run(*asked, *changes)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
    assert not (tmp_path / "out" / "run.json").exists()


def test_no_corpus_is_one_line(tmp_path: Path) -> None:
    code, _, err = run("train", tmp_path)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "there is no corpus in" in err
