"""Text in Markdown: names are anybody's, and are shown as they are, in every report."""

from __future__ import annotations

import re

import pytest

from muse_lab.benchmark.bench_report import bench_report
from muse_lab.benchmark.results import BenchmarkResults
from muse_lab.records.machine import describe_machine
from muse_lab.report.markdown import as_markdown
from muse_lab.report.markup import fenced, markdown_line, markdown_list, markdown_table
from tests.lab.test_benchmark import SETTINGS, some_case

HOSTILE = "=cmd|' /C calc'!A0 | `x` <img src=x onerror=alert(1)> [a](javascript:b) *b* _c_ $d$ ~~e~~ &lt; \\| # f\n## g"


def as_read(markdown: str) -> str:
    """What a reader of Markdown sees of text without markup: escapes are gone."""
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", markdown)


def without_escapes(markdown: str) -> str:
    """What is left to be read as markup."""
    return re.sub(r"\\[!-/:-@\[-`{-~]", "", markdown)


@pytest.mark.parametrize("text", [HOSTILE, "a|b", "a\r\nb", "\\", "\\|", "`", "__init__", "<script>", "a\x00b\u2028c"])
def test_text_in_a_table_stays_in_its_cell(text: str) -> None:
    table = markdown_table(["run", text], [[text, "-0.5"], ["b", "+1.0 ± 2"]], [False, True])
    assert len(table.splitlines()) == 4
    for line in table.splitlines():
        assert without_escapes(line).count("|") == 3
        assert not re.search(r"[`<>\[\]*$~&]", without_escapes(line))
    _, _, first, second = table.splitlines()
    in_a_line = re.sub(r"[\s\x00]+", " ", text).strip()
    assert as_read(first) == f"| {in_a_line} | -0.5 |"
    assert second == "| b | +1.0 ± 2 |"


def test_names_of_attentions_read_as_before() -> None:
    name = "muse:Q8K8R2SP1B128,differentiable_aggregation=false"
    assert markdown_table(["a"], [[name]], [False]) == f"| a |\n| --- |\n| {name} |"
    assert markdown_line(f"{name}: 1.5 ± 0.2 (n = 3), 10% more") == f"{name}: 1.5 ± 0.2 (n = 3), 10% more"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# a", "\\# a"),
        ("- a", "\\- a"),
        ("+ a", "\\+ a"),
        ("=====", "\\====="),
        ("1. a", "1\\. a"),
        ("12) a", "12\\) a"),
        ("12 a. b", "12 a. b"),
        ("a # b - c", "a # b - c"),
        (" \n# a\n\n# b", "\\# a # b"),
        ("    a", "a"),
        ("> a", "\\> a"),
        ("", ""),
    ],
)
def test_a_line_begins_no_block(text: str, expected: str) -> None:
    assert markdown_line(text) == expected
    assert markdown_list([text, "b"]) == f"- {expected}\n- b"


def test_no_line_ends_a_fence() -> None:
    lines = ["muse compare a", "```", "````` b", "# c"]
    assert fenced(lines) == "\n".join(["``````", *lines, "``````"])
    assert fenced(["a"]) == "```\na\n```"


def test_a_benchmark_shows_names_as_they_are() -> None:
    case = some_case(SETTINGS.shape(64), HOSTILE)
    results = BenchmarkResults(describe_machine(), SETTINGS, ["muse bench\n```\n# a"], [case])
    report = as_markdown(bench_report(results, HOSTILE))
    first, *headings = [line for line in report.splitlines() if line.startswith("#")]
    assert first == f"# {markdown_line(f'Benchmark: {HOSTILE}')}"
    assert headings == ["## Time, error and memory", "## Names", "## Legend", "## Provenance", "# a"]  # that in a fence
    assert "````\nmuse bench\n```\n# a\n````" in report
    assert len([line for line in report.splitlines() if line.startswith("|")]) == 3 + 3 + 3
