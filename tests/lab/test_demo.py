"""`muse demo`: all its parts in order, none of them twice, and an interruption in any of them."""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from muse_lab.benchmark.results import BenchmarkResults
from muse_lab.benchmark.tables import format_error, format_ratio, format_seconds
from muse_lab.cli import demo
from muse_lab.cli.demo_report import demo_report
from muse_lab.evaluation.comparison.results import ComparisonResults
from muse_lab.pretraining.monitoring.metrics import read_metrics
from muse_lab.pretraining.recipes import Recipe, override, tiny
from muse_lab.records.attention_names import EXACT
from tests.command_line import assert_done, run_muse
from tests.lab.test_prepare import SMALL as SMALL_CORPUS
from tests.lab.test_prepare import as_repositories, contents, sources
from tests.training_runs import SMALL

REAL_RECIPE = demo.demo_recipe


def run(output: Path, *options: str) -> tuple[int, str, str]:
    return run_muse("demo", "--device", "cpu", "--output", output, *options)


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    """The same parts, with fewer tokens in each."""

    def recipe(name: str) -> Recipe:
        attention = [f"attention={EXACT}"] if name == "exact" else []
        return override(SMALL, ["steps=8", "checkpoint_every=4", *attention])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "standard_library", lambda: as_repositories(sources()))
        patch.setattr(demo, "_CORPUS", SMALL_CORPUS)
        patch.setattr(demo, "_SAMPLES", 2)
        patch.setattr(demo, "_LENGTH", 600)
        patch.setattr(demo, "_REPEATS", 1)
        patch.setattr(demo, "demo_recipe", recipe)
        yield


