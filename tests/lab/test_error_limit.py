"""A limit on the attention's error: a layer above it attends more closely, and relaxes again."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from muse_attention.huggingface import use_attention
from muse_lab.pretraining.batches import Batches, Windows
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.initial_model import make_model
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.monitoring import error_limit
from muse_lab.pretraining.monitoring.error_limit import ErrorLimit
from muse_lab.pretraining.monitoring.metrics import Step, read_metrics
from muse_lab.pretraining.recipes import override
from muse_lab.pretraining.training import train
from tests.training_runs import SMALL, assert_same_run, attentions_called, losses, train_until

LOOSE = "muse:Q4K4T0.5B16,first_order=false"
QUARTER, SIXTEENTH = LOOSE.replace("0.5", "0.125"), LOOSE.replace("0.5", "0.03125")
LIMITED = override(SMALL, [f"attention={LOOSE}", "probe_every=1", "error_limit=1e-5"])
"""The errors of a model that has learnt nothing are above this limit, those of later updates below it."""


def itself(measures: dict[str, float]) -> dict[str, float]:
    return measures


def measure_attention(model: DecoderForCausalLM, tokens: torch.Tensor, name: str) -> dict[int, dict[str, float]]:
    return ErrorLimit.of(math.inf, name, 64).probe(model, tokens, {}, itself).measures


class Limited(NamedTuple):
    output: Path
    notes: list[str]
    updates: list[list[str]]
    """the attention of each layer, by what it calls"""


@pytest.fixture(scope="module")
def limited_run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Limited:
    run = Limited(tmp_path_factory.mktemp("limited"), [], [])
    with pytest.MonkeyPatch.context() as patch:
        called = attentions_called(patch)

        def note(done: Step) -> None:
            run.updates.append(called[:2])  # two layers; the probe follows
            called.clear()

        train(corpus, LIMITED, run.output, on_note=run.notes.append, on_step=note)
    return run


@pytest.fixture
def peaked(corpus: Corpus) -> DecoderForCausalLM:
    """A model whose last layer attends to few keys, which summaries do not show."""
    model = make_model(corpus, LIMITED)
    with torch.no_grad():
        for projection in ("q_proj", "k_proj"):
            getattr(model.model.layers[3].self_attn, projection).weight.mul_(8)
    return model


@pytest.fixture
def tokens(corpus: Corpus) -> torch.Tensor:
    return Batches(Windows(corpus, 64), 4).read(0)[:1, :-1]


def test_a_layer_above_the_limit_is_tightened_as_far_as_it_must(
    peaked: DecoderForCausalLM, tokens: torch.Tensor
) -> None:
    errors = {
        name: {
            layer: found["relative_squared_error"] for layer, found in measure_attention(peaked, tokens, name).items()
        }
        for name in (LOOSE, QUARTER, SIXTEENTH)
    }
    assert errors[LOOSE][3] > errors[QUARTER][3] > errors[SIXTEENTH][3] > errors[LOOSE][1]
    for limit, attention in (
        (errors[LOOSE][3], LOOSE),
        (errors[QUARTER][3], QUARTER),
        (errors[SIXTEENTH][3], SIXTEENTH),
        (errors[SIXTEENTH][3] * 0.999, "exact"),
    ):
        limiting = ErrorLimit.of(limit, LOOSE, 64)
        assert limiting.attentions == (LOOSE, QUARTER, SIXTEENTH, "exact")
        found = limiting.probe(peaked, tokens, {}, itself)
        assert {layer: measures["relative_squared_error"] for layer, measures in found.measures.items()} == errors[
            LOOSE
        ]
        expected = {} if attention == LOOSE else {3: attention}
        assert limiting.by_layer(found.levels) == expected
        assert [(change.layer, change.before, change.after) for change in found.changes] == [
            (layer, LOOSE, after) for layer, after in expected.items()
        ]


def test_a_layer_is_relaxed_by_one_level_where_half_the_limit_holds(
    peaked: DecoderForCausalLM, tokens: torch.Tensor
) -> None:
    error = measure_attention(peaked, tokens, QUARTER)[3]["relative_squared_error"]
    for limit, level in ((1.9 * error, 2), (2.1 * error, 1)):
        limiting = ErrorLimit.of(limit, LOOSE, 64)
        found = limiting.probe(peaked, tokens, {3: 2}, itself)
        assert found.levels == {3: level}
        assert found.measures[3] == measure_attention(peaked, tokens, SIXTEENTH)[3]
    (change,) = found.changes
    assert change.describe(limiting.limit).startswith(f"layer 3 switches back from {SIXTEENTH} to {QUARTER}: ")
    assert ErrorLimit.of(1.0, LOOSE, 64).by_layer({3: 99}) == {3: "exact"}
    exact = ErrorLimit.of(1.0, LOOSE, 64).probe(peaked, tokens, {3: 99}, itself)
    assert exact.levels == {3: 2}
    assert set(exact.measures) == {1}, "exact attention has no error"


@pytest.mark.parametrize("name", ["muse:Q4K4R1SP1B16,clustering=lloyd", "moba:L16B8R1", "block_diagonal:16"])
def test_an_attention_without_a_tolerance_becomes_exact(
    name: str, peaked: DecoderForCausalLM, tokens: torch.Tensor
) -> None:
    limiting = ErrorLimit.of(1e-12, name, 64)
    assert limiting.attentions == (name, "exact")
    assert limiting.probe(peaked, tokens, {}, itself).levels == {1: 1, 3: 1}


def test_an_error_that_is_no_number_is_above_every_limit(
    peaked: DecoderForCausalLM, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(pooled=lambda: {"relative_squared_error": math.nan})
    monkeypatch.setattr(error_limit, "measure", lambda *_, **__: found)
    assert ErrorLimit.of(0.5, LOOSE, 64).probe(peaked, tokens, {}, itself).levels == {1: 3, 3: 3}


@pytest.mark.long
def test_a_run_tightens_and_relaxes_and_says_so(limited_run: Limited) -> None:
    """What the line of an update says is so from the next one on."""
    _, notes, updates = limited_run
    lines = read_metrics(limited_run.output)
    assert lines[0]["tightened"] == {"1": "exact", "3": "exact"}
    assert [line.get("tightened") for line in lines[:4]] == [
        *({"1": name, "3": name} for name in ("exact", SIXTEENTH, QUARTER)),
        None,
    ]
    assert updates == [[name] * 2 for name in (LOOSE, "exact", SIXTEENTH, QUARTER, LOOSE, LOOSE, "exact", "exact")]
    assert notes[0].startswith(
        f"step 1: layer 1 switches from {LOOSE} to exact: the relative squared error of {LOOSE} is "
    )
    assert notes[0].endswith(", above error_limit=1e-05")
    assert notes[2].startswith(f"step 2: layer 1 switches back from exact to {SIXTEENTH}: ")
    assert notes[2].endswith(", below 0.5 of error_limit=1e-05")
    assert len(notes) == 8


@pytest.mark.long
def test_a_run_that_is_resumed_has_the_same_levels(corpus: Corpus, limited_run: Limited, tmp_path: Path) -> None:
    recipe = override(LIMITED, ["checkpoint_every=1"])
    train_until(2, corpus, recipe, tmp_path)
    train(corpus, recipe, tmp_path)
    assert_same_run(tmp_path, limited_run.output)


@pytest.mark.long
def test_a_limit_that_is_not_reached_changes_nothing(corpus: Corpus, whole_run: Path, tmp_path: Path) -> None:
    train(corpus, override(SMALL, ["error_limit=0.02"]), tmp_path, on_note=pytest.fail)
    assert losses(tmp_path) == losses(whole_run)
    assert [line.get("rse") for line in read_metrics(tmp_path)] == [line.get("rse") for line in read_metrics(whole_run)]


def test_a_layer_of_its_own_yields_to_another_attention_of_the_model(
    peaked: DecoderForCausalLM, tokens: torch.Tensor
) -> None:
    """As in the exact tail, and where the probe captures: it stands for one attention alone."""
    expected = peaked(tokens).logits
    peaked.replace_attention(LOOSE, {3: "exact"})
    assert not torch.equal(peaked(tokens).logits, expected)
    with use_attention(peaked, QUARTER):
        other = peaked(tokens).logits
    peaked.replace_attention(LOOSE, {})
    with use_attention(peaked, QUARTER):
        assert torch.equal(peaked(tokens).logits, other)
    assert torch.equal(peaked(tokens).logits, expected)
