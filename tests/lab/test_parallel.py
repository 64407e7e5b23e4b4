"""Several processes train together, by gloo on a CPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.monitoring.metrics import read_metrics
from muse_lab.pretraining.parallel import World
from muse_lab.pretraining.recipes import Recipe, override
from muse_lab.pretraining.run.continuing import further_recipe
from muse_lab.pretraining.run.folder import claimed
from muse_lab.pretraining.training import train
from muse_lab.records.files import alone_in
from tests.patience import PATIENCE
from tests.processes import free_port, running
from tests.ranks import CONTEXT, Mishap, run_command, words_of
from tests.training_runs import QUICK, SMALL, assert_same_run, learnt, losses


@contextlib.contextmanager
def ranks_of(
    words: list[str], output: Path, ranks: int = 2, mishap: Mishap | None = None
) -> Iterator[list[tuple[Any, Path]]]:
    """Processes of `muse train` as under `torchrun`, by the variables that it sets, and the files of what they say."""
    port, arguments = free_port(), ["train", *words, "--output", str(output), "--device", "cpu"]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    errors = [output.with_name(f"{output.name}-{rank}.txt") for rank in range(ranks)]
    processes = [
        CONTEXT.Process(
            target=run_command,
            args=(arguments, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, file, mishap),
        )
        for rank, file in enumerate(errors)
    ]
    with running(*processes):
        yield list(zip(processes, errors, strict=True))


def train_together(corpus: Corpus, recipe: Recipe, output: Path, ranks: int = 2, mishap: Mishap | None = None) -> None:
    run_together(words_of(corpus, recipe), output, ranks, mishap)


def run_together(words: list[str], output: Path, ranks: int = 2, mishap: Mishap | None = None) -> None:
    with ranks_of(words, output, ranks, mishap) as processes:
        for process, _ in processes:
            process.join(timeout=PATIENCE)
        ends = [(process.exitcode, file.read_text()) for process, file in processes]
        assert {code for code, _ in ends} == {0}, ends


def assert_close_runs(output: Path, expected: Path) -> None:
    for found, other in zip(read_metrics(output), read_metrics(expected), strict=True):
        assert found.get("rse", {}).keys() == other.get("rse", {}).keys()
        for name in ("loss", "gradient_norm", "learning_rate"):
            assert found[name] == pytest.approx(other[name], rel=1e-3), (found["step"], name)
    tensors, others = learnt(output), learnt(expected)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, others[name], atol=1e-5, rtol=1e-4)


@pytest.mark.long
def test_two_processes_continue_what_one_has_finished(corpus: Corpus, tmp_path: Path) -> None:
    finished, alone, two = (tmp_path / name for name in ("finished", "alone", "two"))
    train(corpus, override(SMALL, ["micro_batch=1", "steps=2", "probe_every=0"]), finished)
    train(corpus, further_recipe(finished, ["attention=exact", "steps=2"]), alone, continue_from=finished)
    run_together([str(corpus.folder), "--continue-from", str(finished), "attention=exact", "steps=2"], two)
    assert len(read_metrics(two)) == 4
    assert_close_runs(two, alone)


@pytest.mark.long
def test_a_signal_to_one_rank_stops_all_at_the_same_step(corpus: Corpus, tmp_path: Path) -> None:
    """With a checkpoint of that step, from which both go on."""
    recipe = override(QUICK, ["micro_batch=1", "steps=16", "checkpoint_every=14"])
    whole, output = tmp_path / "whole", tmp_path / "out"
    train_together(corpus, recipe, whole)
    with ranks_of(words_of(corpus, recipe), output) as processes:
        metrics = output / "metrics.jsonl"
        deadline = time.monotonic() + PATIENCE
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(processes[1][0].pid, signal.SIGTERM)
        for process, file in processes:
            process.join(timeout=PATIENCE)
            assert process.exitcode == 143, file.read_text()
    step = len(read_metrics(output))
    assert 3 <= step < 16
    assert checkpoints.steps_in(output / "checkpoints")[-1] == step
    assert f"stopped as another rank was after step {step}; " in processes[0][1].read_text()
    assert f"stopped by SIGTERM after step {step}; " in processes[1][1].read_text()
    train_together(corpus, recipe, output)
    assert_same_run(output, whole)


@pytest.mark.long
def test_all_ranks_skip_what_one_of_them_cannot_use(corpus: Corpus, tmp_path: Path) -> None:
    """And they limit errors alike, and evaluate together."""
    limits = ["probe_every=1", "error_limit=1e-5", "attention=muse:Q4K4T0.5B16,first_order=false", "exact_tail=0"]
    evaluated = ["evaluate_every=2", "evaluate_samples=3", "evaluate_needles=0"]
    recipe = override(QUICK, ["micro_batch=1", "steps=4", *limits, *evaluated])
    train_together(corpus, recipe, tmp_path / "two", mishap=Mishap(1, "poison", 3))
    lines = read_metrics(tmp_path / "two")
    assert [line["step"] for line in lines if "skipped" in line] == [3]
    assert lines[2]["skipped"] == "its loss is nan"
    assert set(lines[0]["tightened"].values()) == {"exact"}
    assert [line["step"] for line in lines if "evaluation" in line] == [2, 4]
    assert "step 3 is skipped" in (tmp_path / "two-0.txt").read_text()
    assert (tmp_path / "two-1.txt").read_text() == ""
    manifest = json.loads((tmp_path / "two" / "checkpoints" / "step-00000004" / "manifest.json").read_text())
    assert manifest["about"]["state"]["skipped"] == 1
    train(corpus, recipe, tmp_path / "one")
    one = read_metrics(tmp_path / "one")[1]["evaluation"]
    assert lines[1]["evaluation"] == pytest.approx(one, rel=1e-4)


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
