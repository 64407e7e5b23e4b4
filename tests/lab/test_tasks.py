"""Standard tasks without lm-eval: data, the score of completed code, continued results, reports, the command."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from muse_lab.evaluation.tasks import tasks_report
from muse_lab.evaluation.tasks.answers import Answer, Part, TaskAnswers, TaskResults, TaskSettings, measure
from muse_lab.evaluation.tasks.benchmarks import (
    BENCHMARKS,
    RULER,
    Benchmark,
    Data,
    choose,
    describe_made,
    read_rows,
    what_is_missing,
)
from muse_lab.evaluation.tasks.edit_similarity import edit_similarity, first_line_of_code, ratio
from muse_lab.report.html import as_html
from muse_lab.report.markdown import as_markdown
from tests.command_line import assert_done_quietly, assert_refused, run_muse

MUSE = "muse:Q4K4R1SP1B32,clustering=lloyd"
BOTH = ("exact", MUSE)
run = functools.partial(run_muse, "eval", "tasks")
ARC = BENCHMARKS["arc_easy"]
ARC_ROWS = [
    {"id": "1", "question": "Up?", "choices": {"text": ["yes", "no"], "label": ["A", "B"]}, "answerKey": "A"},
    {"id": "2", "question": "Down?", "choices": {"text": ["yes", "no"], "label": ["1", "2"]}, "answerKey": "2"},
]


# Edit similarity


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("abcd", "abcd", 1.0),
        ("", "", 1.0),
        ("", "abcd", 0.0),
        ("abcd", "wxyz", 0.0),
        ("abcd", "bcde", 0.75),  # "bcd": 2 * 3 / 8
        ("abxcd", "abcd", 0.89),  # "ab" and "cd": 2 * 4 / 9 = 0.888...
        ("tide", "diet", 0.25),  # only the leftmost block of one, "t", has the rest in order: 2 * 1 / 8, not 2 * 2 / 8
        ("diet", "tide", 0.5),  # "d" and "e", or "i" and "e"
        ("a" + 7 * "b", "a" + 7 * "c", 0.12),  # 2 / 16 = 12.5%, rounded to even
    ],
)
def test_the_ratio_is_that_of_fuzzywuzzy(first: str, second: str, expected: float) -> None:
    assert ratio(first, second) == expected


@pytest.mark.parametrize(
    ("completion", "line"),
    [
        ("    return x\n    return y", "    return x"),  # white space in front counts
        ("\n  \n\treturn x", "\treturn x"),
        ("# first\n// second\n```python\nreturn x", "return x"),
        ("x = 1  # one\ny = 2", "y = 2"),  # a comment behind code is a comment too
        ("# nothing else", ""),
        ("", ""),
    ],
)
def test_the_line_that_counts_is_the_first_without_a_comment(completion: str, line: str) -> None:
    assert first_line_of_code(completion) == line


def test_edit_similarity_is_that_of_the_nearest_answer() -> None:
    completion = "# next line\n    return x + 1\nand more"
    assert edit_similarity(completion, ["    return x + 2"]) == 0.94  # 15 of 16 characters: 30 / 32 = 0.9375
    assert edit_similarity(completion, ["    return x + 2", "    return x + 1"]) == 1.0
    assert edit_similarity("# nothing", ["return"]) == 0.0


# Data


def write_lines(path: Path, rows: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_rows_are_read_and_named_by_their_hash(tmp_path: Path) -> None:
    path = tmp_path / "arc_easy" / "test.jsonl"
    write_lines(path, ARC_ROWS)
    assert what_is_missing(ARC, tmp_path) is None
    rows, data = read_rows(ARC.data, tmp_path)
    assert rows == ARC_ROWS
    assert data.rows == 2
    assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert str(tmp_path) not in data.source


def test_rows_are_read_from_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "arc_easy" / "test.parquet"
    path.parent.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(ARC_ROWS), path)
    assert what_is_missing(ARC, tmp_path) is None
    assert read_rows(ARC.data, tmp_path)[0] == ARC_ROWS
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(ValueError, match=r"cannot read .*test\.parquet"):
        read_rows(ARC.data, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ("{]\n", "line 1 of .* is not a row of JSON"),
        ('[1, 2]\n{"question": "?"}\n', "line 1 of .* is not a row of JSON"),
        ('{"question": "?", "choices": {}}\n', "row 1 of .* has no field 'answerKey'"),
    ],
)
def test_what_is_not_the_data_set_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "arc_easy" / "test.jsonl"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_rows(ARC.data, tmp_path)


def test_missing_data_are_named_with_their_place(tmp_path: Path) -> None:
    assert what_is_missing(BENCHMARKS["niah_single_1"], None) is None
    lcc = what_is_missing(BENCHMARKS["lcc"], tmp_path)
    assert f"LongBench, lcc.jsonl of data.zip as {tmp_path}/longbench/lcc.jsonl" in lcc
    assert "context, input, answers" in lcc
    essays = what_is_missing(BENCHMARKS["niah_single_2"], None)
    for expected in ("baber/paul_graham_essays", "DIR/paul_graham_essays/train.jsonl", "punkt_tab", "--data DIR"):
        assert expected in essays
    write_lines(tmp_path / "paul_graham_essays" / "train.jsonl", [{"text": "An essay."}])
    sentences = what_is_missing(BENCHMARKS["niah_single_2"], tmp_path)
    assert sentences == f"put punkt_tab of nltk_data as {tmp_path}/nltk_data/tokenizers/punkt_tab/"
    (tmp_path / "nltk_data" / "tokenizers" / "punkt_tab" / "english").mkdir(parents=True)
    assert what_is_missing(BENCHMARKS["niah_single_2"], tmp_path) is None


def test_tasks_are_chosen_by_name_each_once() -> None:
    assert choose(["ruler"]) == list(RULER)
    names = [benchmark.name for benchmark in choose(["niah_multikey_2", "sciq", "ruler"])]
    assert names[:2] == ["niah_multikey_2", "sciq"]
    assert len(names) == len(set(names)) == 9
    with pytest.raises(ValueError, match="unknown task 'mmlu'; the tasks are arc_easy, sciq"):
        choose(["mmlu"])


# Measuring


@dataclass
class Scripted:
    """A harness whose answers are known: sample i scores i % 2, and under MuSe sample 1 is wrong."""

    rows: int = 4
    fails_on: tuple[int, str] | None = None
    asked: list[tuple[str, int | None, int, str]] = field(default_factory=list)
    stop_after: int | None = None

    def open(self, benchmark: Benchmark, length: int | None, folder: Path | None, limit: int | None) -> Any:
        data = describe_made([{"row": row} for row in range(self.rows)], "made by hand")
        return Opened(benchmark, length, data, min(self.rows, limit or self.rows))

    def answer(self, opened: Any, index: int, attention: str) -> Answer:
        if self.stop_after == len(self.asked):
            raise KeyboardInterrupt
        self.asked.append((opened.benchmark.name, opened.length, index, attention))
        if self.fails_on == (index, attention):
            raise RuntimeError("too hot,\n  too cold")
        score = 0.0 if attention != "exact" and index == 1 else float(index % 2)
        return Answer(index, dict.fromkeys(opened.benchmark.metrics, score), tokens=20 + 10 * index, response="?")


@dataclass(frozen=True)
class Opened:
    benchmark: Benchmark
    length: int | None
    data: Data
    samples: int


SETTINGS = TaskSettings("a model", "lm-eval 0", None, "cpu", "float32", "f00")
PARTS = [Part(BENCHMARKS["niah_single_1"], 64, BOTH), Part(BENCHMARKS["arc_easy"], None, BOTH)]


def run_parts(path: Path, harness: Scripted, *, parts: Sequence[Part] = PARTS) -> TaskResults:
    results = TaskResults.start(SETTINGS, path)
    measure(harness, parts, None, results, path)
    return results


def test_all_attentions_answer_a_sample_before_the_next(tmp_path: Path) -> None:
    harness = Scripted(rows=2)
    results = run_parts(tmp_path / "tasks.json", harness)
    needles = [("niah_single_1", 64, index, name) for index in range(2) for name in BOTH]
    assert harness.asked == needles + [("arc_easy", None, index, name) for index in range(2) for name in BOTH]
    assert TaskResults.read(tmp_path / "tasks.json") == results


@pytest.mark.parametrize("stop_after", [0, 1, 7, 11])
def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, stop_after: int) -> None:
    path = tmp_path / "tasks.json"
    whole = Scripted()
    expected = run_parts(tmp_path / "whole.json", whole)
    first, second = Scripted(stop_after=stop_after), Scripted()
    with pytest.raises(KeyboardInterrupt):
        run_parts(path, first)
    found = run_parts(path, second)
    assert found.cells == expected.cells
    assert len(first.asked) == stop_after
    assert first.asked + second.asked == whole.asked
    again = Scripted()
    run_parts(path, again)
    assert again.asked == []


def test_a_sample_that_fails_is_told_and_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    told: list[str] = []
    results = TaskResults.start(SETTINGS, path)
    measure(Scripted(fails_on=(2, MUSE)), PARTS[:1], None, results, path, on_failure=told.append)
    assert told == [f"niah_single_1 at 64, sample 3, failed under {MUSE}: RuntimeError: too hot, too cold"]
    cell = results.cells["niah_single_1", 64]
    assert results.failed == 1
    assert [answer.index for answer in cell.scored(MUSE)] == [0, 1, 3]
    assert tasks_report.samples_in_words(cell, MUSE) == "3 of 500 published, 1 failed"
    report = as_markdown(tasks_report.tasks_report(results, "tasks"))
    assert "too hot, too cold" in report
    mended = Scripted()
    results = run_parts(path, mended, parts=PARTS[:1])
    assert mended.asked == [("niah_single_1", 64, 2, MUSE)]
    assert results.failed == 0


def test_other_data_or_settings_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    run_parts(path, Scripted(), parts=PARTS[:1])
    with pytest.raises(ValueError, match=r"the data of niah_single_1 are not those .*; choose another --name or"):
        run_parts(path, Scripted(rows=5), parts=[Part(BENCHMARKS["niah_single_1"], 64, ("exact", "muse"))])
    other = TaskSettings("a model", "lm-eval 0", 3, "cpu", "float32", "f00")
    with pytest.raises(ValueError, match=r"tasks\.json has other results: limit was none, now 3"):
        TaskResults.start(other, path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document.pop("tasks"),
        lambda document: document["tasks"][0].update(task="mmlu"),
        lambda document: document["tasks"][0]["attentions"][0]["answers"][0].update(scores={"bleu": 1.0}),
        lambda document: document["settings"].pop("model"),
    ],
)
def test_files_that_hold_something_else_are_refused(tmp_path: Path, spoil: Callable[[Any], Any]) -> None:
    path = tmp_path / "tasks.json"
    run_parts(path, Scripted(), parts=PARTS[:1])
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="does not hold the results of muse eval tasks"):
        TaskResults.read(path)


# Reports


def test_scores_and_gaps_by_hand() -> None:
    cell = TaskAnswers("niah_single_1", 64, Data("made by hand", 4, "0"), 4)
    for attention, scores in (("exact", (1.0, 0.0, 1.0, 1.0)), (MUSE, (1.0, 0.5, 0.0, 1.0))):
        answers = [Answer(index, {"string_match_all": score}, tokens=40) for index, score in enumerate(scores)]
        cell.answers[attention] = {answer.index: answer for answer in answers}
    assert (
        tasks_report.format_score(cell.scored("exact"), "string_match_all") == "75.0% (30.1 to 95.4)"
    )  # all or nothing
    assert tasks_report.format_score(cell.scored(MUSE), "string_match_all") == "0.625 ± 0.239"
    gap = tasks_report.gap_to_exact(cell, MUSE, "string_match_all")
    assert gap.mean == -0.125  # of 0, 0.5, -1, 0
    assert gap.standard_error == pytest.approx(math.sqrt((0.125**2 + 0.625**2 + 0.875**2 + 0.125**2) / 3 / 4))
    assert tasks_report.gap_to_exact(cell, "exact", "string_match_all") is None
    del cell.answers["exact"][2]  # a sample that one of both did not answer counts in no gap
    assert tasks_report.gap_to_exact(cell, MUSE, "string_match_all").mean == pytest.approx(0.5 / 3)


def test_reports_say_what_was_not_the_benchmark(tmp_path: Path) -> None:
    results = run_parts(tmp_path / "tasks.json", Scripted())
    for report in (
        as_markdown(tasks_report.tasks_report(results, "tasks")),
        as_html(tasks_report.tasks_report(results, "tasks")),
    ):
        assert "4 of 2376 published" in report
        assert "4 of 500 published" in report
        assert describe_made([{"row": row} for row in range(4)], "").sha256 in report
        assert "Needle tasks of RULER that are not here: niah_single_2" in report
    table = tasks_report.scores_table(results)
    needles = [dict(zip(table.titles, row, strict=True)) for row in table.rows if row[0] == "niah_single_1"]
    assert [row["score"] for row in needles] == ["50.0% (15.0 to 85.0)", "25.0% (4.6 to 69.9)"]
    assert [row["gap to exact"] for row in needles] == ["", "-0.250 ± 0.250"]
    assert [row["longer than a block"] for row in needles] == ["", "2"]  # 20, 30, 40 and 50 tokens, blocks of 32
    lines = tasks_report.as_csv(results).splitlines()
    assert len(lines) == 1 + 8 + 16
    assert lines[1] == "niah_single_1,64,exact,1,20,False,string_match_all,0,"


def test_muse_without_settings_has_the_block_of_each_sample() -> None:
    cell = TaskAnswers("lcc", None, Data("", 2, ""), 2)
    scores = {"edit_similarity": 0.5}
    for name in ("muse", "muse:paper"):
        cell.answers[name] = {0: Answer(0, scores, tokens=100), 1: Answer(1, scores, tokens=9000, is_cut=True)}
        assert tasks_report.longer_than_a_block(cell, name) == 1
    assert tasks_report.longer_than_a_block(cell, "moba") is None
    assert tasks_report.samples_in_words(cell, "muse") == "2 of 500 published, 1 cut to the model's context"


# The command


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Stands where lm-eval does in the command."""
    harness = Scripted()
    monkeypatch.setattr("muse_lab.evaluation.tasks.harness.import_harness", lambda: "lm-eval 0")
    monkeypatch.setattr("muse_lab.evaluation.tasks.harness.Harness", lambda model, tokenizer: harness)
    return harness


