"""What is made of the answers to needles: statistics by hand, tables and pages, and several models compared."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("typer")
pytest.importorskip("rich")

import transformers
from typer.testing import CliRunner

from muse_attention.cli import commands
from muse_attention.cli.language_model import name_of
from muse_attention.evaluation.needles import comparison as needle_comparison
from muse_attention.evaluation.needles import results as needle_results
from muse_attention.evaluation.needles.comparison import have_same_questions
from muse_attention.evaluation.needles.report import (
    as_csv,
    depth_table,
    depth_tables,
    html_report,
    markdown_report,
    places_table,
    summary_table,
)
from muse_attention.evaluation.needles.results import Outcome, Results, Settings, Task
from muse_attention.evaluation.needles.samples import KINDS
from muse_attention.evaluation.needles.scores import Answer
from muse_attention.evaluation.needles.statistics import (
    Share,
    against_exact,
    answers,
    by_depth,
    is_exact,
    is_preferred,
    share,
    token_means,
)
from muse_attention.machine import describe_machine

COARSE = "muse:Q4K4R1SP1B128"
SETTINGS = Settings("tiny", "made up", 0, "cpu", "float32")


def made_up(bucket: int, exact: bool, preferred: bool = True, ranks: tuple[int, ...] = (0, 0)) -> Answer:
    return Answer(bucket, "12345678", "12345678" if exact else "1\n2|3", exact, preferred, -1.5, 0.5, ranks)


def hand_made() -> Results:
    """Exact attention is right in 3 of 4, MuSe in 1 of 4; one more failed under MuSe."""
    machine = {**describe_machine(), "transformers": transformers.__version__}
    results = Results(machine, SETTINGS)
    for number, (exact, muse) in enumerate([(True, True), (True, False), (True, False), (False, False)]):
        results.outcomes[Task(number, 2048, "single", 0, "exact")] = Outcome((made_up(0, exact),))
        results.outcomes[Task(number, 2048, "single", 0, COARSE)] = Outcome((made_up(0, muse, muse, (0, 3)),))
    results.outcomes[Task(9, 2048, "single", 5, "exact")] = Outcome((made_up(5, True),))
    results.outcomes[Task(9, 2048, "single", 5, COARSE)] = Outcome(error="RuntimeError: no")
    return results


def test_names_and_what_a_model_generates_are_text() -> None:
    hostile = "=1+1|`<b>`\n## y"
    results = hand_made()
    task = Task(0, 2048, "single", 0, "exact")
    results.outcomes[task] = Outcome((dataclasses.replace(made_up(0, True), generated=hostile),))
    results.commands.append("muse\n```\n## y")
    results.settings = dataclasses.replace(SETTINGS, model=hostile)
    models = {hostile: results, "b": hand_made()}
    for report in (markdown_report(results, title=hostile), needle_comparison.markdown_report(models, title=hostile)):
        outside = re.sub(r"````.*?````", "", report, flags=re.DOTALL)
        assert "## y" not in [line[:4] for line in outside.splitlines()]
        assert not re.search(r"(?<!\\)`<|(?<!\\)<b", outside)
    (first, *_) = csv.DictReader(io.StringIO(as_csv(results)))
    assert first["generated"] == f"'{hostile}"
    assert first["log_probability"].startswith("-")
    names = {row["model"] for row in csv.DictReader(io.StringIO(needle_comparison.as_csv(models)))}
    assert names == {f"'{hostile}", "b"}


def test_a_share_has_the_binomial_standard_error() -> None:
    assert share([made_up(0, exact) for exact in (True, True, True, False)], is_exact) == Share(3, 4)
    assert Share(3, 4).value == 0.75
    assert Share(3, 4).standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    assert Share(2491, 2547).standard_error == pytest.approx(0.0029, abs=5e-5), "the paper's 97.80 ± 0.29%"
    assert share([], is_exact) is None


def test_shares_are_by_the_depth_of_the_definition() -> None:
    results = hand_made()
    assert by_depth(answers(results, 2048, "single", "exact"), is_exact) == [
        *(Share(3, 4), None, None, None, None, Share(1, 1), None, None, None)
    ]
    asked = Outcome((made_up(7, True), made_up(2, False)))
    query = Results({}, SETTINGS, outcomes={Task(0, 2048, "multi-query-2", 2, "exact"): asked})
    found = by_depth(answers(query, 2048, "multi-query-2", "exact"), is_exact)
    assert (found[7], found[2]) == (Share(1, 1), Share(0, 1))


def test_differences_are_paired() -> None:
    difference = against_exact(hand_made(), 2048, "single", COARSE, is_exact)
    assert difference is not None
    assert difference.mean == -0.5
    assert difference.standard_error == pytest.approx(math.sqrt((4 * 0.25) / 3) / 2)
    own = against_exact(hand_made(), 2048, "single", "exact", is_preferred)
    assert own is not None
    assert (own.mean, own.standard_error) == (0, 0)
    assert against_exact(hand_made(), 4096, "single", COARSE, is_exact) is None


def test_means_over_tokens() -> None:
    means = token_means([made_up(0, True, ranks=(0, 3)), made_up(0, True, ranks=(0, 1))])
    assert means == (0.5, 1.0)
    assert token_means([]) is None


def test_tables() -> None:
    header, rows = summary_table(hand_made())
    exact, muse = (dict(zip(header[:6], row, strict=False)) for row in rows)
    assert exact["exact match"] == "80.0 ± 17.9%"
    assert (muse["n"], muse["exact match"], muse["against exact"]) == ("4", "25.0 ± 21.7%", "-50.0 ± 28.9")
    assert [row[-1] for row in rows] == ["", "1"]
    header, rows = depth_table(hand_made(), 2048, "single", is_exact)
    assert header == ("depth", "exact", COARSE)
    assert rows[0] == ("0.05", "75.0 ± 21.7% of 4", "25.0 ± 21.7% of 4")
    assert rows[5] == ("0.55", "100.0 ± 0.0% of 1", "")
    report = markdown_report(hand_made(), title="Needles")
    assert "Failed: 1 of 10 samples" in report
    assert "depth 0.55, sample 9: RuntimeError: no" in report


def test_reports_say_where_muse_was_exact() -> None:
    results = hand_made()
    report = markdown_report(results, title="Needles")
    assert "MuSe is exact attention" not in report
    for length in (4096, 2048, 8192):
        results.outcomes[Task(0, length, "single", 0, "muse:QK4R1B4k")] = Outcome((made_up(0, True),))
    assert "MuSe is exact attention: muse:QK4R1B4k at 2k, 4k\n" in markdown_report(results, title="Needles")
    assert "MuSe is exact attention" in html_report(results, title="Needles", pictures={})


def test_csv_has_a_line_for_every_question() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(hand_made()))))
    assert len(rows) == 10
    assert rows[3]["generated"] == "1\n2|3"
    assert (rows[3]["exact"], rows[3]["ranks"], rows[3]["depth"]) == ("0", "0 3", "0.05")
    assert (rows[9]["error"], rows[9]["exact"]) == ("RuntimeError: no", "")


# Several models


def other_model(*, right: int) -> Results:
    """Asked the same as `hand_made`; right so often of the first four."""
    results = hand_made()
    for number in range(4):
        results.outcomes[Task(number, 2048, "single", 0, "exact")] = Outcome((made_up(0, number < right),))
    return results


def test_models_are_compared_on_the_same_samples() -> None:
    models = {"one": hand_made(), "other": other_model(right=1)}
    (title, (header, rows)), (other_title, (_, other_rows)) = needle_comparison.summary_tables(models, is_exact)
    assert (title, other_title) == ("read by exact", f"read by {COARSE}")
    assert header == ("kind, length", "one", "other", "other less one")
    assert rows == [("single, 2k", "80.0 ± 17.9% of 5", "40.0 ± 21.9% of 5", "-40.0 ± 24.5")]
    assert other_rows == [("single, 2k", "25.0 ± 21.7% of 4", "25.0 ± 21.7% of 4", "+0.0 ± 0.0")]
    ((title, (columns, depths)),) = needle_comparison.depth_tables(models, is_exact)
    assert title == "single, 2k"
    names = [f"{name}, read by {attention}" for attention in ("exact", COARSE) for name in ("one", "other")]
    assert columns == ("depth", *names)
    assert depths[0] == ("0.05", "75.0 ± 21.7% of 4", "25.0 ± 21.7% of 4", *["25.0 ± 21.7% of 4"] * 2)
    assert depths[1] == ("0.15", "", "", "", "")
    assert f"one,{COARSE},2048,single,0.05,exact match,0.25,0.217\n" in needle_comparison.as_csv(models)


def with_more(results: Results, length: int, kind: str, *names: str) -> Results:
    asked = (made_up(0, True), made_up(2, False))[: KINDS[kind].asked]
    for name in names:
        results.outcomes[Task(0, length, kind, 2, name)] = Outcome(asked)
    return results


def test_all_kinds_together_are_those_that_all_models_have() -> None:
    everything = [with_more(hand_made(), 2048, "multi-query-2", "exact", COARSE) for _ in range(2)]
    models = dict(zip(("one", "other"), everything, strict=True))
    (title, (_, rows)), *others = needle_comparison.depth_tables(models, is_exact)
    assert [title, *(other for other, _ in others)] == ["all kinds, 2k", "single, 2k", "multi-query-2, 2k"]
    assert rows[0][1] == "80.0 ± 17.9% of 5", "four of single, and one of multi-query-2"
    (_, (_, summary)), *_ = needle_comparison.summary_tables(models, is_exact)
    assert summary[0] == ("all kinds, 2k", *["71.4 ± 17.1% of 7"] * 2, ""), "kinds with other numbers of questions"
    models["other"] = hand_made()
    assert [title for title, _ in needle_comparison.depth_tables(models, is_exact)] == [
        "single, 2k",
        "multi-query-2, 2k",
    ]


def test_tables_are_in_order_and_have_no_columns_of_other_lengths() -> None:
    longer = "muse:Q4K4R1SP1B256"
    results = with_more(hand_made(), 4096, "multi-key-2", "exact", longer)
    with_more(results, 1024, "single", "exact")
    models = {"one": results, "other": results}
    tables = dict(needle_comparison.summary_tables(models, is_exact))
    assert [row[0] for row in tables["read by exact"][1]] == ["single, 1k", "single, 2k", "multi-key-2, 4k"]
    columns = {title: header[1::2] for title, (header, _) in needle_comparison.depth_tables(models, is_exact)}
    assert columns["single, 1k"] == ("one, read by exact",)
    assert columns["multi-key-2, 4k"] == ("one, read by exact", f"one, read by {longer}")


def test_models_that_were_asked_something_else_are_not_compared() -> None:
    ours, theirs = hand_made(), hand_made()
    assert have_same_questions(ours, theirs)
    for name in ("exact", COARSE):
        asked = dataclasses.replace(made_up(0, True), uid="87654321")
        theirs.outcomes[Task(0, 2048, "single", 0, name)] = Outcome((asked,))
    assert not have_same_questions(ours, theirs)
    assert not have_same_questions(ours, Results({}, SETTINGS)), "nothing"
    elsewhere = dataclasses.replace(hand_made(), settings=dataclasses.replace(SETTINGS, haystack="other files"))
    assert not have_same_questions(ours, elsewhere), "uids do not depend on the haystack"


def test_samples_that_failed_for_one_model_are_told_and_compared_in_no_difference() -> None:
    ours, theirs = hand_made(), hand_made()
    theirs.outcomes[Task(0, 2048, "single", 0, "exact")] = Outcome(error="RuntimeError: no")
    theirs.outcomes[Task(0, 2048, "single", 0, COARSE)] = Outcome(error="RuntimeError: no")
    assert have_same_questions(ours, theirs)
    models = {"one": ours, "other": theirs}
    (_, (_, rows)), *_ = needle_comparison.summary_tables(models, is_exact)
    assert rows[0][1:] == ("80.0 ± 17.9% of 5", "75.0 ± 21.7% of 4", "+0.0 ± 0.0")
    assert "Failed of other: 3 of 10 samples" in needle_comparison.markdown_report(models, title="")


def test_where_errors_are() -> None:
    """Three first questions, of which one fails in its first token and one in a later one, and one second question."""
    results = Results({}, SETTINGS)
    found = {
        ("single", 0): [made_up(0, False, ranks=(2, 0))],
        ("single", 1): [made_up(0, False, ranks=(0, 1))],
        ("multi-query-2", 0): [made_up(0, True), made_up(2, False, ranks=(1, 1))],
    }
    for (kind, number), answered in found.items():
        results.outcomes[Task(number, 2048, kind, 0, "exact")] = Outcome(tuple(answered))
    _, rows = places_table(results)
    assert rows[0] == ("exact", "single, 2k", "0.0 ± 0.0% of 2", "50.0 ± 35.4% of 2", "50.0 ± 35.4% of 2", "")
    assert rows[2][1:] == ("all kinds, 2k", "33.3 ± 27.2% of 3", *["66.7 ± 27.2% of 3"] * 2, "0.0 ± 0.0% of 1")


def test_everything_together_is_shown_by_depth_first() -> None:
    results = with_more(hand_made(), 4096, "single", "exact", COARSE)
    with_more(results, 4096, "multi-key-2", "exact")  # not of all attentions
    (title, (columns, rows)), *others = depth_tables(results, is_exact)
    assert (title, len(others)) == ("all lengths and kinds", 3)
    assert columns == ("depth", "exact", COARSE)
    assert rows[0] == ("0.05", "80.0 ± 17.9% of 5", "40.0 ± 21.9% of 5")
    assert [title for title, _ in depth_tables(hand_made(), is_exact)] == ["single, 2k"]


def run_report(folder: Path) -> tuple[int, list[str]]:
    found = CliRunner().invoke(commands.app, ["report", str(folder)])
    return found.exit_code, found.stderr.splitlines()


def test_the_report_of_a_folder_compares_its_models(tmp_path: Path) -> None:
    strange = dataclasses.replace(hand_made(), settings=dataclasses.replace(SETTINGS, seed=7))
    found = {"a-strange": strange, "one": hand_made(), "other": other_model(right=1), "alone/only": hand_made()}
    (tmp_path / "alone").mkdir()
    for name, results in found.items():
        needle_results.write_results(results, tmp_path / f"{name}.json")
    code, lines = run_report(tmp_path)
    assert (code, lines) == (
        0,
        [f"muse: {tmp_path / 'a-strange'}.json is compared with none: no other model in the folder was asked the same"],
    )
    text = (tmp_path / "needles-compared.md").read_text()
    assert text.startswith("# Needles compared: one, other\n")
    assert "| single, 2k | 80.0 ± 17.9% of 5 | 40.0 ± 21.9% of 5 | -40.0 ± 24.5 |" in text
    page = (tmp_path / "needles-compared.html").read_text()
    assert "other less one" in page
    assert "<img" in page
    assert (tmp_path / "index.html").read_text().count('href="needles-compared.html"') == 1
    assert not (tmp_path / "alone" / "needles-compared.html").exists()
    assert run_report(tmp_path)[0] == 0, "its own files are no results"


def test_two_groups_of_models_have_a_comparison_each(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        settings = dataclasses.replace(SETTINGS, seed="ac".count(name))
        needle_results.write_results(dataclasses.replace(hand_made(), settings=settings), tmp_path / f"{name}.json")
    assert run_report(tmp_path) == (0, [])
    assert (tmp_path / "needles-compared.md").read_text().startswith("# Needles compared: a, c\n")
    assert (tmp_path / "needles-compared-2.md").read_text().startswith("# Needles compared: b, d\n")


def test_results_with_the_name_of_a_comparison_are_not_overwritten(tmp_path: Path) -> None:
    for name in ("needles-compared", "other"):
        needle_results.write_results(hand_made(), tmp_path / f"{name}.json")
    code, (line,) = run_report(tmp_path)
    assert code == 0
    assert line.endswith("needles-compared.json has the name of a comparison; rename it, and the models are compared")
    assert (tmp_path / "needles-compared.md").read_text().startswith("# Needles: needles-compared\n")
    refused = CliRunner().invoke(commands.app, ["eval", "needles", "--name", "needles-compared", "--device", "cpu"])
    assert refused.exit_code == 2
    assert "is that of the comparison of several models; choose another" in refused.stderr


def test_a_model_of_a_run_has_the_name_of_the_run(tmp_path: Path) -> None:
    for folder in ("run/model", "model"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    assert name_of(str(tmp_path / "run" / "model")) == "run"
    assert name_of(str(tmp_path / "model")) == "model"
    assert name_of("smollm2") == "smollm2"
