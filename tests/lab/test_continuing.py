"""`muse train --continue-from`: a finished run goes on bit for bit, and one line for what cannot be right."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
from pathlib import Path

import pytest

from muse_lab.models import load_model
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.monitoring.metrics import read_metrics
from muse_lab.pretraining.recipes import override
from muse_lab.pretraining.run.continuing import further_recipe
from muse_lab.pretraining.run.folder import run_recipe
from muse_lab.pretraining.training import train
from tests.command_line import assert_refused, run_muse
from tests.lab.test_prepare import SMALL as PREPARED
from tests.lab.test_prepare import contents, make
from tests.training_runs import SMALL, STEPS, assert_same_run, losses, train_until

run = functools.partial(run_muse, "train", "--device", "cpu")
FURTHER = 3
MUSE = override(SMALL, ["exact_tail=0"])


@pytest.fixture(scope="module")
def finished(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained with MuSe to the end."""
    folder = tmp_path_factory.mktemp("finished")
    train(corpus, MUSE, folder)
    return folder


@pytest.fixture
def damaged(finished: Path, tmp_path: Path) -> Path:
    """A copy whose last checkpoint is torn."""
    copy = tmp_path / "damaged"
    shutil.copytree(finished, copy)
    (path,) = (copy / "checkpoints" / f"step-{STEPS:08}").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    return copy


@pytest.mark.long
def test_a_continued_run_is_that_of_a_recipe_with_further_updates(
    corpus: Corpus, finished: Path, tmp_path: Path
) -> None:
    """Bitwise: moments and place in the data are kept."""
    before = contents(finished)
    further = [f"further_steps={FURTHER}", "further_attention=exact"]
    train(corpus, override(MUSE, further), tmp_path / "uninterrupted")
    words = [corpus.folder, "--continue-from", finished, f"steps={FURTHER}", "attention=exact"]
    code, out, err = run(*words, "--output", tmp_path / "continued")
    goes_on = f"goes on from step {STEPS} of {STEPS + FURTHER}"
    assert (code, err) == (0, f"muse: the run in {tmp_path / 'continued'} {goes_on}\n")
    assert f"step {STEPS + FURTHER} of {STEPS + FURTHER}: loss " in out
    assert_same_run(tmp_path / "continued", tmp_path / "uninterrupted")
    assert contents(finished) == before


@pytest.mark.long
def test_further_updates_have_the_final_rate_and_their_own_attention(
    corpus: Corpus, finished: Path, tmp_path: Path
) -> None:
    recipe = further_recipe(finished, ["attention=exact", f"tokens={FURTHER * MUSE.tokens_per_step - 1}"])
    train(corpus, recipe, tmp_path, continue_from=finished)
    steps = read_metrics(tmp_path)
    assert [step["step"] for step in steps] == list(range(1, STEPS + FURTHER + 1))
    assert losses(tmp_path)[:STEPS] == losses(finished)
    assert [step["attention"] for step in steps] == [MUSE.attention] * STEPS + ["exact"] * FURTHER
    rate = MUSE.peak_rate * MUSE.final_rate
    assert [step["learning_rate"] for step in steps[STEPS:]] == pytest.approx([rate] * FURTHER)
    assert load_model(tmp_path / "model")[0].config.attention == "exact"


@pytest.mark.long
def test_a_run_is_continued_in_parts(corpus: Corpus, finished: Path, tmp_path: Path) -> None:
    """26M further tokens, and then up to 210M: the same as 210M at once."""
    first, second, at_once = (tmp_path / name for name in ("first", "second", "at-once"))
    train(corpus, further_recipe(finished, ["attention=exact", "steps=1"]), first, continue_from=finished)
    train(corpus, further_recipe(first, ["steps=2"]), second, continue_from=first)
    train(corpus, further_recipe(finished, ["attention=exact", "steps=3"]), at_once, continue_from=finished)
    assert run_recipe(second) == run_recipe(at_once)
    assert_same_run(second, at_once)


