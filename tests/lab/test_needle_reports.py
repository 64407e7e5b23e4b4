"""What is made of the answers to needles: statistics by hand, tables and pages, and several models compared."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import transformers

from muse_lab.cli.language_model import name_of
from muse_lab.evaluation.needles import models_report
from muse_lab.evaluation.needles.models_report import have_same_questions, needle_comparison
from muse_lab.evaluation.needles.needle_report import columns_of, needle_report, places_table, summary_table
from muse_lab.evaluation.needles.panels import EXACT_MATCH, depth_tables
from muse_lab.evaluation.needles.results import NeedleResults, NeedleSettings, NeedleTask, Outcome
from muse_lab.evaluation.needles.scores import Answer
from muse_lab.evaluation.needles.statistics import (
    Asked,
    Measure,
    by_depth,
    difference,
    is_exact,
    is_preferred,
    share,
)
from muse_lab.evaluation.needles.trainings_report import needles_over_trainings
from muse_lab.pretraining.needles.samples import KINDS
from muse_lab.records.machine import describe_machine
from muse_lab.records.means import Mean, Share
from muse_lab.report import plots
from muse_lab.report.html import as_html
from muse_lab.report.markdown import as_markdown
from muse_lab.report.tree import Table
from tests.command_line import assert_refused, run_muse

COARSE = "muse:Q4K4R1SP1B128"
SHORT = "Q4K4R1SP1B128"
SETTINGS = NeedleSettings("tiny", "made up", 0, "cpu", "float32")


@pytest.fixture(autouse=True)
def quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composed, but not drawn, which takes most of the time of a report."""
    monkeypatch.setattr(plots, "_png", lambda figure: b"\x89PNG")


def made_up(bucket: int, exact: bool, preferred: bool = True, ranks: tuple[int, ...] = (0, 0)) -> Answer:
    return Answer(bucket, "12345678", "12345678" if exact else "1\n2|3", exact, preferred, -1.5, 0.5, ranks)


def hand_made() -> NeedleResults:
    """Exact attention is right in 3 of 4, MuSe in 1 of 4; one more failed under MuSe."""
    machine = {**describe_machine(), "transformers": transformers.__version__}
    results = NeedleResults(machine, SETTINGS)
    for number, (exact, muse) in enumerate([(True, True), (True, False), (True, False), (False, False)]):
        results.measured[NeedleTask(number, 2048, "single", 0, "exact")] = Outcome((made_up(0, exact),))
        results.measured[NeedleTask(number, 2048, "single", 0, COARSE)] = Outcome((made_up(0, muse, muse, (0, 3)),))
    results.measured[NeedleTask(9, 2048, "single", 5, "exact")] = Outcome((made_up(5, True),))
    results.measured[NeedleTask(9, 2048, "single", 5, COARSE)] = Outcome(error="RuntimeError: no")
    return results


def test_names_and_what_a_model_generates_are_text() -> None:
    hostile = "=1+1|`<b>`\n## y"
    results = hand_made()
    task = NeedleTask(0, 2048, "single", 0, "exact")
    results.measured[task] = Outcome((dataclasses.replace(made_up(0, True), generated=hostile),))
    results.commands.append("muse\n```\n## y")
    results.settings = dataclasses.replace(SETTINGS, model=hostile)
    models = {hostile: results, "b": hand_made()}
    for report in map(as_markdown, (needle_report(results, hostile), needle_comparison(models))):
        outside = re.sub(r"````.*?````", "", report, flags=re.DOTALL)
        assert "## y" not in [line[:4] for line in outside.splitlines()]
        assert not re.search(r"(?<!\\)`<|(?<!\\)<b", outside)


@pytest.mark.parametrize(
    ("right", "number", "low", "high"),
    [(3, 4, 0.301, 0.954), (0, 2, 0, 0.658), (90, 90, 0.959, 1), (2491, 2547, 0.972, 0.983)],
)
def test_a_share_has_a_wilson_interval(right: int, number: int, low: float, high: float) -> None:
    """As `scipy.stats.binomtest(right, number).proportion_ci(method="wilson")`, also where all are right or none is."""
    assert Share(right, number).interval == pytest.approx((low, high), abs=5e-4)


