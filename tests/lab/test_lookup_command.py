"""`muse eval needles --lookups`: what it measures, and its report."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from muse_attention import get_attention
from muse_attention.core.recording import recorded_calls
from muse_attention.fidelity.lookups import found_weight
from muse_lab.evaluation.lookups.lookup_report import (
    STRONG,
    head_table,
    layer_table,
    lookup_report,
    pool,
    summary_table,
)
from muse_lab.evaluation.lookups.results import Found, LookupResults, measure
from muse_lab.evaluation.needles.results import NeedleSettings, NeedleTask, plan
from muse_lab.pretraining.needles.samples import NeedleSamples
from muse_lab.report.markdown import as_markdown
from tests.models import capture
from tests.needle_models import needle_llama

LENGTH = 512
PAPER, TOLERANT = "muse:Q4K4R1SP1B64,clustering=lloyd", "muse:Q4K8T0.1B64"
SHORT_PAPER, SHORT_TOLERANT = "Q4K4R1SP1B64", "Q4K8T0.1B64"
SETTINGS = NeedleSettings("tiny", "made up", 0, "cpu", "float32")


# The numbers


def tasks_of(*attentions: str) -> list[NeedleTask]:
    return [task for task in plan({LENGTH: attentions}, {LENGTH: ["single"]}, 1) if task.bucket in (1, 6)]


@pytest.mark.long
def test_the_numbers_are_those_of_the_captured_layers(
    tokenizer: Tokenizer, samples: NeedleSamples, tmp_path: Path
) -> None:
    model = needle_llama(tokenizer)
    results = LookupResults({}, SETTINGS)
    tasks = tasks_of(PAPER, TOLERANT, "exact", "moba:L64B16R2")
    measure(model, samples, tasks, results, tmp_path / "lookups.json")
    assert results.layers == [0, 1]
    assert list(results.measured) == tasks
    for task, found in results.measured.items():
        sample = samples.make("single", LENGTH, task.bucket, 0)
        position = len(sample.prompt) - 1
        for layer, inputs in enumerate(capture(model, torch.from_numpy(sample.prompt)[None])):
            with recorded_calls() as calls:
                get_attention(task.attention)(*inputs[:3], is_causal=True, scale=inputs.scale, enable_gqa=True)
            expected = found_weight(calls[0], position, list(sample.questions[0].definition))
            assert found.weight[layer] == pytest.approx(expected.weight[0].tolist(), rel=1e-3)
            assert found.exact[layer] == pytest.approx(expected.exact[0].tolist(), rel=1e-3)
            assert found.found[layer] == pytest.approx(expected.found[0].tolist(), rel=1e-3)
            assert found.pairs[layer] == expected.pairs[0].tolist()
        if task.attention == "exact":
            assert found.found == found.weight
    retrieved = [number for found in results.measured.values() for layer in found.pairs for number in layer]
    assert max(retrieved) > 1
    assert LookupResults.read(tmp_path / "lookups.json").measured == results.measured


# The reports


def hand_made() -> LookupResults:
    """Two samples of two layers with two heads; the first attention finds the needle of the first sample alone."""
    weight = [[0.5, 0.01], [0.2, 0.05]]
    nothing = [[0.0, 0.0], [0.0, 0.0]]
    lookups = {
        NeedleTask(0, LENGTH, "single", 0, PAPER): Found(weight, weight, weight, [[1, 1], [1, 1]]),
        NeedleTask(0, LENGTH, "single", 0, TOLERANT): Found(
            weight, [[0.5, 0.0], [0.08, 0.05]], [[0.5, 0.01], [0.18, 0.05]], [[4, 0], [2, 0]]
        ),
        NeedleTask(0, LENGTH, "single", 1, PAPER): Found(weight, nothing, nothing, [[1, 1], [1, 1]]),
        NeedleTask(0, LENGTH, "single", 1, TOLERANT): Found(weight, weight, weight, [[4, 0], [2, 2]]),
    }
    machine = LookupResults.start(SETTINGS, Path("missing")).machine
    return LookupResults(machine, SETTINGS, ["muse eval needles --lookups"], lookups, [0, 3])


def test_pools_of_known_weights() -> None:
    found = pool(hand_made(), LENGTH, "single", TOLERANT)
    assert found.samples == 2
    assert found.share == pytest.approx((0.5 + 0.13 + 0.76) / (2 * 0.76))
    assert STRONG == 0.1
    assert found.strong_heads == 2
    assert found.strong_heads_found == 1.5, "0.08 of 0.2 is less than half"
    assert found.strong.share == pytest.approx((0.58 + 0.7) / (2 * 0.7))
    assert found.exact_share == pytest.approx((0.74 + 0.76) / (2 * 0.76))
    assert found.strong.exact_share == pytest.approx((0.68 + 0.7) / (2 * 0.7))
    assert found.mean_pairs == pytest.approx(14 / 8)
    assert found.strong.mean_pairs == pytest.approx(3)


def test_tables_by_attention_layer_and_head() -> None:
    results = hand_made()
    summary = summary_table(results)
    assert summary.column("found") == ["50.0%", "91.4%"]
    assert summary.rows[0][:4] == (SHORT_PAPER, "512", "single", "2")
    layers = layer_table(results, LENGTH)
    assert layers.titles == ["layer", "weight", "strong", SHORT_PAPER, SHORT_TOLERANT]
    assert layers.rows[1] == ("3", "0.125", "1.0", "50.0%", "76.0%")
    rows = head_table(results, LENGTH).rows
    assert rows[0] == ("0", "0", "0.500", "50.0%", "100.0%")
    assert [row[:2] for row in rows] == [("0", "0"), ("3", "0"), ("3", "1"), ("0", "1")]
    report = as_markdown(lookup_report(results, "t"))
    assert "## By layer, 512" in report


def test_no_weight_has_no_share() -> None:
    results = hand_made()
    zeros = [[0.0, 0.0], [0.0, 0.0]]
    nothing = {
        task: dataclasses.replace(found, weight=zeros, found=zeros, exact=zeros)
        for task, found in results.measured.items()
    }
    (first, _) = summary_table(dataclasses.replace(results, measured=nothing)).rows
    assert first[4:] == ("", "", "1.00", "0.0", "0.0", "", "", "")