@pytest.fixture
def asked(folder: Path, tmp_path: Path) -> list[object]:
    choice = ["--task", "niah_single_1,niah_multikey_2", "--length", "64,128", "--attention", "muse:QK4R1B32"]
    return [folder, *choice, "--limit", "2", "--device", "cpu", "--output", tmp_path / "out"]


def test_the_command_writes_results_and_reports(asked: list[object], scripted: Scripted, tmp_path: Path) -> None:
    out = assert_done_quietly(run(*asked))
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["tiny.csv", "tiny.html", "tiny.json", "tiny.md"]
    assert len(scripted.asked) == 2 * 2 * 2 * 2
    for expected in ("niah_single_1 64", "muse:Q4K4", "2 of 500", "wrote", "tiny.html"):
        assert expected in out
    document = json.loads((tmp_path / "out" / "tiny.json").read_text())
    assert document["commands"] == [
        "muse eval tasks tiny --task niah_single_1,niah_multikey_2 --length 64,128 --attention muse:QK4R1B32 "
        "--samples 2 --device cpu --dtype float32 --name tiny"
    ]
    for file in files:
        assert str(tmp_path).encode() not in file.read_bytes()
    before = {file.name: file.read_bytes() for file in files}
    for file in files:
        if file.suffix != ".json":
            file.unlink()
    assert run_muse("report", tmp_path / "out" / "tiny.json")[0] == 0
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_the_command_continues(asked: list[object], scripted: Scripted, tmp_path: Path) -> None:
    assert run(*asked, "--name", "whole")[0] == 0
    scripted.asked.clear()
    scripted.stop_after = 5
    outcome = run(*asked, "--name", "parted")
    assert_refused(outcome, "interrupted; what is finished is in ", code=130)
    scripted.stop_after = None
    words = outcome[2].rstrip().partition("continue with: muse eval tasks ")[2].split()
    assert run(*words)[0] == 0
    assert len(scripted.asked) == 16
    whole, parted = (json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("whole", "parted"))
    assert parted["tasks"] == whole["tasks"]
    (tmp_path / "out" / "whole.json").write_text("{")
    assert_refused(run(*asked, "--name", "whole"), "does not hold the results of muse eval tasks")