@pytest.mark.long
def test_an_interrupted_continuation_goes_on(corpus: Corpus, finished: Path, tmp_path: Path) -> None:
    recipe = further_recipe(finished, ["attention=exact", "steps=4"])
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(corpus, recipe, whole, continue_from=finished)
    train_until(STEPS + 3, corpus, recipe, stopped, continue_from=finished)
    words = [corpus.folder, "--output", stopped]
    assert run(*words, "--continue-from", finished, "attention=exact", "steps=4")[0] == 0
    assert_same_run(stopped, whole)
    assert run(*words, "--resume")[0] == 0
    assert_same_run(stopped, whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "--continue-from needs either tokens=, like tokens=26M, or steps=, like steps=200"),
        (["tokens=1M", "steps=2"], "--continue-from needs either tokens="),
        (["tokens=lots"], "tokens=lots must be a number of tokens, like 26M, 1.5B or 131072"),
        (["steps=0"], "steps=0 must be at least 1"),
        (["steps=2", "length=32"], "keeps the recipe of"),
        (["steps=2", "attention=exakt"], "unknown attention 'exakt'"),
        (["steps=2", "steps=3"], "steps is given twice, as 2 and as 3; leave one out"),
    ],
)
def test_what_cannot_be_asked_for(changes: list[str], message: str, finished: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        further_recipe(finished, changes)


@pytest.mark.parametrize(
    ("text", "updates"), [("26M", 203125), ("0.5M", 3907), ("1B", 7812500), ("128", 1), ("129", 2), ("1k", 8)]
)
def test_tokens_are_whole_updates(text: str, updates: int, finished: Path) -> None:
    """Of 128 tokens; M and B are decimal, as in the paper, k is 1024."""
    assert further_recipe(finished, [f"tokens={text}"]).further_steps == updates


@pytest.mark.long
def test_runs_that_cannot_be_continued(corpus: Corpus, finished: Path, damaged: Path, tmp_path: Path) -> None:
    def refused(message: str, *words: object, of: Path = finished, corpus_folder: Path = corpus.folder) -> None:
        output = tmp_path / "out"
        assert_refused(run(corpus_folder, "--continue-from", of, "--output", output, "steps=1", *words), message)
        assert not (output / "checkpoints").exists()

    refused("there is no run in", of=tmp_path)
    refused("leave --recipe out", "--recipe", "tiny")
    refused("leave --resume out", "--resume")
    stopped, without, continued = (tmp_path / name for name in ("stopped", "without", "continued"))
    train_until(5, corpus, MUSE, stopped)
    refused("is not finished: 4 of 8 updates are in its checkpoints; resume it first", of=stopped)
    shutil.copytree(finished, without)
    shutil.rmtree(without / "checkpoints" / f"step-{STEPS:08}")
    refused("has no checkpoint of its last update, where the optimiser's state is", of=without)
    refused("is torn", of=damaged)
    other = make(tmp_path / "other", dataclasses.replace(PREPARED, held_out=0.4))
    refused("is of another corpus than", corpus_folder=other.folder)
    train(corpus, further_recipe(finished, ["attention=exact", "steps=1"]), continued, continue_from=finished)
    came_from = "was already continued with exact; continue the run that it came from"
    refused(came_from, f"attention={MUSE.attention}", of=continued)
    assert_refused(
        run(corpus.folder, "--continue-from", finished, "steps=1", "--output", finished),
        "leaves that run as it is; choose another --output",
    )


def test_a_rate_that_ended_at_zero_learns_nothing(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, override(MUSE, ["final_rate=0", "steps=2"]), tmp_path)
    with pytest.raises(ValueError, match="the learning rate of the run ended at 0"):
        further_recipe(tmp_path, ["steps=1"])


def test_a_run_is_overwritten_only_by_one_that_can_be_continued(
    corpus: Corpus, finished: Path, damaged: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    shutil.copytree(finished, output)
    before = contents(output)
    words = [corpus.folder, "steps=1", "--output", output]
    assert run(*words, "--continue-from", damaged, "--overwrite")[0] == 2
    assert contents(output) == before
    assert_refused(run(*words, "--continue-from", finished), "has further_steps=0, not 1: it would not be the same run")
    assert run(*words, "--continue-from", finished, "--overwrite")[0] == 0
    assert run_recipe(output).updates == STEPS + 1
