"""Checkpoints of several ranks: killed at any moment of a save, damaged in any way, read by another number of ranks."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.interruptions.failures import TrainingError
from muse_lab.pretraining.monitoring.metrics import read_metrics
from muse_lab.pretraining.parallel import World
from muse_lab.pretraining.recipes import override
from muse_lab.pretraining.run.folder import find_checkpoint
from muse_lab.pretraining.training import train
from tests import shard_checks
from tests.lab.test_checkpoints import Bomb, assert_refused, flip, forge
from tests.lab.test_parallel import assert_close_runs, ranks_of, train_together, words_of
from tests.patience import PATIENCE
from tests.processes import free_port, running
from tests.ranks import CONTEXT, Mishap
from tests.training_runs import QUICK, assert_same_run

KILLS = 4
CALLS_IN_A_SAVE = 22, 4
"""To the file system, about: by the first rank, and by another."""
RECIPE = override(QUICK, ["micro_batch=1", "steps=10", "checkpoint_every=1"])
LAST = RECIPE.steps


@pytest.fixture(scope="module")
def two_ranks(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nothing has disturbed, and nobody may."""
    output = tmp_path_factory.mktemp("two") / "out"
    train_together(corpus, RECIPE, output)
    return output


def go_back(output: Path, step: int, source: Path) -> None:
    """A copy of a run, without the checkpoints after a step."""
    shutil.copytree(source, output)
    checkpoints.clear_after(output / "checkpoints", step)


@pytest.mark.long
def test_kills_at_four_random_moments_of_saves_cost_nothing(corpus: Corpus, two_ranks: Path, tmp_path: Path) -> None:
    """Of one rank, which ends the other, and of both. All that was durable stays whole.

    The run ends bit for bit as one that was not killed. After the last kill it also goes on with one process.
    """
    output, folder = tmp_path / "out", tmp_path / "out" / "checkpoints"
    draw, durable = random.Random(0), 0
    for kill in range(KILLS):
        victim, kind = kill % 2, "die_in_save" if kill % 3 else "all_die_in_save"
        mishap = Mishap(victim, kind, draw.randint(1, 2 * CALLS_IN_A_SAVE[victim]))
        with ranks_of(words_of(corpus, RECIPE), output, mishap=mishap) as processes:
            for process, _ in processes:
                process.join(timeout=PATIENCE)
            codes = [process.exitcode for process, _ in processes]
        said = [file.read_text() for _, file in processes]
        assert codes[victim] == -9, said
        assert codes[1 - victim] == (1 if kill % 3 else -9), said
        if kill % 3:
            last = said[1 - victim].splitlines()[-1]
            assert re.fullmatch(r"muse: another rank is gone; .*; resume the run", last)
        steps = checkpoints.steps_in(folder)
        assert max(steps, default=0) >= durable, "what was durable is lost"
        durable = max(steps, default=0)
        for step in steps:
            checkpoints.verify(folder, step)
        if kill == KILLS - 1:
            shutil.copytree(output, tmp_path / "one")
    assert 1 <= durable < LAST
    train_together(corpus, RECIPE, output)
    assert_same_run(output, two_ranks)
    train(corpus, RECIPE, tmp_path / "one", on_refused=pytest.fail)
    assert_close_runs(tmp_path / "one", two_ranks)