def test_without_a_command_there_is_help() -> None:
    out = assert_done_quietly(run_muse("eval"))
    assert "tasks" in out
    assert "needles" in out


def test_a_failure_is_one_line_and_the_exit_code(asked: list[object], scripted: Scripted) -> None:
    scripted.fails_on = (1, MUSE)
    code, out, err = run(*asked)
    assert code == 1
    assert "1 of 500" in out
    lines = err.splitlines()
    assert len(lines) == 5  # of two tasks at two lengths, and what to do
    assert "niah_multikey_2 at 128, sample 2, failed under" in lines[3]
    assert "4 samples failed, and count in no score; ask them again with: muse eval tasks" in lines[4]
    scripted.fails_on = None
    scripted.asked.clear()
    assert run(*lines[4].partition("muse eval tasks ")[2].split())[0] == 0
    assert len(scripted.asked) == 4


def test_failures_that_were_not_asked_again_do_not_count(asked: list[object], scripted: Scripted) -> None:
    scripted.fails_on = (1, MUSE)
    assert run(*asked, "--length", "64")[0] == 1
    scripted.fails_on = None
    assert_done_quietly(run(*asked, "--length", "128"))
    scripted.fails_on = (0, "exact")
    code, _, err = run(*asked, "--length", "64,128,256")
    assert code == 1
    assert "muse: 2 samples failed" in err.splitlines()[-1]  # of two tasks at the one new length


