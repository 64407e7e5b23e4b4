"""Checkpoints: a run goes on from them bit for bit, and one that is damaged or half written is never used."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import math
import os
import pickle
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save

from muse_lab.pretraining.checkpoints import shards
from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.checkpoints.manifest import Chunk, StoredTensor, TensorKind, check_is_whole
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.recipes import Recipe, override
from muse_lab.pretraining.run.folder import describe_last_good, find_checkpoint, run_recipe
from muse_lab.pretraining.training import train
from tests.lab.test_prepare import contents
from tests.patience import PATIENCE
from tests.processes import running
from tests.ranks import CONTEXT, training_alone, wait_for
from tests.training_runs import QUICK, SMALL, STEPS, assert_same_run, inode_of, losses, save_whole, train_until


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 8])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(step: int, corpus: Corpus, whole_run: Path, tmp_path: Path) -> None:
    train_until(step, corpus, SMALL, tmp_path)
    assert checkpoints.steps_in(tmp_path / "checkpoints") == [made for made in (2, 4, 6) if made < step][-2:]
    train(corpus, SMALL, tmp_path)
    assert_same_run(tmp_path, whole_run)
    train(corpus, SMALL, tmp_path)
    assert_same_run(tmp_path, whole_run)


@pytest.mark.long
def test_a_run_that_was_killed_goes_on_bit_for_bit(corpus: Corpus, whole_run: Path, tmp_path: Path) -> None:
    """`kill -9` at random moments, until a run comes to its end."""
    output, errors = tmp_path / "out", tmp_path / "errors.txt"
    metrics = output / "metrics.jsonl"

    def lines() -> int:
        return len(metrics.read_text().splitlines())

    draw, kills, code = random.Random(0), 0, None
    while code != 0:
        before, is_killed = inode_of(metrics), kills < 3
        with training_alone(corpus, SMALL, output, errors) as process:
            if is_killed:
                # The file is replaced when training starts.
                wait_for(lambda before=before: inode_of(metrics) not in (None, before), process)
                steps = lines() + draw.choice([0, 1, 2])
                wait_for(lambda steps=steps: lines() > steps, process)
                time.sleep(draw.uniform(0, 0.05))
                process.kill()
            process.join(timeout=PATIENCE)
            code = process.exitcode
        assert code == 0 or (is_killed and code == -signal.SIGKILL), errors.read_text()
        kills += code != 0
    assert kills >= 2
    assert_same_run(output, whole_run)


@pytest.mark.long
def test_what_changes_nothing_may_change(corpus: Corpus, whole_run: Path, tmp_path: Path) -> None:
    train_until(5, corpus, SMALL, tmp_path)
    train(corpus, override(SMALL, ["checkpoint_every=3", "keep=1", "probe_every=0"]), tmp_path)
    assert losses(tmp_path) == losses(whole_run)
    assert checkpoints.steps_in(tmp_path / "checkpoints") == [8]


@pytest.mark.long
def test_another_run_is_refused(corpus: Corpus, whole_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has peak_rate=0.003, not 0.1: it would not be the same run"):
        train(corpus, override(SMALL, ["peak_rate=0.1"]), whole_run)
    with pytest.raises(ValueError, match="is of another corpus than"):
        train(dataclasses.replace(corpus, fingerprint="0"), SMALL, whole_run)
    foreign = tmp_path / "foreign"
    shutil.copytree(whole_run, foreign)
    change_about(foreign / "checkpoints" / "step-00000008", recipe=dataclasses.asdict(override(SMALL, ["seed=1"])))
    with pytest.raises(ValueError, match=r"step-00000008 has seed=1, not 0"):
        train(corpus, SMALL, foreign)


def test_a_run_that_has_learnt_nothing_may_become_another(corpus: Corpus, tmp_path: Path) -> None:
    for seed in (1, 2):
        train_until(1, corpus, override(SMALL, [f"seed={seed}"]), tmp_path)
        assert run_recipe(tmp_path).seed == seed
    (tmp_path / "run.json").write_text("of something else")
    with pytest.raises(ValueError, match=r"run.json is not of muse train; choose another output"):
        train(corpus, SMALL, tmp_path)
    assert (tmp_path / "run.json").read_text() == "of something else"


# What is on the disk


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


TENSORS = "rank-00000-00000.safetensors"


def forge(folder: Path, **changes: Any) -> None:
    """Edit a manifest as somebody does who knows how it is hashed."""
    path = folder / "manifest.json"
    document = {**json.loads(path.read_text()), **changes}
    del document["sha256"]
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**document, "sha256": digest}))


def forge_file(folder: Path, content: bytes, name: str = TENSORS) -> None:
    """Put another file of tensors into a checkpoint, with the size and hash that it has."""
    (folder / name).write_bytes(content)
    forge(folder, files=[{"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}])


def forge_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / TENSORS)
    change(tensors)
    forge_file(folder, save(tensors))


def forge_tensor(folder: Path, beginning: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def change_first(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.startswith(beginning))
        tensors[name] = change(tensors[name])

    forge_tensors(folder, change_first)


def lead_out(folder: Path, name: str) -> None:
    """Names a file outside of the checkpoint."""
    shutil.copy(folder / TENSORS, folder.parent / "outside")
    (file,) = json.loads((folder / "manifest.json").read_text())["files"]
    forge(folder, files=[{**file, "name": name.format(folder.parent)}])


def link_out(folder: Path, name: str) -> None:
    os.rename(folder / name, folder.parent / "outside")
    (folder / name).symlink_to("../outside")


def change_about(folder: Path, **changes: Any) -> None:
    forge(folder, about={**json.loads((folder / "manifest.json").read_text())["about"], **changes})


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


class Bomb:
    """Pickled, it writes a file when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def pickled() -> bytes:
    buffer = io.BytesIO()
    torch.save(Bomb(), buffer)
    return buffer.getvalue()


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def put_twice(folder: Path) -> None:
    (file,) = json.loads((folder / "manifest.json").read_text())["files"]
    forge(folder, files=[file, file])


