"""Evaluations on the way in `muse compare`: what runs have learnt, under exact attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muse_lab.evaluation.comparison.comparison_report import comparison_report
from muse_lab.evaluation.comparison.evaluations import evaluations_tables
from muse_lab.evaluation.comparison.results import ComparisonResults
from muse_lab.report.markdown import as_markdown
from tests.compared_runs import MUSE, trained
from tests.training_runs import metrics_line


def evaluated(update: int, attention: str, **values: float) -> dict[str, Any]:
    return metrics_line(10_000 * update, 5.0, 100.0, attention, evaluation=values)


def two_runs() -> ComparisonResults:
    exact = [evaluated(n, "exact", held_out_loss=3.0, needles_loss=2.0 / 4**n, needles_right=n / 10) for n in (1, 2, 3)]
    own = {"held_out_loss": 9.0, "needles_loss": 9.0, "needles_right": 0.0}
    muse = [
        evaluated(n, MUSE, **own, held_out_loss_exact=2.5, needles_loss_exact=1.0 / 4**n, needles_right_exact=n / 20)
        for n in (1, 2)
    ]
    return trained(exact=exact, muse=muse)


def test_evaluations_are_those_under_exact_attention_whatever_the_run_was_trained_with(tmp_path: Path) -> None:
    results = two_runs()
    held_out, answers, right = evaluations_tables(results)
    assert held_out.titles == answers.titles == right.titles == ["run", "1.0", "2.0", "3.0"]
    assert right.rows == [("exact", "10.0%", "20.0%", "30.0%"), ("muse", "5.0%", "10.0%", "")]
    assert held_out.rows[1] == ("muse", "2.5000", "2.5000", "")
    assert answers.rows == [("exact", "0.5000", "0.1250", "0.0312"), ("muse", "0.2500", "0.0625", "")]
    assert "## Evaluated on the way" in as_markdown(comparison_report(results))
    path = tmp_path / "compare.json"
    results.write(path)
    assert ComparisonResults.read(path) == results


def test_a_run_that_was_not_evaluated_has_no_such_section() -> None:
    results = trained(exact=[metrics_line(1, 5.0, 100.0, "exact")])
    assert list(evaluations_tables(results)) == []
    assert "Evaluated on the way" not in as_markdown(comparison_report(results))


def test_the_last_evaluation_of_each_run_is_shown() -> None:
    long = [evaluated(n, "exact", held_out_loss=3.0) for n in range(1, 41)]
    short = [evaluated(n, MUSE, held_out_loss_exact=2.0) for n in range(1, 12)]
    (table,) = evaluations_tables(trained(exact=long, muse=short))
    assert table.column("11.0") == ["3.0000", "2.0000"]
    assert len(table.titles) == 1 + 6 + 1