def test_broken_data_are_known_before_anything_is_answered(
    asked: list[object], scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "arc_easy" / "test.jsonl", ARC_ROWS)
    write_lines(tmp_path / "longbench" / "lcc.jsonl", [{"context": "", "input": ""}])
    monkeypatch.setattr("muse_lab.cli.tasks.load_quietly", lambda *given: pytest.fail("a model was loaded"))
    outcome = run(*asked, "--task", "arc_easy,lcc", "--data", tmp_path)
    assert_refused(outcome, f"row 1 of {tmp_path}/longbench/lcc.jsonl has no field 'answers'")
    assert scripted.asked == []


def test_a_task_that_cannot_be_opened_says_how_to_continue(
    asked: list[object], scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = scripted.open

    def refuse(benchmark: Benchmark, length: int | None, *others: Any) -> Any:
        if length == 128:
            raise ValueError("lm-eval cannot make it")
        return opened(benchmark, length, *others)

    with monkeypatch.context() as patch:
        patch.setattr(scripted, "open", refuse)
        outcome = run(*asked)
    assert_refused(outcome, "lm-eval cannot make it; what is finished is in ")
    assert {(task, length) for task, length, *_ in scripted.asked} == {("niah_single_1", 64)}
    assert run(*outcome[2].rstrip().partition("continue with: muse eval tasks ")[2].split())[0] == 0
    assert len(scripted.asked) == len(set(scripted.asked)) == 16


def test_ruler_runs_what_has_data_and_says_what_has_not(
    asked: list[object], scripted: Scripted, tmp_path: Path
) -> None:
    code, _, err = run(*asked, "--task", "ruler", "--length", "64")
    assert code == 0
    (line,) = err.splitlines()
    assert line.startswith("muse: left out: niah_single_2, niah_single_3, niah_multikey_1, niah_multivalue")
    assert "DIR/paul_graham_essays/train.jsonl" in line
    assert {task for task, *_ in scripted.asked} == {"niah_single_1", "niah_multikey_2", "niah_multikey_3"}
    command = json.loads((tmp_path / "out" / "tiny.json").read_text())["commands"][0]
    assert "--task niah_single_1,niah_multikey_2,niah_multikey_3 " in command


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--task", "mmlu"), "unknown task 'mmlu'"),
        (("--task", "lcc"), "lcc has no data here: put LongBench, lcc.jsonl of data.zip as DIR/longbench/lcc.jsonl"),
        (("--task", "niah_single_2"), "niah_single_2 has no data here: put baber/paul_graham_essays"),
        (("--task", "sciq", "--data", "{folder}"), "put allenai/sciq, split test as {folder}/sciq/test.jsonl"),
        (("--data", "nowhere"), "there is no folder 'nowhere'"),
        (("--attention", "sparse"), "unknown attention 'sparse'"),
        (("--length", "many"), "cannot read the size 'many'"),
        (("--length", "2k"), "the model's context is 1024 tokens, less than 2048"),
        (("--samples", "0"), "--samples 0 leaves nothing to answer"),
        (("--name", "a/b"), "plain file name"),
        (("--name", "Index"), "--name Index would be overwritten by index.html of muse report"),
    ],
)
def test_every_mistake_is_answered_by_one_line(
    asked: list[object], scripted: Scripted, folder: Path, tmp_path: Path, changes: tuple[str, ...], message: str
) -> None:
    changed = [change.format(folder=folder) for change in changes]
    assert_refused(run(*asked, *changed), message.format(folder=folder))
    assert not (tmp_path / "out").exists()


def test_without_lm_eval_one_line_says_what_to_install(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert_refused(run(*asked), "standard tasks need lm-eval: pip install 'muse-attention[evaluation]'")