def write_manifest(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)


NEGATIVE = {"name": TENSORS, "size": -1, "sha256": "0"}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit in the last tensor": lambda folder: flip(folder / TENSORS, -1),
    "a file cut short": lambda folder: os.truncate(folder / TENSORS, 1000),
    "a file that is missing": lambda folder: (folder / TENSORS).unlink(),
    "a manifest that is missing": lambda folder: (folder / "manifest.json").unlink(),
    "a manifest cut short": lambda folder: os.truncate(folder / "manifest.json", 100),
    "another format": lambda folder: forge(folder, format=3),
    "a pickle": lambda folder: forge_file(folder, pickle.dumps(Bomb())),
    "a manifest that is a pickle": lambda folder: (folder / "manifest.json").write_bytes(pickle.dumps(Bomb())),
    "another ending": lambda folder: forge_file(folder, pickled(), "rank-00000-00000.bin"),
    "an empty file": lambda folder: forge_file(folder, b""),
    "a header that is nested": lambda folder: forge_file(folder, with_header(b"[" * 100_000)),
    "no tensors": lambda folder: forge_file(folder, save({})),
    "no files at all": lambda folder: forge(folder, files=[]),
    "the folder above": lambda folder: lead_out(folder, "../outside"),
    "a link of a file": lambda folder: link_out(folder, TENSORS),
    "a link of the manifest": lambda folder: link_out(folder, "manifest.json"),
    "a file twice": put_twice,
    "a file that is a pipe": lambda folder: replace_by_pipe(folder / TENSORS),
    "a manifest that is a pipe": lambda folder: replace_by_pipe(folder / "manifest.json"),
    "a manifest that is a folder": lambda folder: (
        (folder / "manifest.json").unlink(),
        (folder / "manifest.json").mkdir(),
    ),
    "a name that is a number": lambda folder: forge(folder, files=[{**NEGATIVE, "name": 7}]),
    "a state that cannot be": lambda folder: change_about(folder, state={"skipped": 8}),
    "about that is a list": lambda folder: forge(folder, about=[]),
    "about nothing": lambda folder: forge(folder, about={}),
    "a recipe that is a list": lambda folder: change_about(folder, recipe=[]),
    "a number beyond floats": lambda folder: change_about(folder, recipe={"scale": 0, "steps": 10**400}),
    "initial weights that are a list": lambda folder: change_about(folder, initial=[1]),
    "another step than the folder's": lambda folder: forge(folder, step=4),
    "nesting": lambda folder: write_manifest(folder, "[" * 100_000),
    "NaN": lambda folder: change_about(folder, extra=math.nan),
    "a key twice": lambda folder: write_manifest(
        folder, (folder / "manifest.json").read_text().replace("{", '{"step": 8, ', 1)
    ),
    "a huge manifest": lambda folder: os.truncate(folder / "manifest.json", 2**40),
    "weights that are not finite": lambda folder: forge_tensor(folder, "weight/", lambda old: old / 0),
    "another shape": lambda folder: forge_tensor(folder, "weight/", lambda old: old[:-1].clone()),
    "another dtype": lambda folder: forge_tensor(folder, "exp_avg/", lambda old: old.double()),
    "integers": lambda folder: forge_tensor(folder, "weight/", lambda old: old.long()),
    "a tensor too many": lambda folder: forge_tensors(folder, lambda all_: all_.update({"a\nb": torch.zeros(1)})),
    "a tensor too few": lambda folder: forge_tensors(folder, lambda all_: all_.popitem()),
}