def test_a_share_is_that_of_right_answers() -> None:
    assert share([made_up(0, exact) for exact in (True, True, True, False)], is_exact) == Share(3, 4)
    assert Share(3, 4).value == 0.75
    assert share([], is_exact) is None


def test_shares_are_by_the_depth_of_the_definition() -> None:
    results = hand_made()
    assert by_depth(Asked(results, "exact").answers([(2048, "single")]), is_exact) == [
        *(Share(3, 4), None, None, None, None, Share(1, 1), None, None, None)
    ]
    asked = Outcome((made_up(7, True), made_up(2, False)))
    query = NeedleResults({}, SETTINGS, measured={NeedleTask(0, 2048, "multi-query-2", 2, "exact"): asked})
    found = by_depth(Asked(query, "exact").answers([(2048, "multi-query-2")]), is_exact)
    assert (found[7], found[2]) == (Share(1, 1), Share(0, 1))


def against_exact(attention: str, length: int, measure: Measure) -> Mean | None:
    results = hand_made()
    return difference(Asked(results, attention), Asked(results, "exact"), [(length, "single")], measure)


def test_differences_are_paired() -> None:
    assert against_exact(COARSE, 2048, is_exact) == (-0.5, pytest.approx(math.sqrt((4 * 0.25) / 3) / 2))
    assert against_exact("exact", 2048, is_preferred) == (0, 0)
    assert against_exact(COARSE, 4096, is_exact) is None


def test_tables() -> None:
    table = summary_table(hand_made())
    exact, muse = (dict(zip(table.titles, row, strict=True)) for row in table.rows)
    assert exact["exact match"] == "80.0% (37.6 to 96.4)"
    assert (muse["n"], muse["exact match"], muse["exact match: against exact"]) == (
        "4",
        "25.0% (4.6 to 69.9)",
        "-50.0 ± 28.9",
    )
    assert (muse["tokens right"], muse["rank"]) == ("50.0%", "1.5")
    assert table.column("failed") == ["", "1"]
    (by_depths,) = depth_tables(columns_of(hand_made()), EXACT_MATCH)
    assert by_depths.titles == ["depth", "exact", SHORT]
    rows = by_depths.rows
    assert rows[0] == ("0.05", "75.0% (30.1 to 95.4) of 4", "25.0% (4.6 to 69.9) of 4")
    assert rows[5] == ("0.55", "100.0% (20.7 to 100.0) of 1", "")
    report = as_markdown(needle_report(hand_made(), "t"))
    assert "Failed: 1 of 10 samples" in report
    assert "single, 2k | 0.55 | 9 | RuntimeError: no |" in report


def test_reports_say_where_muse_was_exact() -> None:
    results = hand_made()
    report = as_markdown(needle_report(results, "t"))
    assert "MuSe is exact attention" not in report
    for length in (4096, 2048, 8192):
        results.measured[NeedleTask(0, length, "single", 0, "muse:QK4R1B4k")] = Outcome((made_up(0, True),))
    assert "MuSe is exact attention: muse:QK4R1B4k at 2k, 4k\n" in as_markdown(needle_report(results, "t"))
    assert "MuSe is exact attention" in as_html(needle_report(results, "t"))


# Several models


def titled(tables: Iterable[Table]) -> dict[str, Table]:
    return {table.title: table for table in tables}


def other_model(*, right: int) -> NeedleResults:
    """Asked the same as `hand_made`; right so often of the first four."""
    results = hand_made()
    for number in range(4):
        results.measured[NeedleTask(number, 2048, "single", 0, "exact")] = Outcome((made_up(0, number < right),))
    return results


