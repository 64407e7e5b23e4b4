"""Answers to needles in `muse compare`: what runs learn to look up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muse_lab.cli.measuring import write
from muse_lab.evaluation.comparison.answers import answers_section, answers_table, kind_table
from muse_lab.evaluation.comparison.comparison_report import comparison_report
from muse_lab.evaluation.comparison.results import ComparisonResults
from muse_lab.records.attention_names import short_names
from muse_lab.report.markdown import as_markdown
from tests.compared_runs import MUSE, change, trained
from tests.training_runs import metrics_line

NAMES = short_names([MUSE, "exact"])
FIRST, LATER, NEAR = "first tokens", "later tokens", "1 to 256 back"


def probed(update: int, loss: float, attention: str = MUSE, **kinds: float) -> dict[str, Any]:
    names = {"first": FIRST, "later": LATER, "near": NEAR}
    answers = {"answers": {names[kind]: nats for kind, nats in kinds.items()}} if kinds else {}
    return metrics_line(10_000 * update, 5.0, 100.0, attention, answers_loss=loss, **answers)


def test_answers_are_told_by_the_attention_they_were_measured_under(tmp_path: Path) -> None:
    results = trained(muse=[probed(1, 3.0), probed(2, 2.0), probed(3, 1.0), probed(4, 0.25, "exact")])
    assert answers_table(results, NAMES).rows == [
        ("muse", NAMES[MUSE], "3", "3.000", "2.000", "1.000", "1.000"),
        ("muse", "exact", "1", "0.250", "0.250", "0.250", "0.250"),
    ]
    path = tmp_path / "compare.json"
    write(comparison_report(results), path, path)
    assert "## Learning to look needles up" in path.with_suffix(".md").read_text()
    assert (tmp_path / "compare-answers.png").exists()


def test_a_run_without_needles_has_no_such_section() -> None:
    results = trained(plain=[metrics_line(1, 5.0, 100.0, MUSE)])
    assert not answers_section(results, NAMES).is_shown
    assert "look needles up" not in as_markdown(comparison_report(results))


def test_the_last_measurement_is_told_by_kind_of_answer(tmp_path: Path) -> None:
    lines = [probed(1, 2.0, first=2.2, later=2.0), probed(3, 0.4, first=1.2, later=0.1)]
    results = trained(copies=lines, near=[probed(2, 1.0, near=1.0)], earlier=[probed(1, 3.0)])
    last = kind_table(results, NAMES)
    assert last.titles == ["run", "measured under", FIRST, LATER, NEAR]
    assert last.rows == [("copies", NAMES[MUSE], "1.200", "0.100", ""), ("near", NAMES[MUSE], "", "", "1.000")]
    path = tmp_path / "compare.json"
    results.write(path)
    assert ComparisonResults.read(path) == results


def test_what_a_run_began_with_is_told() -> None:
    results = trained(muse=[probed(1, 3.0)])
    assert "began with the weights of" not in as_markdown(comparison_report(results))
    change(results, "muse", "initial=out/short/model")
    assert (
        "began with the weights of a model, whose tokens are not counted: muse with those of out/short/model."
        in as_markdown(comparison_report(results))
    )