def test_a_manifest_can_be_forged(corpus: Corpus, run_copy: Path) -> None:
    """Well enough, but for the damages below."""
    os.rename(run_copy / "checkpoints" / "step-00000008", run_copy / "checkpoints" / "step-00000007")
    forge(run_copy / "checkpoints" / "step-00000007", step=7)
    assert find_checkpoint(run_copy, SMALL, corpus, pytest.fail).step == 7


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_used(
    damage: str, corpus: Corpus, run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its hashes say."""
    monkeypatch.chdir(run_copy.parent)
    assert_refused(DAMAGES[damage], 8, 6, run_copy, SMALL, corpus)


def assert_refused(
    damage: Callable[[Path], object], last: int, before: int, output: Path, recipe: Recipe, corpus: Corpus
) -> None:
    """In one line, the checkpoint of the step before is used, and nothing of the damaged one is executed."""
    folder = output / "checkpoints" / f"step-{last:08}"
    damage(folder)
    refused: list[str] = []
    found = find_checkpoint(output, recipe, corpus, refused.append)
    assert found.step == before
    assert len(refused) == 1
    assert refused[0].startswith(f"checkpoint {folder} is ")
    assert "\n" not in refused[0]
    assert len(refused[0]) < len(str(folder)) + 400
    assert not Path("executed").exists()


@pytest.mark.parametrize("step", [0, 99, 10**20])
def test_a_step_that_the_run_has_not_is_refused(step: int, corpus: Corpus, run_copy: Path) -> None:
    folder = run_copy / "checkpoints" / f"step-{step:08}"
    os.rename(run_copy / "checkpoints" / "step-00000006", folder)
    if step == 0:
        shutil.rmtree(run_copy / "checkpoints" / "step-00000008")
    forge(folder, step=step)
    refused: list[str] = []
    if step:
        assert find_checkpoint(run_copy, SMALL, corpus, refused.append).step == 8
    else:
        with pytest.raises(ValueError, match=r"none of the checkpoints in .* is whole"):
            find_checkpoint(run_copy, SMALL, corpus, refused.append)
    assert refused == [f"checkpoint {folder} is damaged: the run has {STEPS} steps, and none is {step}"]


def test_a_checkpoint_that_goes_while_it_is_read_is_one_line(run_copy: Path) -> None:
    checkpoint = checkpoints.verify(run_copy / "checkpoints", 8)
    reading = checkpoints.read_tensors(checkpoint)
    next(reading)
    shutil.rmtree(checkpoint.folder)
    with pytest.raises(checkpoints.CheckpointError, match=r"step-00000008 is torn: rank-.*No such file") as raised:
        list(reading)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("shape", "chunks", "is_whole"),
    [
        ((9,), [((0,), (4,)), ((4,), (5,))], True),
        ((4, 3), [((0, 0), (1, 3)), ((1, 0), (3, 3))], True),
        ((), [((), ())], True),
        ((9,), [((0,), (4,)), ((5,), (4,))], False),
        ((9,), [((0,), (5,)), ((4,), (5,))], False),
        ((9,), [((0,), (9,)), ((0,), (9,))], False),
        ((9,), [((0,), (8,))], False),
        ((9,), [((0,), (10,))], False),
        ((9,), [((0,), (0,)), ((0,), (9,))], False),
        ((9,), [((0, 0), (9, 1))], False),
        ((4, 3), [((0, 0), (4, 2)), ((0, 2), (4, 1))], False),
        ((4, 3), [((0,), (4,))], False),
        ((), [], False),
    ],
)
def test_chunks_are_runs_of_rows_that_follow_one_another(
    shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], is_whole: bool
) -> None:
    stored = StoredTensor(TensorKind(shape, torch.float32), tuple(Chunk("", *chunk) for chunk in chunks))
    with contextlib.nullcontext() if is_whole else pytest.raises(ValueError, match="chunk"):
        check_is_whole("a", stored)


@pytest.mark.parametrize("name", ["checkpoints", "model", "tensorboard", "wandb"])
def test_a_run_writes_and_removes_nothing_behind_a_link(name: str, corpus: Corpus, tmp_path: Path) -> None:
    output, outside = tmp_path / "out", tmp_path / "outside"
    (outside / "step-00000006.tmp").mkdir(parents=True)
    output.mkdir()
    (output / name).symlink_to(outside)
    with pytest.raises(ValueError, match=f"{name} is a link, and is not followed; put the folder in its place"):
        train(corpus, SMALL, output)
    assert [path.name for path in outside.iterdir()] == ["step-00000006.tmp"]
    assert [path.name for path in output.iterdir()] == [name]


def test_unfinished_checkpoints_are_known_by_their_whole_name(tmp_path: Path) -> None:
    for name in ("step-00000006.tmp", "step-00000004.old.tmp", "step-notes.tmp", "step-00000006.tmp.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000008.tmp").symlink_to(tmp_path / "step-notes.tmp")
    checkpoints.clear_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-notes.tmp", "step-00000006.tmp.tmp"}


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "failures.json"])
@pytest.mark.parametrize("place", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_pipes_and_devices_in_a_run_are_not_read(
    name: str, place: Callable[[Path], object], corpus: Corpus, run_copy: Path
) -> None:
    (run_copy / name).unlink(missing_ok=True)
    place(run_copy / name)
    if name == "failures.json":  # where there are no failures to be read, there were none
        assert train(corpus, SMALL, run_copy).is_dir()
        return
    with pytest.raises(
        (OSError, ValueError), match=f"{name}.*it is not a regular file|it is not a regular file.*{name}"
    ):
        train(corpus, SMALL, run_copy)


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", '{"recipe": {"scale": 0, "steps": 1e999}}', "\x80", "NaN"])
def test_a_damaged_description_of_a_run_is_one_line(
    content: str, corpus: Corpus, whole_run: Path, run_copy: Path
) -> None:
    (run_copy / "run.json").write_text(content, encoding="latin-1")
    with pytest.raises(
        ValueError, match=r"run.json is not of muse train; choose another output, or move run.json away and resume"
    ):
        train(corpus, SMALL, run_copy)
    (run_copy / "run.json").unlink()
    train(corpus, SMALL, run_copy)
    assert_same_run(run_copy, whole_run)


def test_a_run_goes_on_bit_for_bit_before_a_damaged_checkpoint(corpus: Corpus, whole_run: Path, run_copy: Path) -> None:
    """Which is not among those that are kept. What is half written or half removed is no checkpoint."""
    folder = run_copy / "checkpoints"
    flip(folder / "step-00000008" / TENSORS, -1)
    for name in ("step-00000007.tmp", "step-00000002.old.tmp"):
        (folder / name).mkdir()
        (folder / name / TENSORS).write_bytes(b"half")
    refused: list[str] = []
    steps: list[int] = []
    told: dict[str, Any] = {"on_refused": refused.append, "on_step": lambda done: steps.append(done.step)}
    train(corpus, override(SMALL, ["checkpoint_every=7"]), run_copy, **told)
    assert len(refused) == 1
    assert steps == [7, 8]
    assert checkpoints.steps_in(folder) == [7, 8]
    assert list(folder.glob("*.tmp")) == []
    assert_same_run(run_copy, whole_run)


def test_no_whole_checkpoint_is_an_error(corpus: Corpus, tmp_path: Path) -> None:
    train_until(3, corpus, QUICK, tmp_path)
    flip(tmp_path / "checkpoints" / "step-00000002" / TENSORS, -1)
    with pytest.raises(ValueError, match=r"none of the checkpoints in .* is whole"):
        train(corpus, QUICK, tmp_path)
    assert "is whole; start again with another output" in describe_last_good(tmp_path / "checkpoints")


def test_checkpoints_that_cannot_be_listed_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_last_good(tmp_path) == "there is no checkpoint yet"
    refused = PermissionError(errno.EACCES, "Permission denied", str(tmp_path))
    monkeypatch.setattr(Path, "iterdir", Mock(side_effect=refused))
    assert describe_last_good(tmp_path) == f"the checkpoints in {tmp_path} cannot be read: Permission denied"


def test_what_has_its_name_is_on_the_disk(corpus: Corpus, run_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics before the checkpoint behind them, and all files of a checkpoint and a model before they are renamed."""
    shutil.rmtree(run_copy / "checkpoints" / "step-00000008")
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
    train(corpus, SMALL, run_copy)
    assert identify(run_copy / "metrics.jsonl") in synced_before["step-00000008"]
    for folder in (run_copy / "checkpoints" / "step-00000008", run_copy / "model"):
        files = sorted(folder.iterdir())
        assert len(files) >= 2
        assert {identify(file) for file in (folder, *files)} <= synced_before[folder.name]
        assert os.stat(folder.parent).st_ino in {inode for inode, _ in synced}


def test_no_half_of_a_model_is_left(
    corpus: Corpus, whole_run: Path, run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("pathlib.Path.write_bytes", Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left on device") as raised:
        train(corpus, SMALL, run_copy)
    assert raised.value.filename == str(run_copy / "model")
    assert not (run_copy / "model.tmp").exists()
    assert contents(run_copy / "model") == contents(whole_run / "model")


def test_large_states_are_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BYTES_PER_FILE", 150)
    tensors = {name: torch.randn(10, 3) for name in "abcd"}
    save_whole(tmp_path, 1, {}, tensors)
    checkpoint = checkpoints.verify(tmp_path, 1)
    assert len(checkpoint.files) == 4
    found = dict(checkpoints.read_tensors(checkpoint))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def save_and_prune(folder: Path, step: int) -> None:
    save_whole(folder, step, {}, {"a": torch.full((3,), float(step))})
    checkpoints.prune(folder, step, 1)


def die_at(number: int) -> None:
    """End the process at this call to the file system."""

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **others: Any) -> Any:
            nonlocal number
            number -= 1
            if number < 0:
                os._exit(9)
            return call(*arguments, **others)

        return counted

    for name in ("open", "close", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "scandir"):
        setattr(os, name, counting(getattr(os, name)))


def die_at_every_call(parent: Path, report: Any) -> None:
    """Sends the step of the last good checkpoint after each death, and after a save without one."""
    found, number, code = [], 0, 9
    while code:
        folder = parent / str(number)
        save_and_prune(folder, 1)
        child = os.fork()
        if not child:
            die_at(number)
            save_and_prune(folder, 2)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        checkpoint = checkpoints.latest_good(folder, sys.exit)
        ((_, tensor),) = checkpoints.read_tensors(checkpoint)
        assert tensor.eq(checkpoint.step).all()
        found.append(checkpoint.step)
        checkpoints.clear_unfinished(folder)
        assert list(folder.glob("*.tmp")) == []
        number += 1
    report.send(found)


@pytest.mark.long
def test_a_death_at_any_call_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The one before until the rename, the new one from then on, and never a torn one."""
    receiving, sending = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=die_at_every_call, args=(tmp_path, sending))
    with running(process):
        process.join(timeout=PATIENCE)
        assert process.exitcode == 0
    steps = receiving.recv()
    assert steps == sorted(steps)
    assert steps.count(1) >= 6
    assert steps.count(2) >= 3
