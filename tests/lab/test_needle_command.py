"""`muse eval needles`: what it writes, how it goes on, and one line for mistakes."""

from __future__ import annotations

import functools
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from tokenizers import Tokenizer

from muse_lab.evaluation.gradients import results as gradient_results
from muse_lab.evaluation.gradients.results import GradientResults
from muse_lab.evaluation.lookups import results as lookup_results
from muse_lab.evaluation.lookups.results import LookupResults
from muse_lab.evaluation.needles import results as needle_results
from muse_lab.evaluation.needles.results import MeasuredSamples, NeedleResults
from muse_lab.evaluation.needles.scores import answer
from muse_lab.evaluation.needles.statistics import failures
from muse_lab.pretraining.needles.samples import Sample
from tests.command_line import assert_done, assert_done_quietly, assert_refused, run_muse
from tests.lab.test_prepare import make
from tests.needle_models import write_needle_folder

eval_needles = functools.partial(run_muse, "eval", "needles")
COARSE, SHORT = "muse:Q4K4R1SP1B128,clustering=lloyd", "muse:Q4K4R1SP1B64,clustering=lloyd"


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_needle_folder(tmp_path_factory.mktemp("needles"), tokenizer)


@pytest.fixture(scope="module")
def options(folder: Path) -> list[object]:
    return [
        *(folder / "model", "--text", folder / "texts", "--length", "1k", "--kind", "single,multi-key-2"),
        *("--attention", COARSE, "--samples-per-depth", 1, "--device", "cpu", "--name", "tiny"),
    ]


@pytest.fixture(scope="module")
def measured(folder: Path, options: list[object]) -> Path:
    out = assert_done(eval_needles(*options, "--output", folder / "out"))
    assert "exact" in out
    return folder / "out"


@pytest.mark.long
def test_the_command_writes_tables_pictures_and_a_page(measured: Path) -> None:
    endings = {"tiny.json", "tiny.md", "tiny.html"}
    endings |= {f"tiny-{measure}-{place}.png" for measure in ("exact-match", "right-of-8") for place in (1, 2)}
    assert {file.name for file in measured.iterdir()} == endings
    results = NeedleResults.read(measured / "tiny.json")
    assert len(results.measured) == 2 * 9 * 2
    assert failures(results) == []
    page = (measured / "tiny.html").read_text()
    assert page.count("data:image/png") == 4
    assert 'src="http' not in page
    (spelled,) = results.commands
    assert spelled.startswith(
        f"muse eval needles model --text texts --length 1k --kind single,multi-key-2 --attention {COARSE}"
    )
    document = json.loads((measured / "tiny.json").read_text())
    assert list(document["attentions"]) == ["exact", COARSE]
    assert document["attentions"][COARSE]["block_size"] == 128


