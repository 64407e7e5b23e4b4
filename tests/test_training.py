"""`muse train`: the loop, its checkpoints, going on bit for bit, and one line for mishaps."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
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

from muse_attention.cli import commands
from muse_attention.evaluation.loss import position_losses
from muse_attention.pretrained import load_model
from muse_attention.pretraining import checkpoints
from muse_attention.pretraining.batches import Batches, Windows
from muse_attention.pretraining.corpus import Corpus, read_corpus
from muse_attention.pretraining.metrics import Metrics, read_metrics
from muse_attention.pretraining.recipes import Recipe, override, tiny
from muse_attention.pretraining.training import TrainingError, make_model, train
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
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: other.shape for n, other in others.items()}


def test_two_processes_learn_what_one_does(corpus: Corpus, whole_run: Path, tmp_path: Path) -> None:
    """And a checkpoint of theirs is for any number of processes: for two bit for bit, for one to rounding."""
    recipe = override(SMALL, ["micro_batch=1"])
    two, again, one = tmp_path / "two", tmp_path / "again", tmp_path / "one"
    train_together(corpus, recipe, two)
    assert_close_runs(two, whole_run)
    files = sorted(path.name for path in (two / "checkpoints" / "step-00000008").iterdir())
    assert files == ["manifest.json", TENSORS, "rank-00001-00000.safetensors"]
    for copy in (again, one):
        shutil.copytree(two, copy)
        shutil.rmtree(copy / "checkpoints" / "step-00000008")
    train_together(corpus, recipe, again)
    assert_same_run(again, two)
    train(corpus, recipe, one, resume=True)
    assert_close_runs(one, two)


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


def test_mishaps_of_the_command_are_one_line(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code in ((KeyboardInterrupt(), 130), (TrainingError("the loss of step 3 is nan"), 1)):

        def fail(*arguments: Any, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("muse_attention.pretraining.training._Run._update", fail)
        found, _, err = run(*asked, "--resume")
        assert found == code
        assert len(err.splitlines()) == 1
        assert ("there is no checkpoint yet; continue with: muse train" in err) == (code == 130)
    assert err == "muse: the loss of step 3 is nan\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["attention=sparse"], "unknown attention 'sparse'; the kinds are"),
        (["--recipe", "huge"], "unknown recipe 'huge'; use one of tiny, s3, s4, s5, s6, s8"),
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