def test_models_are_compared_on_the_same_samples() -> None:
    models = {"one": hand_made(), "other": other_model(right=1)}
    exact, muse = models_report.summary_tables(models, EXACT_MATCH)
    assert (exact.title, muse.title) == ("the prompt read by exact", f"the prompt read by {SHORT}")
    assert exact.titles == ["kind, length", "one", "other", "other less one"]
    assert exact.rows == [("single, 2k", "80.0% (37.6 to 96.4) of 5", "40.0% (11.8 to 76.9) of 5", "-40.0 ± 24.5")]
    assert muse.rows == [("single, 2k", "25.0% (4.6 to 69.9) of 4", "25.0% (4.6 to 69.9) of 4", "+0.0 ± 0.0")]
    exact, muse = models_report.tables_by_depth(models, EXACT_MATCH)
    assert exact.title == "single, 2k, the prompt read by exact"
    assert muse.title == f"single, 2k, the prompt read by {SHORT}"
    assert exact.titles == muse.titles == ["depth", "one", "other", "other less one"]
    assert exact.rows[0] == ("0.05", "75.0% (30.1 to 95.4) of 4", "25.0% (4.6 to 69.9) of 4", "-50.0 ± 28.9")
    assert exact.rows[1] == ("0.15", "", "", "")
    assert muse.rows[0] == ("0.05", *["25.0% (4.6 to 69.9) of 4"] * 2, "+0.0 ± 0.0")


def test_models_are_drawn_by_depth_in_one_picture_for_each_attention_that_reads() -> None:
    models = {"one": hand_made(), "other": other_model(right=1)}
    figures = list(models_report.depth_curves(models))
    assert [figure.title for figure in figures] == [
        f"single, 2k, the prompt read by {name}" for name in ("exact", SHORT)
    ]
    exact, _ = figures
    assert exact.draw().startswith(b"\x89PNG")


def with_more(results: NeedleResults, length: int, kind: str, *names: str) -> NeedleResults:
    asked = (made_up(0, True), made_up(2, False))[: KINDS[kind].asked]
    for name in names:
        results.measured[NeedleTask(0, length, kind, 2, name)] = Outcome(asked)
    return results


def test_all_kinds_together_are_those_that_all_models_have() -> None:
    everything = [with_more(hand_made(), 2048, "multi-query-2", "exact", COARSE) for _ in range(2)]
    models = dict(zip(("one", "other"), everything, strict=True))
    tables = titled(models_report.tables_by_depth(models, EXACT_MATCH))
    assert list(tables) == [f"all kinds, 2k, the prompt read by {name}" for name in ("exact", SHORT)]
    (by_depths, _) = tables.values()
    assert by_depths.rows[0][1] == "80.0% (37.6 to 96.4) of 5", "four of single, and one of multi-query-2"
    summary, *_ = models_report.summary_tables(models, EXACT_MATCH)
    assert summary.rows[0] == ("all kinds, 2k", *["71.4% (35.9 to 91.8) of 7"] * 2, "+0.0 ± 0.0")
    models["other"] = hand_made()
    assert next(models_report.tables_by_depth(models, EXACT_MATCH)).title == "single, 2k, the prompt read by exact"


def test_questions_of_one_sample_count_together_in_the_error_of_a_difference() -> None:
    """Samples of two questions that are right or wrong together are as sure as samples of one."""
    results = NeedleResults({}, SETTINGS)
    for number, (ours, theirs) in enumerate([(True, False), (True, True), (True, True)]):
        for name, right in (("exact", ours), (COARSE, theirs)):
            asked = Outcome((made_up(0, right), made_up(3, right)))
            results.measured[NeedleTask(number, 2048, "multi-query-2", 0, name)] = asked
            results.measured[NeedleTask(number, 2048, "single", 0, name)] = Outcome((made_up(0, right),))
    coarse, exact = Asked(results, COARSE), Asked(results, "exact")
    groups = [(2048, "single"), (2048, "multi-query-2")]
    alone = difference(coarse, exact, groups[:1], is_exact)
    assert alone == pytest.approx((-1 / 3, 1 / 3))
    assert difference(coarse, exact, groups[1:], is_exact) == pytest.approx(alone)
    assert difference(coarse, exact, groups[1:], is_exact, bucket=3) == pytest.approx(alone)
    assert difference(coarse, exact, groups, is_exact, bucket=5) is None
    # nine questions of six samples, of which one sample of each kind is lost
    rest = 2 * (1 / 3) ** 2 + 2 * (2 / 3) ** 2 + (2 / 3) ** 2 + (4 / 3) ** 2
    assert difference(coarse, exact, groups, is_exact) == pytest.approx((-1 / 3, math.sqrt(rest * 6 / 5) / 9))


