"""Several processes train together, by gloo on a CPU."""

from __future__ import annotations

import dataclasses
import shutil
import socket
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("typer")
pytest.importorskip("rich")


from muse_attention.files import alone_in
from muse_attention.pretraining.data.corpus import Corpus
from muse_attention.pretraining.failures import TrainingError
from muse_attention.pretraining.metrics import read_metrics
from muse_attention.pretraining.parallel import World
from muse_attention.pretraining.recipes import Recipe, override
from muse_attention.pretraining.run_folder import claimed
from muse_attention.pretraining.training import train
from tests.needle_models import needle_corpus, needle_tokenizer
from tests.ranks import CONTEXT, run_command
from tests.test_prepare import contents
from tests.training_runs import SMALL, STEPS, assert_same_run, learnt, losses


def train_together(corpus: Corpus, recipe: Recipe, output: Path, ranks: int = 2) -> None:
    """As under `torchrun`, by the variables that it sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fields = [f"{name}={value}" for name, value in dataclasses.asdict(recipe).items()]
    arguments = ["train", str(corpus.folder), *fields, "--recipe", "tiny", "--output", str(output), "--device", "cpu"]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    errors = [output.with_name(f"{output.name}-{rank}.txt") for rank in range(ranks)]
    processes = [
        CONTEXT.Process(
            target=run_command, args=(arguments, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, file)
        )
        for rank, file in enumerate(errors)
    ]
    try:
        for process in processes:
            process.start()
        for process, file in zip(processes, errors, strict=True):
            process.join(timeout=240)
            assert process.exitcode == 0, file.read_text()
    finally:
        for process in processes:
            process.kill()
            process.join()


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
    assert files == ["manifest.json", "rank-00000-00000.safetensors", "rank-00001-00000.safetensors"]
    for copy in (again, one):
        shutil.copytree(two, copy)
        shutil.rmtree(copy / "checkpoints" / "step-00000008")
    train_together(corpus, recipe, again)
    assert_same_run(again, two)
    train(corpus, recipe, one, resume=True)
    assert_close_runs(one, two)


def test_two_processes_learn_from_the_same_needles(tmp_path: Path) -> None:
    """Read ahead by each, and what was learnt of answers measured by both, on documents of their own."""
    corpus = needle_corpus(needle_tokenizer(), tmp_path)
    changes = ["length=256", "steps=3", "mixture=niah", "attention=exact", "exact_tail=0", "probe_every=2"]
    recipe = override(SMALL, ["micro_batch=1", *changes])
    train(corpus, recipe, tmp_path / "alone")
    train_together(corpus, recipe, tmp_path / "two")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    assert ["answers_loss" in step for step in read_metrics(tmp_path / "two")] == [False, True, False]


@pytest.mark.parametrize("is_first", [True, False])
def test_all_ranks_leave_a_folder_that_is_taken(is_first: bool, tmp_path: Path) -> None:
    class Shared(World):
        is_first = property(lambda world: is_first)  # type: ignore[assignment]

        def all_succeed(self, success: bool) -> bool:
            assert success is not is_first
            return False

    message = "another process is at work in" if is_first else "the first rank cannot work in .*; it says why"
    with (
        alone_in(tmp_path),
        pytest.raises(ValueError, match=message),
        claimed(tmp_path, Shared(torch.device("cpu"), ranks=2)),
    ):
        pytest.fail("it was let in")


@pytest.mark.slow
def test_two_processes_learn_the_same_with_all_that_saves_time_and_memory(
    corpus: Corpus, whole_run: Path, tmp_path: Path
) -> None:
    changes = ["micro_batch=1", "probe_every=1", "compile=true", "recompute=true", "precision=bfloat16"]
    train_together(corpus, override(SMALL, changes), tmp_path / "out")
    assert losses(tmp_path / "out") == pytest.approx(losses(whole_run), rel=0.02)


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
    with pytest.raises(TrainingError, match="some ranks would continue from step 6 and some from step 8"):
        train(corpus, SMALL, output, resume=True, world=world)
    assert contents(output) == before
