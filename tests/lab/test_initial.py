"""A run that begins with the weights of another: short sequences first, long ones then."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from muse_lab.models import load_model
from muse_lab.pretraining.batches import Batches, Windows
from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.data.corpus_documents import Buckets
from muse_lab.pretraining.data.prepare import CorpusSettings
from muse_lab.pretraining.recipes import Recipe, override
from muse_lab.pretraining.training import train
from tests.lab.test_prepare import make
from tests.models import tiny_llama
from tests.refusals import one_line_error
from tests.training_runs import SMALL, assert_same_run, losses, train_until


def longer(model: Path) -> Recipe:
    return override(SMALL, [f"initial={model}", "length=96", "steps=4", "probe_every=0", "attention=exact"])


@pytest.fixture
def model(whole_run: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "before"
    shutil.copytree(whole_run / "model", copy)
    return copy


def test_it_goes_on_from_what_was_learnt(corpus: Corpus, model: Path, tmp_path: Path) -> None:
    train(corpus, longer(model), tmp_path / "out")
    before, _ = load_model(model)
    tokens = Batches(Windows(corpus, 96), SMALL.batch).read(0)
    with torch.no_grad():
        expected = before(tokens[:, :-1], shift_labels=tokens[:, 1:]).loss.item()
    assert losses(tmp_path / "out")[0] == pytest.approx(expected, rel=1e-5)
    weights = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    checkpoint = checkpoints.latest_good(tmp_path / "out" / "checkpoints", pytest.fail)
    for about in (json.loads((tmp_path / "out" / "run.json").read_text()), checkpoint.about):
        assert about["initial"] == weights
    after, _ = load_model(tmp_path / "out" / "model")
    assert after.config.max_position_embeddings == 96


@pytest.mark.long
def test_it_is_resumed_without_the_other_model(corpus: Corpus, model: Path, tmp_path: Path) -> None:
    recipe = longer(model)
    train(corpus, recipe, tmp_path / "whole")
    train_until(3, corpus, recipe, tmp_path / "parted")
    shutil.rmtree(model)
    train(corpus, recipe, tmp_path / "parted")
    assert_same_run(tmp_path / "parted", tmp_path / "whole")
    runs = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("parted", "whole")]
    assert runs[0]["initial"] == runs[1]["initial"]


def test_a_run_without_a_checkpoint_still_needs_it(corpus: Corpus, model: Path, tmp_path: Path) -> None:
    train_until(1, corpus, longer(model), tmp_path / "out")
    shutil.rmtree(model)
    with pytest.raises(ValueError, match="before is not a folder of a model that muse train wrote"):
        train(corpus, longer(model), tmp_path / "out")


def test_models_that_a_run_cannot_begin_with(corpus: Corpus, model: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", CorpusSettings(vocabulary=300, buckets=Buckets(64, 4096)))
    with pytest.raises(ValueError, match="must be a string"):
        dataclasses.replace(SMALL, initial=model)  # type: ignore[arg-type]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").mkdir()
    cases = [
        (corpus, longer(tmp_path / "run"), "or not whole; give initial=.*/run/model$"),
        (
            corpus,
            longer(tmp_path / "nowhere"),
            "nowhere is not a folder of a model that muse train wrote, or not whole; give one",
        ),
        (corpus, override(longer(model), ["scale=3"]), "not a model of scale=3; choose its scale"),
        (other, longer(model), "has another tokenizer than .*; prepare the corpus with --tokenizer .*before"),
    ]
    llama = tmp_path / "llama"
    shutil.copytree(model, llama)
    tiny_llama(vocab_size=corpus.manifest.vocabulary).save_pretrained(llama)
    cases.append((corpus, longer(llama), "llama is not a model of scale=0"))
    for data, recipe, message in cases:
        with one_line_error(message):
            train(data, recipe, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("damage", [os.mkfifo, lambda path: path.write_bytes(b"cut")])
def test_a_damaged_model_is_not_begun_with(
    name: str, damage: Callable[[Path], object], corpus: Corpus, model: Path, tmp_path: Path
) -> None:
    (model / name).unlink()
    damage(model / name)
    with pytest.raises(ValueError, match=r"or not whole; give one|has another tokenizer than"):
        train(corpus, longer(model), tmp_path / "out")


def test_weights_that_are_not_finite_are_not_begun_with(corpus: Corpus, model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    name = max(weights)
    weights[name].view(-1)[-1] = math.inf
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"is damaged: {name} has numbers that are not finite; give another"):
        train(corpus, longer(model), tmp_path / "out")