def test_tables_are_in_order_and_there_are_none_of_lengths_that_an_attention_did_not_read() -> None:
    longer = "muse:Q4K4R1SP1B256"
    results = with_more(hand_made(), 4096, "multi-key-2", "exact", longer)
    with_more(results, 1024, "single", "exact")
    models = {"one": results, "other": results}
    first, *_ = models_report.summary_tables(models, EXACT_MATCH)
    assert first.column("kind, length") == ["single, 1k", "single, 2k", "multi-key-2, 4k"]
    names = [(1, "single", "exact"), (2, "single", "exact"), (4, "multi-key-2", "exact")]
    names += [(2, "single", SHORT), (4, "multi-key-2", "Q4K4R1SP1B256")]
    assert [table.title for table in models_report.tables_by_depth(models, EXACT_MATCH)] == [
        f"{kind}, {length}k, the prompt read by {attention}" for length, kind, attention in names
    ]


def test_models_that_were_asked_something_else_are_not_compared() -> None:
    ours, theirs = hand_made(), hand_made()
    assert have_same_questions(ours, theirs)
    for name in ("exact", COARSE):
        asked = dataclasses.replace(made_up(0, True), uid="87654321")
        theirs.measured[NeedleTask(0, 2048, "single", 0, name)] = Outcome((asked,))
    assert not have_same_questions(ours, theirs)
    assert not have_same_questions(ours, NeedleResults({}, SETTINGS)), "nothing"
    elsewhere = dataclasses.replace(hand_made(), settings=dataclasses.replace(SETTINGS, haystack="other files"))
    assert not have_same_questions(ours, elsewhere), "uids do not depend on the haystack"


def test_samples_that_failed_for_one_model_are_told_and_compared_in_no_difference() -> None:
    ours, theirs = hand_made(), hand_made()
    theirs.measured[NeedleTask(0, 2048, "single", 0, "exact")] = Outcome(error="RuntimeError: no")
    theirs.measured[NeedleTask(0, 2048, "single", 0, COARSE)] = Outcome(error="RuntimeError: no")
    assert have_same_questions(ours, theirs)
    models = {"one": ours, "other": theirs}
    table, *_ = models_report.summary_tables(models, EXACT_MATCH)
    assert table.rows[0][1:] == ("80.0% (37.6 to 96.4) of 5", "75.0% (30.1 to 95.4) of 4", "+0.0 ± 0.0")
    assert "Failed of other: 3 of 10 samples" in as_markdown(needle_comparison(models))


def test_where_errors_are() -> None:
    """Three first questions, of which one fails in its first token and one in a later one, and one second question."""
    results = NeedleResults({}, SETTINGS)
    found = {
        ("single", 0): [made_up(0, False, ranks=(2, 0))],
        ("single", 1): [made_up(0, False, ranks=(0, 1))],
        ("multi-query-2", 0): [made_up(0, True), made_up(2, False, ranks=(1, 1))],
    }
    for (kind, number), answered in found.items():
        results.measured[NeedleTask(number, 2048, kind, 0, "exact")] = Outcome(tuple(answered))
    together, single, _ = places_table(results).rows
    assert single == (
        "exact",
        "single, 2k",
        "0.0% (0.0 to 65.8) of 2",
        "50.0% (9.5 to 90.5) of 2",
        "50.0% (9.5 to 90.5) of 2",
        "",
    )
    assert together[1:] == (
        "all kinds, 2k",
        "33.3% (6.1 to 79.2) of 3",
        *["66.7% (20.8 to 93.9) of 3"] * 2,
        "0.0% (0.0 to 79.3) of 1",
    )


