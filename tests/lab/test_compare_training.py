"""`muse compare` on how runs train: loss by position under both attentions, and runs that were continued."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from muse_lab.evaluation.comparison.comparison_report import comparison_report, warnings
from muse_lab.evaluation.comparison.findings import sizes
from muse_lab.evaluation.comparison.further import further_points, further_table
from muse_lab.evaluation.comparison.matrix import measure
from muse_lab.evaluation.comparison.positions import history_figures, losses_by_position, own_attention_tables
from muse_lab.evaluation.comparison.results import ComparisonResults
from muse_lab.evaluation.comparison.runs import open_runs
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.run.continuing import further_recipe
from muse_lab.pretraining.training import train
from muse_lab.records.machine import describe_machine
from muse_lab.report.markdown import as_markdown
from tests.lab.test_compare import MUSE, settings_of


@pytest.fixture(scope="module")
def compared(corpus: Corpus, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> ComparisonResults:
    """An exact run, a MuSe run of six updates, and that one after one and three further updates, which are exact."""
    folder = tmp_path_factory.mktemp("runs")
    exact, muse, one, three = trained / "exact", trained / "muse", folder / "one", folder / "three"
    train(corpus, further_recipe(muse, ["attention=exact", "steps=1"]), one, continue_from=muse)
    train(corpus, further_recipe(one, ["steps=2", "checkpoint_every=100"]), three, continue_from=one)
    results = ComparisonResults(describe_machine(), settings_of(corpus))
    runs = open_runs([exact, muse, one, three], corpus)
    measure(runs, corpus, ["exact", MUSE], results, folder / "compare.json", checkpoints=2)
    return results


@pytest.mark.long
def test_a_continued_run_is_told_by_its_further_tokens(compared: ComparisonResults) -> None:
    points = further_points(compared)
    assert [(point.run.name, point.step, point.attention) for point in points] == [
        ("muse", 6, "exact"),
        ("one", 7, "exact"),
        ("three", 9, "exact"),
    ]
    rows = further_table(compared).rows
    assert [row[:3] for row in rows] == [("muse", "0", "0%"), ("one", "128", "17%"), ("three", "384", "50%")]
    assert all(cell for row in rows for cell in row), "every loss, and each difference to exact training"
    text = as_markdown(comparison_report(compared))
    assert "## Further training" in text
    assert "Table 33" in text
    assert ", then exact for 3 further updates" in text
    assert any("three differs from exact by more than its attention: tokens" in line for line in warnings(compared))


@pytest.mark.long
def test_a_continued_run_stands_for_its_size_where_the_finished_one_is_missing(compared: ComparisonResults) -> None:
    attention = compared.runs["muse"].attention
    assert len(sizes(compared)[attention]) == 1
    without = dataclasses.replace(compared, runs=dict(compared.runs))
    del without.runs["muse"], without.runs["one"]
    assert len(sizes(without)[attention]) == 1
    assert sizes(without) != sizes(compared)


def test_checkpoints_are_measured_under_both_attentions(compared: ComparisonResults) -> None:
    """The first block of 16 is exact, up to rounding; beyond it the two attentions differ, at every checkpoint."""
    run = compared.runs["muse"]
    steps = compared.steps(run)
    assert steps == [2, 4, 6]
    for step in steps:
        exact, own = losses_by_position(compared, run, step), losses_by_position(compared, run, step, MUSE)
        assert [last for last, _ in own] == [1, 3, 7, 15, 31, 64]
        assert [loss for _, loss in own[:4]] == pytest.approx([loss for _, loss in exact[:4]], abs=1e-5)
        assert own[-1][1] != pytest.approx(exact[-1][1], abs=1e-7)
    (table,) = [table for table in own_attention_tables(compared) if table.title.startswith("muse:")]
    assert list(table.titles) == ["positions", "2 updates", "4 updates", "6 updates"]
    assert [row[0] for row in table.rows] == ["1", "2 to 3", "4 to 7", "8 to 15", "16 to 31", "32 to 64"]


def test_pictures_by_position_have_both_attentions_and_the_block(compared: ComparisonResults) -> None:
    figures = history_figures(compared)
    assert [figure.name for figure in figures] == [f"positions-{place}" for place in (1, 2, 3, 4)]
    for figure in figures[:2]:
        assert figure.draw().startswith(b"\x89PNG")