@pytest.mark.long
def test_a_rank_that_cannot_write_stops_all(corpus: Corpus, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with ranks_of(words_of(corpus, RECIPE), output, mishap=Mishap(1, "fill_disk", 3)) as processes:
        for process, file in processes:
            process.join(timeout=PATIENCE)
            assert process.exitcode == 1, file.read_text()
    folder = output / "checkpoints"
    assert checkpoints.steps_in(folder) == [1, 2]
    assert list(folder.glob("*.tmp")) == []
    assert len(read_metrics(output)) <= 5  # it is noticed at the next update
    first, other = (file.read_text().splitlines() for _, file in processes)
    assert len(first) == len(other) == 1
    assert "another rank cannot write its checkpoint; the last good checkpoint is " in first[0]
    assert "No space left on device" in other[0]
    assert "step-00000002" in first[0]


def shard(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}-00000.safetensors"


def swap(folder: Path) -> None:
    os.rename(shard(folder, 0), folder / "other")
    os.rename(shard(folder, 1), shard(folder, 0))
    os.rename(folder / "other", shard(folder, 1))


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], object], *, well: bool) -> None:
    """Change the table of tensors, and the manifest's own hash with it if that is done `well`."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document["tensors"])
    if well:
        forge(folder, tensors=document["tensors"])
    else:
        path.write_text(json.dumps(document))


def swap_chunks(tensors: dict[str, Any]) -> None:
    chunks = next(iter(tensors.values()))["chunks"]
    chunks[0][0], chunks[1][0] = chunks[1][0], chunks[0][0]


def lose_chunk(tensors: dict[str, Any]) -> None:
    next(iter(tensors.values()))["chunks"].pop()


def name_other_file(tensors: dict[str, Any]) -> None:
    next(iter(tensors.values()))["chunks"][0][0] = 7


def lose_tensor(folder: Path) -> None:
    """From one file, with its hash as it should be."""
    tensors = load_file(shard(folder, 1))
    tensors.popitem()
    save_file(tensors, shard(folder, 1))
    content = shard(folder, 1).read_bytes()
    files = json.loads((folder / "manifest.json").read_text())["files"]
    files[1].update(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    forge(folder, files=files)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped byte": lambda folder: flip(shard(folder, 1), -1),
    "swapped shards": swap,
    "a pickle as torch writes it": lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Bomb())),
    "a file too many": lambda folder: shutil.copy(shard(folder, 1), shard(folder, 2)),
    "an edited table": lambda folder: edit_tensors(folder, swap_chunks, well=False),
    "a table without a chunk": lambda folder: edit_tensors(folder, lose_chunk, well=True),
    "a table with a file that there is not": lambda folder: edit_tensors(folder, name_other_file, well=True),
    "a table with a tensor too many": lambda folder: edit_tensors(
        folder, lambda tensors: tensors.update(a=next(iter(tensors.values()))), well=True
    ),
    "a table that is a list": lambda folder: forge(folder, tensors=[]),
    "a tensor too few in a shard": lose_tensor,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_of_two_ranks_is_refused_in_one_line(
    damage: str, corpus: Corpus, two_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    shutil.copytree(two_ranks, output)
    monkeypatch.chdir(tmp_path)
    assert_refused(DAMAGES[damage], LAST, LAST - 1, output, RECIPE, corpus)


@pytest.mark.long
def test_ranks_refuse_together_what_one_of_them_finds_damaged(corpus: Corpus, two_ranks: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(two_ranks, output)
    flip(shard(output / "checkpoints" / f"step-{LAST:08}", 1), -1)  # which the second rank verifies
    train_together(corpus, RECIPE, output)
    refused, goes_on = (tmp_path / "out-0.txt").read_text().splitlines()
    assert refused.endswith(f"step-{LAST:08} is damaged: rank-00001-00000.safetensors is not what was written")
    assert goes_on.endswith(f"goes on from step {LAST - 1} of {LAST}")
    assert (tmp_path / "out-1.txt").read_text() == ""
    assert_same_run(output, two_ranks)


@pytest.mark.parametrize(
    "theirs", [[LAST - 1], [LAST - 1, LAST, LAST + 1], "another manifest", "its manifest.json: No such file"]
)
def test_ranks_that_see_different_files_do_not_go_on(
    theirs: list[int] | str, corpus: Corpus, two_ranks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a network's folder shows a checkpoint to one rank and not yet to another: it must not be refused."""

    def gather(found: list[Any], value: Any) -> None:
        found[:] = [value, theirs if isinstance(value, type(theirs)) else value]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    world = World(torch.device("cpu"), 0, 2, cast(Any, object()))
    with pytest.raises(TrainingError, match=r"ranks see different files in .*; resume again in a minute"):
        find_checkpoint(two_ranks, RECIPE, corpus, pytest.fail, world=world)


def run_checks(action: str, ranks: int, folder: Path) -> None:
    port = free_port()
    processes = [
        CONTEXT.Process(target=shard_checks.run, args=(action, rank, ranks, port, folder)) for rank in range(ranks)
    ]
    with running(*processes):
        for process in processes:
            process.join(timeout=PATIENCE)
            assert process.exitcode == 0


def test_what_four_ranks_wrote_on_any_mesh_is_read_by_two_and_by_one(tmp_path: Path) -> None:
    """What several ranks have is written once, and a rank opens only files that have something for it."""
    run_checks("save", 4, tmp_path)
    assert checkpoints.steps_in(tmp_path) == list(shard_checks.LAYOUTS)
    for step in shard_checks.LAYOUTS:
        found = dict(checkpoints.read_tensors(checkpoints.verify(tmp_path, step)))
        expected = shard_checks.whole_tensors()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    run_checks("load", 2, tmp_path)


@pytest.mark.long
def test_two_ranks_go_on_from_a_checkpoint_of_four(corpus: Corpus, tmp_path: Path) -> None:
    recipe = override(RECIPE, ["batch=4", "steps=3"])
    train_together(corpus, recipe, tmp_path / "four", ranks=4)
    go_back(tmp_path / "two", 2, tmp_path / "four")
    train_together(corpus, recipe, tmp_path / "two")
    assert_close_runs(tmp_path / "two", tmp_path / "four")


def test_each_file_is_hashed_by_one_rank(two_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own, where there are as many ranks as have written."""

    def gather(found: list[Any], value: Any) -> None:
        found[:] = [value] * len(found)

    hash_file = Mock(wraps=checkpoints.hash_file)
    monkeypatch.setattr(checkpoints, "hash_file", hash_file)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    for ranks, shares in ((2, [[0], [1]]), (1, [[0, 1]]), (3, [[0], [], [1]])):
        for rank, share in enumerate(shares):
            hash_file.reset_mock()
            world = World(torch.device("cpu"), rank, ranks, cast(Any, object()))
            checkpoints.verify(two_ranks / "checkpoints", LAST, world)
            hashed = [call.args[0].name for call in hash_file.call_args_list]
            assert hashed == [f"rank-{number:05}-00000.safetensors" for number in share]
