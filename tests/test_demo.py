"""`muse demo`: all its parts in order, none of them twice, and an interruption in any of them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from muse_attention.cli import commands, demo
from muse_attention.evaluation.comparison.results import ComparisonResults
from muse_attention.pretraining.metrics import read_metrics
from muse_attention.pretraining.recipes import Recipe, override, tiny
from muse_attention.pretraining.schedule import EXACT
from tests.test_prepare import SMALL as SMALL_CORPUS
from tests.test_prepare import as_repositories, contents, sources
from tests.training_runs import SMALL

REAL_RECIPE = demo.demo_recipe


def run(output: Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(commands.app, ["demo", "--device", "cpu", "--output", str(output)])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    """The same parts, with fewer tokens in each."""

    def recipe(name: str) -> Recipe:
        attention = [f"attention={EXACT}"] if name == "exact" else []
        return override(SMALL, ["steps=4", "checkpoint_every=2", *attention])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "standard_library", lambda: as_repositories(sources()))
        patch.setattr(demo, "_CORPUS", SMALL_CORPUS)
        patch.setattr(demo, "_SAMPLES", 2)
        patch.setattr(demo, "demo_recipe", recipe)
        yield


@pytest.fixture(scope="module")
def whole(_small: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo that nothing has disturbed."""
    output = tmp_path_factory.mktemp("whole")
    code, out, err = run(output)
    assert code == 0, err
    (output / "stdout").write_text(out)
    return output


def test_the_demo_prepares_trains_compares_and_names_its_report(whole: Path) -> None:
    lines = (whole / "stdout").read_text().splitlines()
    assert [line[0] for line in lines if line[1:].startswith(" of 4: ")] == ["1", "2", "3", "4"]
    assert lines[-1] == f"the report: {whole / 'compare' / 'compare.html'}"
    assert (whole / "compare" / "compare.html").exists()
    results = ComparisonResults.read(whole / "compare" / "compare.json")
    assert results.commands == ["muse demo --device cpu"]
    assert [run.attention for run in results.runs.values()] == ["exact", "muse:Q4K4R1SP1B16,clustering=lloyd"]
    assert results.attentions == ["exact", "muse:Q4K4R1SP1B16,clustering=lloyd"]
    assert all(results.whole(run, name) for run in results.runs.values() for name in results.attentions)
    assert all(results.steps(run) == [2, 4] for run in results.runs.values())
    first, last = (read_metrics(whole / "muse")[index]["loss"] for index in (0, -1))
    assert last < first - 0.5


def test_what_is_done_is_not_done_again(whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "whole"
    shutil.copytree(whole, output)
    before = contents(output)
    code, out, err = run(output)
    assert code == 0, err
    assert out.count("is there already") == 3
    assert contents(output) == before


def test_a_demo_that_is_interrupted_in_every_part_learns_and_measures_the_same(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    def stop_training(attention: str) -> Any:
        @contextlib.contextmanager
        def progress(recipe: Recipe) -> Iterator[Any]:
            yield lambda step: interrupt() if step.step == 3 and recipe.attention == attention else None

        return progress

    parts = [
        ("prepare", interrupt, 0),
        ("training_progress", stop_training(EXACT), 0),
        ("training_progress", stop_training(SMALL.attention), 1),
        ("compare_runs", interrupt, 2),
    ]
    for part, replacement, finished in parts:
        with monkeypatch.context() as patch:
            patch.setattr(demo, part, replacement)
            code, out, err = run(tmp_path)
        assert code == 130
        again = f"muse demo --device cpu --output {tmp_path}"
        assert err == f"muse: interrupted; what is finished is kept; continue with: {again}\n"
        assert out.count("is there already") == finished
    code, out, err = run(tmp_path)
    assert code == 0, err
    assert out.count("is there already") == 3
    for folder in ("corpus", "exact/model", "muse/model"):
        assert contents(tmp_path / folder) == contents(whole / folder)
    assert (
        ComparisonResults.read(tmp_path / "compare/compare.json").cells
        == ComparisonResults.read(whole / "compare/compare.json").cells
    )


def test_a_corpus_of_another_demo_is_refused_in_one_line(whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "whole"
    shutil.copytree(whole, output)
    manifest = output / "corpus" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("standard library", "other library"))
    code, _, err = run(output)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "is of another corpus than" in err


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ('"muse_attention": "', '"muse_attention": "0.0.', "(muse_attention differ)"),
        ('"fingerprint": "', '"fingerprint": "0', "(fingerprint differ)"),
        ('"cells"', '"sells"', "does not hold the results of muse compare"),
    ],
)
def test_results_of_another_version_say_which_folder_to_remove(
    whole: Path, tmp_path: Path, before: str, after: str, reason: str
) -> None:
    output = tmp_path / "whole"
    shutil.copytree(whole, output)
    path = output / "compare" / "compare.json"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))
    code, _, err = run(output)
    assert code == 2
    (line,) = err.splitlines()
    assert reason in line
    assert line.endswith(f"; remove the folder {output / 'compare'} to measure it anew")
    shutil.rmtree(output / "compare")
    assert run(output)[0] == 0


def test_both_runs_of_the_real_demo_see_the_same_tokens() -> None:
    exact, muse = map(REAL_RECIPE, demo._RUNS)
    assert exact.attention == EXACT
    assert muse.attention == tiny().attention
    assert exact == override(muse, [f"attention={EXACT}"])
