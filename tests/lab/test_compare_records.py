"""`muse compare --samples 0`: runs whose weights are gone, by what they recorded while they trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from muse_lab.evaluation.comparison.results import ComparisonResults
from muse_lab.evaluation.comparison.runs import load_weights, open_runs
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.records.machine import cpu_name
from tests.command_line import assert_done, assert_refused, run_muse
from tests.lab.test_compare import run_command


def read_run(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return document


@pytest.mark.long
def test_runs_whose_weights_are_gone_are_compared_by_what_they_recorded(
    corpus: Corpus, trained: Path, copies: Path, tmp_path: Path
) -> None:
    for name in ("exact", "muse"):
        shutil.rmtree(copies / name / "model")
        shutil.rmtree(copies / name / "checkpoints")
    metrics = copies / "muse" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:4]))
    output = tmp_path / "out"
    asked = (copies / "exact", copies / "muse", "--corpus", corpus.folder, "--output", output, "--samples", 0)
    out = assert_done(run_command(*asked))
    assert "No loss was measured for this report" in out
    assert "muse has metrics that end with update 4 of 6." in out
    assert {read_run(copies / name)["hardware"] for name in ("exact", "muse")} == {cpu_name()}
    report, stored = (output / "compare.md").read_text(), (output / "compare.json").read_text()
    for heading in ("Training attention against test attention", "Loss by position", "Scaling law"):
        assert heading not in report
    assert (output / "compare-training.png").exists()
    results = ComparisonResults.read(output / "compare.json")
    with_weights = open_runs([trained / "exact"], corpus)[0]
    assert results.runs["exact"].parameters == load_weights(with_weights, 6, corpus, "cpu").num_parameters()
    assert (results.runs["exact"].step, results.runs["muse"].step) == (6, 4)

    assert run_command(*asked, "--dtype", "bfloat16")[0] == 0, "a precision that nothing is measured in"
    assert run_command(*asked)[0] == 0
    assert len(ComparisonResults.read(output / "compare.json").commands) == 2
    (output / "compare.json").write_text(stored)
    (output / "compare.md").unlink()
    assert run_muse("report", output)[0] == 0
    assert (output / "compare.md").read_text() == report
    assert_refused(run_command(*asked[:-1], 1), "has neither a model nor a checkpoint yet")
    assert_refused(run_command(trained / "exact", *asked[2:-1], 1), "samples was 0, now 1")


@pytest.mark.long
def test_runs_of_two_lengths_and_skipped_updates_are_compared_by_what_they_recorded(
    corpus: Corpus, copies: Path, tmp_path: Path
) -> None:
    path, metrics = copies / "muse" / "run.json", copies / "muse" / "metrics.jsonl"
    document = read_run(copies / "muse")
    path.write_text(json.dumps(document | {"recipe": document["recipe"] | {"length": 32}, "hardware": "an abacus"}))
    other = read_run(copies / "exact") | {"hardware": "a slide rule"}
    (copies / "exact" / "run.json").write_text(json.dumps(other))
    *lines, last = metrics.read_text().splitlines()
    skipped = {name: value for name, value in json.loads(last).items() if name != "loss"} | {"skipped": "loss"}
    metrics.write_text("\n".join([*lines, json.dumps(skipped)]) + "\n")
    asked = ("--corpus", corpus.folder, "--output", tmp_path / "out", "--samples", 0)
    out = assert_done(run_command(copies / "exact", copies / "muse", *asked))
    assert "metrics that end" not in out
    results = ComparisonResults.read(tmp_path / "out" / "compare.json")
    assert [(run.recipe.length, run.step) for run in results.runs.values()] == [(64, 6), (32, 6)]
    report = tmp_path / "out" / "compare.md"
    assert "wrote this report; the runs were trained on a slide rule, an abacus." in report.read_text()
    (copies / "exact" / "run.json").write_text(json.dumps(other | {"hardware": None}))
    assert_done(run_command(copies / "exact", copies / "muse", *asked))
    assert "wrote this report; the runs may have been trained on another." in report.read_text()

    (copies / "again").mkdir()
    shutil.copytree(copies / "muse", copies / "again" / "exact")
    assert_refused(run_command(copies / "again" / "exact", *asked), "has another run called exact; choose another")
    metrics.unlink()
    assert_refused(run_command(copies / "muse", *asked), "metrics.jsonl has no update; leave the run out")