@pytest.mark.long
def test_results_are_continued_and_extended(
    measured: Path, options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(measured, tmp_path / "out")
    path = tmp_path / "out" / "tiny.json"
    before = NeedleResults.read(path)
    monkeypatch.setattr("muse_lab.cli.app.LONG_RUN_SECONDS", -1.0)
    code, _, err = eval_needles(*options, "--attention", "block_diagonal:256", "--output", tmp_path / "out")
    assert code == 0, err
    assert ": 1 of 18, ETA 0:00:0" in err, "there is no terminal"
    after = NeedleResults.read(path)
    assert {task: after.measured[task] for task in before.measured} == before.measured
    assert len(after.measured) == 3 * 9 * 2
    assert len(after.commands) == 2
    assert_refused(
        eval_needles(*options, "--seed", 1, "--output", tmp_path / "out"),
        f"{path} has other results: seed was 0, now 1; choose another --name or --output, or",
    )
    assert NeedleResults.read(path) == after


@pytest.mark.long
def test_results_of_another_haystack_are_not_continued(
    folder: Path, measured: Path, options: list[object], tmp_path: Path
) -> None:
    shutil.copytree(measured, tmp_path / "out")
    shutil.copytree(folder / "texts", tmp_path / "texts")
    arguments = [tmp_path / "texts" if option == folder / "texts" else option for option in options]
    assert eval_needles(*arguments, "--output", tmp_path / "out")[0] == 0
    last = sorted((tmp_path / "texts").rglob("*.py"))[-1]
    last.write_text(last.read_text()[:-1] + "?")
    refused = "tiny.json has other results: fingerprint was "
    assert_refused(eval_needles(*arguments, "--output", tmp_path / "out"), refused)


@pytest.mark.long
def test_kinds_without_room_are_left_out(options: list[object], tmp_path: Path) -> None:
    changed = ["single,multi-query-4" if option == "single,multi-key-2" else option for option in options]
    code, _, err = eval_needles(*changed, "--output", tmp_path, "--length", "640")
    assert code == 0
    assert re.search(r"^muse: left out: multi-query-4 at 640, which needs \d{3} tokens$", err, re.MULTILINE)
    results = NeedleResults.read(tmp_path / "tiny.json")
    found = {(task.length, task.kind) for task in results.measured}
    assert found == {(640, "single"), (1024, "single"), (1024, "multi-query-4")}


@pytest.mark.long
def test_failures_are_counted_and_the_rest_is_reported(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: Any, words: Any, sample: Sample, attention: str) -> Any:
        if attention == COARSE:
            raise RuntimeError("no luck")
        return answer(model, words, sample, attention)

    monkeypatch.setattr(needle_results, "answer", fail)
    code, _, err = eval_needles(*options, "--output", tmp_path)
    assert code == 1
    assert "18 samples failed" in err
    assert err.rstrip().endswith(f"--output {tmp_path}")
    assert "RuntimeError: no luck" in (tmp_path / "tiny.html").read_text()
    code, _, _ = eval_needles(*options, "--output", tmp_path)
    assert code == 1, "what is asked for has failed again"
    monkeypatch.setattr(needle_results, "answer", lambda *given: 1 / 0)
    assert_refused(eval_needles(*options, "--output", tmp_path, "--overwrite"), "36 samples failed", code=1)


# What is measured beside answers


@dataclass(frozen=True)
class Beside:
    """What the command measures with another option."""

    option: str
    results: type[MeasuredSamples]
    module: ModuleType
    measured_by: str
    """a function of the module"""
    title: str
    """in the list of reports"""
    in_report: str

    @property
    def file(self) -> str:
        return f"tiny-{self.option}.json"


BESIDE = (
    Beside("lookups", LookupResults, lookup_results, "look_up", "Lookups", "strong heads"),
    Beside("gradients", GradientResults, gradient_results, "differentiate", "Gradients of lookups", "answers, and"),
)


@pytest.fixture(scope="module", params=BESIDE, ids=lambda beside: beside.option)
def beside(request: pytest.FixtureRequest) -> Beside:
    found: Beside = request.param
    return found


@pytest.fixture(scope="module")
def beside_options(folder: Path, beside: Beside) -> list[object]:
    return [
        *(folder / "model", "--text", folder / "texts", "--length", "512", "--kind", "single", f"--{beside.option}"),
        *("--attention", SHORT, "--samples-per-depth", 1, "--device", "cpu", "--name", "tiny"),
    ]


@pytest.fixture(scope="module")
def measured_beside(folder: Path, beside: Beside, beside_options: list[object]) -> Path:
    output = folder / beside.option
    out = assert_done_quietly(eval_needles(*beside_options, "--output", output))
    assert "Q4K4R1SP1B64" in out, "a terminal has room for the name"
    return output


def test_what_is_measured_beside_answers_is_written_and_reported_anew(
    beside: Beside, measured_beside: Path, tmp_path: Path
) -> None:
    files = {f"tiny-{beside.option}.{ending}" for ending in ("json", "md", "html")}
    assert {file.name for file in measured_beside.iterdir()} == files
    results = beside.results.read(measured_beside / beside.file)
    assert len(results.measured) == 9, "nothing is asked of exact attention"
    (spelled,) = results.commands
    assert f"--samples-per-depth 1 --{beside.option} --seed 0" in spelled
    document = json.loads((measured_beside / beside.file).read_text())
    assert {config["block_size"] for config in document["attentions"].values()} == {64}
    assert beside.in_report in (measured_beside / beside.file).with_suffix(".md").read_text()
    shutil.copy(measured_beside / beside.file, tmp_path)
    assert run_muse("report", tmp_path)[0] == 0
    for name in files:
        assert (tmp_path / name).read_text() == (measured_beside / name).read_text()
    assert beside.title in (tmp_path / "index.html").read_text()


@pytest.mark.long
def test_what_is_measured_beside_answers_goes_on_after_an_interruption(
    beside: Beside, beside_options: list[object], measured_beside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(beside.module, beside.measured_by)
    interrupted = Mock(wraps=original, side_effect=[*[DEFAULT] * 3, KeyboardInterrupt])
    monkeypatch.setattr(beside.module, beside.measured_by, interrupted)
    code, _, err = eval_needles(*beside_options, "--output", tmp_path)
    assert code == 130
    assert f"what is finished is in {tmp_path / beside.file}; continue with: muse eval needles" in err
    assert f"--{beside.option}" in err
    assert len(beside.results.read(tmp_path / beside.file).measured) == 1
    monkeypatch.undo()
    assert eval_needles(*beside_options, "--output", tmp_path)[0] == 0
    whole = beside.results.read(measured_beside / beside.file)
    assert beside.results.read(tmp_path / beside.file).measured == whole.measured
    assert_done_quietly(eval_needles(*beside_options, "--attention", COARSE, "--output", tmp_path))
    extended = beside.results.read(tmp_path / beside.file).measured
    assert {task: extended[task] for task in whole.measured} == whole.measured
    assert len(extended) == 2 * 9


# Mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--kind", "triple"], "unknown kind 'triple'; use one of single"),
        (["--length", "far"], "cannot read the size 'far'"),
        (["--length", "4k"], "the model's context is 2048 tokens, less than 4096"),
        (["--attention", "sparse"], "unknown attention 'sparse'"),
        (["--samples-per-depth", "0"], "--samples-per-depth 0 measures nothing"),
        (["--corpus", "nowhere"], "a haystack is either a corpus or texts"),
        (["--name", "a/b"], "must be a plain file name"),
        (["--lookups", "--gradients"], "measure different things; ask for one, then for the other"),
    ],
)
def test_mistakes(options: list[object], changes: list[str], message: str, tmp_path: Path) -> None:
    assert_refused(eval_needles(*options, "--output", tmp_path / "out", *changes), message)
    assert not (tmp_path / "out").exists()


def test_samples_that_are_too_short_are_refused(options: list[object], tmp_path: Path) -> None:
    assert_refused(
        eval_needles(*("64" if option == "1k" else option for option in options), "--output", tmp_path / "out"),
        "a tenth of 64 tokens has no room for the needles of single",
    )
    assert not (tmp_path / "out").exists()


def test_a_corpus_must_have_the_tokenizer_of_the_model(folder: Path, tmp_path: Path) -> None:
    assert_refused(
        eval_needles(folder / "model", "--corpus", tmp_path / "none", "--device", "cpu", "--length", "1k"),
        "there is no corpus in",
    )
    make(tmp_path / "corpus")
    assert_refused(
        eval_needles(folder / "model", "--corpus", tmp_path / "corpus", "--device", "cpu", "--length", "1k"),
        "the model has another tokenizer than the corpus",
    )