@pytest.fixture(scope="module")
def whole(_small: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo that nothing has disturbed."""
    output = tmp_path_factory.mktemp("whole")
    out = assert_done(run(output))
    (output / "stdout").write_text(out)
    return output


@pytest.mark.long
def test_the_demo_says_how_long_it_takes_before_it_begins(whole: Path) -> None:
    lines = (whole / "stdout").read_text().splitlines()
    assert lines[1] == "This takes about 5 minutes on two idle CPU cores, and longer on a busy machine."
    assert lines[2] == "1 of 5: one causal attention call on 600 tokens, 2 heads, forward and backward"


def test_the_demo_shows_the_long_call(whole: Path) -> None:
    lines = (whole / "stdout").read_text().splitlines()
    cases = {case.request.attention: case for case in BenchmarkResults.read(whole / "attention.json").cases}
    for name, label in (("muse", "MuSe, default"), ("moba", "MoBA")):
        (row,) = [line for line in lines if line.strip().startswith(label)]
        assert format_ratio(cases[name].speedup_forward_backward) in row
        error = cases[name].fidelity["relative_squared_error"]
        assert row.split()[-2:] == [format_error(error), f"{math.sqrt(error):.0%}"]


def test_the_report_opens_with_the_long_call(whole: Path) -> None:
    """Time, speed-up and error; an RSE is the square of a distance."""
    results = BenchmarkResults.read(whole / "attention.json")
    # With a known error: that of 600 tokens is 0.
    (muse,) = [case for case in results.cases if case.request.attention == "muse"]
    muse.fidelity["relative_squared_error"] = 0.048
    report = demo_report(results, ComparisonResults.read(whole / "compare" / "compare.json"), "compare.html")
    assert report.headline == (
        "One causal call on 600 tokens, 2 heads, forward and backward: exact attention took "
        f"{format_seconds(muse.sdpa_times.forward_backward_median)}, MuSe "
        f"{format_seconds(muse.times.forward_backward_median)}. "
        f"MuSe is {format_ratio(muse.speedup_forward_backward)} as fast. "
        "Its RSE is 0.048, a distance of 22% from the exact output."
    )
    assert [card.label for card in report.cards] == ["time of one call", "speed-up of one call", "error (RSE)"]
    assert report.sections[0].title == "One long call"
    written = (whole / "demo.html").read_text()
    assert written.index("One causal call on 600 tokens") < written.index("A tiny model trained with MuSe")


def test_the_demo_says_what_it_shows_and_what_not(whole: Path) -> None:
    call, shown, slower, not_shown = (whole / "stdout").read_text().splitlines()[-5:-1]
    results = ComparisonResults.read(whole / "compare" / "compare.json")
    losses = [statistics.fmean(cell.means) for run in results.runs.values() if (cell := results.whole(run, EXACT))]
    assert call.startswith("One causal call on 600 tokens, 2 heads, forward and backward: exact attention took ")
    assert f"a held-out loss of {losses[1]:.3f} under exact attention" in shown
    assert f"with exact attention throughout it reached {losses[0]:.3f}" in shown
    speeds = [run.curves.speeds[run.attention].tokens_per_second for run in results.runs.values()]
    assert slower.startswith(f"MuSe trained at {format_ratio(speeds[1] / speeds[0])} the speed of exact attention")
    assert "the tiny model reads only 64 tokens at a time" in slower
    assert not_shown.startswith("What this does not show: the end of training.")


def test_the_demo_prepares_trains_compares_and_names_its_report(whole: Path) -> None:
    lines = (whole / "stdout").read_text().splitlines()
    assert [line[0] for line in lines if line[1:].startswith(" of 5: ")] == ["1", "2", "3", "4", "5"]
    assert lines[-1] == f"the report: {whole / 'demo.html'}"
    assert 'href="compare/compare.html"' in (whole / "demo.html").read_text()
    assert (whole / "compare" / "compare.html").exists()
    results = ComparisonResults.read(whole / "compare" / "compare.json")
    assert results.commands == ["muse demo --device cpu"]
    assert [run.attention for run in results.runs.values()] == ["exact", "muse:Q4K4R1SP1B16,clustering=lloyd"]
    assert results.attentions == ["exact", "muse:Q4K4R1SP1B16,clustering=lloyd"]
    assert all(results.whole(run, name) for run in results.runs.values() for name in results.attentions)
    assert all(results.steps(run) == [4, 8] for run in results.runs.values())
    first, last = (read_metrics(whole / "muse")[index]["loss"] for index in (0, -1))
    assert last < first - 0.5


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """Of this demo, to be changed."""
    shutil.copytree(whole, tmp_path / "whole")
    return tmp_path / "whole"


@pytest.mark.long
def test_what_is_done_is_not_done_again(copy: Path) -> None:
    before = contents(copy)
    out = assert_done(run(copy))
    assert out.count("is there already") == 4
    assert contents(copy) == before


@pytest.mark.long
def test_a_demo_that_is_interrupted_in_every_part_learns_and_measures_the_same(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = Mock(side_effect=KeyboardInterrupt)

    def stop_training(attention: str) -> Any:
        @contextlib.contextmanager
        def progress(recipe: Recipe) -> Iterator[Any]:
            yield lambda step: interrupt() if step.step == 5 and recipe.attention == attention else None

        return progress

    parts = [
        ("run_plan", interrupt, 0),
        ("prepare", interrupt, 0),
        ("training_progress", stop_training(EXACT), 1),
        ("training_progress", stop_training(SMALL.attention), 2),
        ("compare_runs", interrupt, 3),
    ]
    for part, replacement, finished in parts:
        with monkeypatch.context() as patch:
            patch.setattr(demo, part, replacement)
            code, out, err = run(tmp_path)
        assert code == 130
        again = f"muse demo --device cpu --output {tmp_path}"
        assert err.splitlines()[-1] == f"muse: interrupted; what is finished is kept; continue with: {again}"
        assert out.count("is there already") == finished
    out = assert_done(run(tmp_path))
    assert out.count("is there already") == 4
    for folder in ("corpus", "exact/model", "muse/model"):
        assert contents(tmp_path / folder) == contents(whole / folder)
    assert (
        ComparisonResults.read(tmp_path / "compare/compare.json").cells
        == ComparisonResults.read(whole / "compare/compare.json").cells
    )


@pytest.mark.parametrize(
    ("file", "before", "after", "reason"),
    [
        ("corpus/manifest.json", "standard library", "other library", "other library, now "),
        ("exact/run.json", '"corpus": "', '"corpus": "0', "corpus was 0"),
        ("muse/run.json", '"steps": 8', '"steps": 9', "steps was 9, now 8"),
        ("attention.json", '"repeats":1', '"repeats":2', "repeats was 2, now 1"),
        ("compare/compare.json", '"fingerprint":"', '"fingerprint":"0', "fingerprint"),
        ("compare/compare.json", '"cells"', '"sells"', "does not hold the results of muse compare"),
    ],
)
def test_what_another_demo_left_is_refused_in_one_line(
    copy: Path, file: str, before: str, after: str, reason: str
) -> None:
    path = copy / file
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))
    code, _, err = run(copy)
    assert code == 2
    (line,) = err.splitlines()
    assert path.name in line
    assert reason in line
    assert line.endswith("; choose another --output, or replace it with --overwrite")


@pytest.mark.long
def test_a_demo_is_overwritten_on_request(whole: Path, copy: Path) -> None:
    for file in ("attention.json", "compare/compare.json", "exact/run.json"):
        (copy / file).write_text("{}")
    out = assert_done(run(copy, "--overwrite"))
    assert "is there already" not in out
    for folder in ("corpus", "exact/model", "muse/model"):
        assert contents(copy / folder) == contents(whole / folder)


def test_both_runs_of_the_real_demo_see_the_same_tokens() -> None:
    exact, muse = map(REAL_RECIPE, demo._RUNS)
    assert exact.attention == EXACT
    assert muse.attention == tiny().attention
    assert exact == override(muse, [f"attention={EXACT}"])