def test_everything_together_is_shown_by_depth_first() -> None:
    results = with_more(hand_made(), 4096, "single", "exact", COARSE)
    with_more(results, 4096, "multi-key-2", "exact")  # not of all attentions
    first, *others = depth_tables(columns_of(results), EXACT_MATCH)
    assert (first.title, len(others)) == ("all lengths and kinds", 3)
    assert first.titles == ["depth", "exact", SHORT]
    assert first.rows[0] == ("0.05", "80.0% (37.6 to 96.4) of 5", "40.0% (11.8 to 76.9) of 5")
    assert list(titled(depth_tables(columns_of(hand_made()), EXACT_MATCH))) == ["single, 2k"]


def run_report(folder: Path) -> tuple[int, list[str]]:
    code, _, err = run_muse("report", folder)
    return code, err.splitlines()


@pytest.mark.long
def test_the_report_of_a_folder_compares_its_models(tmp_path: Path) -> None:
    strange = dataclasses.replace(hand_made(), settings=dataclasses.replace(SETTINGS, seed=7))
    found = {"a-strange": strange, "one": hand_made(), "other": other_model(right=1), "alone/only": hand_made()}
    (tmp_path / "alone").mkdir()
    for name, results in found.items():
        results.write(tmp_path / f"{name}.json")
    code, lines = run_report(tmp_path)
    assert (code, lines) == (
        0,
        [f"muse: {tmp_path / 'a-strange'}.json is compared with none: no other model in the folder was asked the same"],
    )
    text = (tmp_path / "needles-compared.md").read_text()
    assert text.startswith("# Needles compared: one, other\n")
    assert "| single, 2k | 80.0% (37.6 to 96.4) of 5 | 40.0% (11.8 to 76.9) of 5 | -40.0 ± 24.5 |" in text
    page = (tmp_path / "needles-compared.html").read_text()
    assert "other less one" in page
    assert "<img" in page
    assert (tmp_path / "index.html").read_text().count('href="needles-compared.html"') == 1
    assert not (tmp_path / "alone" / "needles-compared.html").exists()
    assert run_report(tmp_path)[0] == 0, "its own files are no results"


