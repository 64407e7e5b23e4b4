"""`muse eval needles --lookups`: what it measures, what it writes, how it goes on, and one line for mistakes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from typer.testing import CliRunner

from muse_attention import get_attention
from muse_attention.core.recording import recorded_calls
from muse_attention.fidelity.lookups import found_weight, look_up
from muse_attention.huggingface.capture import capture
from muse_lab.cli import commands
from muse_lab.evaluation.lookups import results as lookup_results
from muse_lab.evaluation.lookups.lookup_report import (
    STRONG,
    as_csv,
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
from tests.needle_models import eval_needles, needle_llama, write_needle_folder

LENGTH = 512
PAPER, TOLERANT = "muse:Q4K4R1SP1B64,clustering=lloyd", "muse:Q4K8R4T0.001B64,clustering=lloyd"
SHORT_PAPER, SHORT_TOLERANT = "Q4K4R1SP1B64", "Q4K8R4T0.001B64"
SETTINGS = NeedleSettings("tiny", "made up", 0, "cpu", "float32")


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_needle_folder(tmp_path_factory.mktemp("lookups"), tokenizer)


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
    assert list(results.lookups) == tasks
    for task, found in results.lookups.items():
        sample = samples.make("single", LENGTH, task.bucket, 0)
        position = len(sample.prompt) - 1
        for layer, inputs in enumerate(capture(model, torch.from_numpy(sample.prompt)[None])):
            with recorded_calls() as calls:
                get_attention(task.attention)(*inputs[:3], is_causal=True, scale=inputs.scale, enable_gqa=True)
            expected = found_weight(
                inputs.query, inputs.key, calls[0].clusters, calls[0].selection, calls[0].config, position,
                list(sample.questions[0].definition), scale=inputs.scale,
            )  # fmt: skip
            assert found.weight[layer] == pytest.approx(expected.weight[0].tolist(), rel=1e-3)
            assert found.exact[layer] == pytest.approx(expected.exact[0].tolist(), rel=1e-3)
            assert found.found[layer] == pytest.approx(expected.found[0].tolist(), rel=1e-3)
            assert found.pairs[layer] == expected.pairs[0].tolist()
        if task.attention == "exact":
            assert found.found == found.weight
    retrieved = [number for found in results.lookups.values() for layer in found.pairs for number in layer]
    assert max(retrieved) > 1
    assert LookupResults.read(tmp_path / "lookups.json").lookups == results.lookups


def test_an_interrupted_run_goes_on_to_the_same_results(
    tokenizer: Tokenizer, samples: NeedleSamples, tmp_path: Path
) -> None:
    model, tasks = needle_llama(tokenizer), tasks_of(PAPER, TOLERANT)
    whole = LookupResults({}, SETTINGS)
    measure(model, samples, tasks, whole, tmp_path / "whole.json")
    path = tmp_path / "lookups.json"

    def interrupt(description: str, finished: int) -> None:
        if finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(model, samples, tasks, LookupResults.start(SETTINGS, path), path, on_step=interrupt)
    results = LookupResults.start(SETTINGS, path)
    assert results.missing(tasks) == tasks[2:], "both attentions of the first sample are there"
    measure(model, samples, tasks, results, path)
    assert LookupResults.read(path).lookups == whole.lookups


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
    return LookupResults(machine, SETTINGS, ["muse eval needles --lookups"], [0, 3], lookups)


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
    lines = as_csv(results).splitlines()
    assert len(lines) == 1 + 2 * 2 * 2
    assert lines[1] == f'"{PAPER}",512,single,0,0,2,0.5,0.25,0.25,1'


def test_no_weight_has_no_share() -> None:
    results = hand_made()
    zeros = [[0.0, 0.0], [0.0, 0.0]]
    nothing = {
        task: dataclasses.replace(found, weight=zeros, found=zeros, exact=zeros)
        for task, found in results.lookups.items()
    }
    (first, _) = summary_table(dataclasses.replace(results, lookups=nothing)).rows
    assert first[4:] == ("", "", "1.00", "0.0", "0.0", "", "", "")


# The command


@pytest.fixture(scope="module")
def options(folder: Path) -> list[object]:
    return [
        *(folder / "model", "--text", folder / "texts", "--length", "512", "--kind", "single", "--lookups"),
        *("--attention", PAPER, "--samples-per-depth", 1, "--device", "cpu", "--name", "tiny"),
    ]


@pytest.fixture(scope="module")
def measured(folder: Path, options: list[object]) -> Path:
    code, out, err = eval_needles(*options, "--output", folder / "out")
    assert (code, err) == (0, "")
    assert "found" in out
    assert SHORT_PAPER in out, "a terminal has room for the name"
    return folder / "out"


def test_the_command_writes_tables_and_a_page(measured: Path) -> None:
    assert {file.name for file in measured.iterdir()} == {
        f"tiny-lookups.{end}" for end in ("json", "md", "csv", "html")
    }
    results = LookupResults.read(measured / "tiny-lookups.json")
    assert len(results.lookups) == 9, "nothing is asked of exact attention"
    (spelled,) = results.commands
    assert "--samples-per-depth 1 --lookups --seed 0" in spelled
    assert PAPER in (measured / "tiny-lookups.html").read_text()
    document = json.loads((measured / "tiny-lookups.json").read_text())
    assert {config["block_size"] for config in document["attentions"].values()} == {64}


@pytest.mark.long
def test_results_are_extended(measured: Path, options: list[object], tmp_path: Path) -> None:
    shutil.copytree(measured, tmp_path / "out")
    path = tmp_path / "out" / "tiny-lookups.json"
    before = LookupResults.read(path)
    code, _, err = eval_needles(*options, "--attention", TOLERANT, "--output", tmp_path / "out")
    assert (code, err) == (0, "")
    after = LookupResults.read(path)
    assert {task: after.lookups[task] for task in before.lookups} == before.lookups
    assert len(after.lookups) == 2 * 9
    code, _, err = eval_needles(*options, "--seed", 1, "--output", tmp_path / "out")
    assert code == 2
    assert f"{path} has other results: seed was 0, now 1; choose another --name or --output, or" in err


def test_an_interruption_says_how_to_go_on(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def interrupted(*given: Any, **others: Any) -> Any:
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return look_up(*given, **others)

    monkeypatch.setattr(lookup_results, "look_up", interrupted)
    code, _, err = eval_needles(*options, "--output", tmp_path)
    assert code == 130
    assert f"what is finished is in {tmp_path / 'tiny-lookups.json'}; continue with: muse eval needles" in err
    assert "--lookups" in err
    assert "--resume" not in err
    assert len(LookupResults.read(tmp_path / "tiny-lookups.json").lookups) == 1


def test_muse_report_writes_the_reports_anew(measured: Path, tmp_path: Path) -> None:
    shutil.copy(measured / "tiny-lookups.json", tmp_path)
    result = CliRunner().invoke(commands.app, ["report", str(tmp_path)])
    assert result.exit_code == 0
    for ending in ("md", "csv", "html"):
        name = f"tiny-lookups.{ending}"
        assert (tmp_path / name).read_text() == (measured / name).read_text()
    assert "Lookups" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize("content", ["{", "[]", '{"lookups": 1}'])
def test_a_file_that_holds_something_else_is_refused(content: str, options: list[object], tmp_path: Path) -> None:
    (tmp_path / "tiny-lookups.json").write_text(content)
    code, _, err = eval_needles(*options, "--output", tmp_path)
    assert code == 2
    assert "does not hold the results of muse eval needles --lookups" in err
    assert len(err.splitlines()) == 1