def test_two_groups_of_models_have_a_comparison_each(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        settings = dataclasses.replace(SETTINGS, seed="ac".count(name))
        dataclasses.replace(hand_made(), settings=settings).write(tmp_path / f"{name}.json")
    assert run_report(tmp_path) == (0, [])
    assert (tmp_path / "needles-compared.md").read_text().startswith("# Needles compared: a, c\n")
    assert (tmp_path / "needles-compared-2.md").read_text().startswith("# Needles compared: b, d\n")


def write_trainings(folder: Path, right: dict[str, dict[str, int]]) -> None:
    """A folder for each training, with models that are right so often of four, and once of one more."""
    for training, models in right.items():
        (folder / training).mkdir(parents=True)
        for model, number in models.items():
            other_model(right=number).write(folder / training / f"{model}.json")


@pytest.mark.long
def test_trainings_in_folders_side_by_side_are_compared_over_folders(tmp_path: Path) -> None:
    found = {"seed-11": {"exact": 4, "coarse": 0}, "seed-5": {"exact": 3, "coarse": 2, "fine": 4}}
    write_trainings(tmp_path, found)
    assert run_report(tmp_path) == (0, [])
    text = (tmp_path / "needles-over-trainings.md").read_text()
    assert text.startswith("# Needles over 2 trainings: exact, coarse, fine\n"), "exact attention is the reference"
    assert (
        "- single, 2k: coarse less exact -50.0 ± 30.0 percentage points over 2 trainings (-80.0 to -20.0); "
        "behind by more than 2 standard errors at 1 of 4 depths\n"
    ) in text
    assert "| model | seed-5 | seed-11 | mean |" in text, "numbers in order"
    assert "| exact | 80.0% (37.6 to 96.4) | 100.0% (56.6 to 100.0) | 90.0 ± 10.0% |" in text
    assert "| fine | 100.0% (56.6 to 100.0) |  |  |" in text
    assert "| coarse | -20.0 ± 20.0 | -80.0 ± 20.0 | -50.0 ± 30.0 | 1 of 4 | 0 of 4 |" in text
    assert "| fine | +20.0 ± 20.0 |  | +20.0 | 0 of 2 | 0 of 2 |" in text
    assert "| 0.05 | 87.5% | 25.0% | -62.5 ± 37.5 | +25.0 |" in text
    assert "| 0.55 | 100.0% | 100.0% | +0.0 ± 0.0 | +0.0 |" in text
    assert "needles-over-trainings.html" in (tmp_path / "index.html").read_text()
    assert run_report(tmp_path) == (0, []), "its own files are no results"


@pytest.mark.long
@pytest.mark.parametrize(
    ("models", "changed"),
    [
        (("exact", "coarse"), {"seed": 7}),
        (("exact", "coarse"), {"model": "large (74M parameters)"}),
        (("coarse", "fine"), {}),
    ],
)
def test_folders_whose_models_are_others_or_were_asked_something_else_are_no_trainings(
    tmp_path: Path, models: tuple[str, ...], changed: dict[str, Any]
) -> None:
    """A training without the reference among them."""
    write_trainings(tmp_path, {f"seed-{seed}": {"exact": 4, "coarse": 0} for seed in (1, 2)})
    (tmp_path / "strange").mkdir()
    for name in models:
        strange = dataclasses.replace(hand_made(), settings=dataclasses.replace(SETTINGS, **changed))
        strange.write(tmp_path / "strange" / f"{name}.json")
    named = f"muse: {tmp_path / 'strange'} is in no comparison over folders: no other has such models, asked the same"
    assert run_report(tmp_path) == (0, [named])
    text = (tmp_path / "needles-over-trainings.md").read_text()
    assert text.startswith("# Needles over 2 trainings: exact, coarse\n")
    assert "strange" not in text


def test_every_length_is_compared_over_the_trainings_that_answered_it(tmp_path: Path) -> None:
    """A model that failed at a length, or was not asked it, does not change what the others are compared on."""
    trainings: dict[str, dict[str, NeedleResults]] = {}
    for training in ("seed-1", "seed-2"):
        trainings[training] = {name: other_model(right=2) for name in ("exact", "coarse")}
        for results in trainings[training].values():
            with_more(results, 4096, "single", "exact")
            with_more(results, 4096, "multi-key-2", "exact")
    failed = trainings["seed-2"]["coarse"].measured
    failed |= {task: Outcome(error="RuntimeError: no") for task in failed if task.length == 4096}
    report = needles_over_trainings(trainings)
    titles = [section.title for section in report.sections]
    assert titles[::3] == ["Exact match, single, 2k", "Exact match, all kinds, 4k"]
    (differences,) = report.sections[4].tables
    assert differences.rows == [("coarse", "+0.0 ± 0.0", "", "+0.0", "0 of 1", "0 of 1")]
    (found,) = report.sections[3].tables
    assert found.column("mean") == ["100.0 ± 0.0%", ""], "no mean over other trainings"
    assert any(line.startswith("Failed of seed-2/coarse: ") for line in report.verdict)


@pytest.mark.long
def test_results_with_the_name_of_a_comparison_are_not_overwritten(tmp_path: Path) -> None:
    write_trainings(tmp_path, {f"seed-{seed}": {"exact": 4, "coarse": 0} for seed in (1, 2)})
    for path in (tmp_path / "needles-over-trainings", tmp_path / "seed-2" / "needles-compared"):
        hand_made().write(path.with_suffix(".json"))
        code, (line, *_) = run_report(tmp_path)
        assert (code, line) == (
            0,
            f"muse: {path}.json has the name of a comparison; rename it, and the models are compared",
        )
        assert path.with_suffix(".md").read_text().startswith(f"# Needles: {path.name}\n")
        path.with_suffix(".json").unlink()
    assert (tmp_path / "seed-1" / "needles-compared.md").exists()
    refused = run_muse("eval", "needles", "--name", "needles-compared", "--device", "cpu")
    assert_refused(refused, "is reserved for comparisons of several models; choose another")


def test_a_model_of_a_run_has_the_name_of_the_run(tmp_path: Path) -> None:
    for folder in ("run/model", "model"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    assert name_of(str(tmp_path / "run" / "model")) == "run"
    assert name_of(str(tmp_path / "model")) == "model"
    assert name_of("smollm2") == "smollm2"
