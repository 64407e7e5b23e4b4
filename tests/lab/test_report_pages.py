"""Reports as they are rendered: every kind in a browser, and what a page and its Markdown make of the description."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from muse_lab.benchmark.bench_report import bench_report
from muse_lab.benchmark.results import BenchmarkResults
from muse_lab.benchmark.timing import Times
from muse_lab.benchmark.tuning import TuningResults
from muse_lab.benchmark.tuning_report import tuning_report
from muse_lab.evaluation.comparison.comparison_report import comparison_report
from muse_lab.evaluation.fidelity.fidelity_report import fidelity_report
from muse_lab.evaluation.fidelity.presets import find_presets
from muse_lab.evaluation.lookups.lookup_report import lookup_report
from muse_lab.evaluation.loss.loss_report import loss_report
from muse_lab.evaluation.needles.models_report import needle_comparison
from muse_lab.evaluation.needles.needle_report import needle_report
from muse_lab.records.attention_names import short_names
from muse_lab.records.machine import describe_machine
from muse_lab.report.files import write_report
from muse_lab.report.html import as_html
from muse_lab.report.markdown import as_markdown
from muse_lab.report.plots import Axis, Line, line_figure
from muse_lab.report.provenance import names_table
from muse_lab.report.tree import Card, Figure, Link, Note, Provenance, Report, Section, Table, number, text
from tests.chromium import EXECUTABLE, Page, chromium
from tests.lab import (
    test_benchmark,
    test_compare,
    test_fidelity_command,
    test_lookup_command,
    test_loss,
    test_needle_reports,
    test_tune,
)

LONG = "muse:Q128K128R8SP1B8k,differentiable_aggregation=false,clustering=lloyd,query_cap_factor=4.0"


def of_fidelity() -> Report:
    requests = [request for preset in find_presets(["all"], 8192) for request in preset.requests]
    errors = {request.attention: 1 / place for place, request in enumerate(requests, 2) if request.length == 8192}
    return fidelity_report(test_fidelity_command.results_of(errors), "fidelity")


def of_loss() -> Report:
    results = test_loss.made_up(**{LONG: 0.01, "muse:Q16K16R1SP1B64": 0.4, "muse:Q32K32R2SP1B64": 0.2})
    return loss_report(dataclasses.replace(results, machine=describe_machine()), "loss")


def of_comparison() -> Report:
    sizes = {f"exact-{size}": ("exact", 10**size, 150.0, test_compare.law(10**size)) for size in (7, 8, 9)}
    results = test_compare.made_up(**sizes, muse=("muse:QK8R2B128", 10**8, 300.0, [2.0, 4.0]))
    return comparison_report(dataclasses.replace(results, commands=["muse compare a b"]))


def of_needle_comparison() -> Report:
    return needle_comparison({name: test_needle_reports.other_model(right=2) for name in ("one", "a longer name")})


def of_tuning() -> Report:
    tuned = [test_tune.candidate(2.0, 0.004, LONG), test_tune.candidate(1.0, 0.02, "muse:QK8R2B64")]
    settings = test_tune.settings(test_tune.some_captures())
    return tuning_report(
        TuningResults(describe_machine(), settings, error=0.005, exact=Times((2.0,), (4.0,)), tuned=tuned), "tuning"
    )


def of_benchmark() -> Report:
    fidelity = {"relative_squared_error": 0.01, "cosine": 0.99, "keys_per_query": 12.0}
    cases = [
        dataclasses.replace(test_benchmark.some_case(test_benchmark.SETTINGS.shape(length), name), fidelity=fidelity)
        for length in (1024, 2048)
        for name in (LONG, "moba:L64B16R2")
    ]
    return bench_report(BenchmarkResults(describe_machine(), test_benchmark.SETTINGS, ["muse bench"], cases), "bench")


KINDS: dict[str, Callable[[], Report]] = {
    "fidelity": of_fidelity,
    "loss": of_loss,
    "comparison": of_comparison,
    "needles": lambda: needle_report(test_needle_reports.hand_made(), "needles"),
    "needle comparison": of_needle_comparison,
    "lookups": lambda: lookup_report(test_lookup_command.hand_made(), "lookups"),
    "tuning": of_tuning,
    "benchmark": of_benchmark,
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if EXECUTABLE is None:
        pytest.skip("there is no Chromium here")
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_fits_a_screen_and_a_phone_in_a_browser(kind: str, browser: Page, tmp_path: Path) -> None:
    report, path = KINDS[kind](), tmp_path / "report.json"
    write_report(report, path, say=pytest.fail)
    for width in (1200, 400):
        for dark in (False, True):
            browser.open(path.with_suffix(".html"), width, dark=dark)
            assert browser.errors == []
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
            background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (
                sum(map(int, re.findall(r"\d+", background)[:3])) < 200 if dark else background == "rgb(255, 255, 255)"
            )
    assert browser.evaluate("document.images.length") == len(list(report.figures))


def test_pictures_have_the_colour_of_a_dark_page(
    browser: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of reports, which are PNG files, and those of the documentation, whose SVG files know of dark pages."""
    from docs_build import style
    from matplotlib import pyplot

    monkeypatch.setattr(style, "IMAGES", tmp_path)
    figure, axes = pyplot.subplots()
    axes.plot([0, 1], [0, 1])
    drawn = style.save(figure, "drawn.svg")
    page = tmp_path / "page.html"
    page.write_text(f"<style>:root {{ color-scheme: light dark }}</style><img src={drawn.name}>")
    report = tmp_path / "report.html"
    png = line_figure("", "", [Line("one", [(0, 0), (1, 1)], "#0072B2")], Axis("x"), Axis("y")).draw()
    report.write_text(as_html(EXAMPLE, {"curve": png}))
    for path in (page, report):
        for dark in (False, True):
            browser.open(path, 1200, dark=dark)
            left, top = browser.evaluate(
                "(r => [r.x + scrollX, r.y + scrollY])(document.images[0].getBoundingClientRect())"
            )
            colours = _colours(browser, (0, 0), (left + 2, top + 2))
            assert colours[0] == colours[1]
            assert (sum(colours[0]) < 200) is dark


def test_a_table_that_goes_on_has_a_shadow_there(browser: Page, tmp_path: Path) -> None:
    columns = [f"a column {place}" for place in range(12)]
    path = tmp_path / "wide.html"
    path.write_text(as_html(Report("t", sections=[Section("s", Table(columns, [columns]))])))
    for dark in (False, True):
        browser.open(path, 400, dark=dark)
        box = "document.querySelector('.scroll')"
        left, top, width = browser.evaluate(f"(r => [r.x, r.y, r.width])({box}.getBoundingClientRect())")
        for scrolled, shadows in ((0, [False, True]), (10_000, [True, False])):
            browser.evaluate(f"{box}.scrollLeft = {scrolled}")
            page, *ends = _colours(browser, (0, 0), (left + 1, top + 1), (left + width - 2, top + 1))
            assert [end != page for end in ends] == shadows


def _colours(browser: Page, *places: tuple[float, float]) -> list[tuple[int, ...]]:
    """Of points of the whole page."""
    from PIL import Image

    picture = Image.open(io.BytesIO(browser.screenshot())).convert("RGB")
    return [picture.getpixel((round(across), round(down))) for across, down in places]


def test_the_browser_sees_what_is_too_wide_and_what_fails(browser: Page, tmp_path: Path) -> None:
    page = tmp_path / "wide.html"
    page.write_text("<div style='width: 2000px'>x</div><script>console.error('no')</script>")
    browser.open(page, 400)
    assert browser.evaluate("document.documentElement.scrollWidth") > 400
    assert len(browser.errors) == 1
    browser.errors.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_begins_with_what_was_found(kind: str, tmp_path: Path) -> None:
    report, path = KINDS[kind](), tmp_path / "report.json"
    assert report.headline
    assert report.cards
    assert report.provenance.facts
    for _ in range(2):  # it is known as a report, which may be replaced
        write_report(dataclasses.replace(report, sections=[]), path, say=pytest.fail)
    for section in report.sections:
        for table in section.tables:
            numbers = [cells for cells, column in zip(zip(*table.rows, strict=True), table.columns, strict=False)
                       if column.is_number]  # fmt: skip
            assert all(len(cell) < 40 for cells in numbers for cell in cells), "a sentence in a column of numbers"


EXAMPLE = Report(
    "<script>",
    ["First & foremost", "then"],
    [Card("speed-up", "2x", "of it")],
    [
        Section(
            "a < b",
            Note("small"),
            "x & y",
            Link("there", "a folder/b.html", "what it says"),
            Figure("curve", "A curve", "it falls", lambda: b"png"),
            Table([text("what"), number("RSE", "Its |meaning|.")], [("8 keys of <b>", "0.5"), ("b", "")], "T"),
        )
    ],
    provenance=Provenance(["Machine: m"], ["```", "muse loss"]),
)


class _Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_stands_alone_and_shows_text_as_it_is() -> None:
    page = as_html(EXAMPLE, {"curve": b"png"})
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    assert [link for link in checker.links if not link.startswith(("#", "data:"))] == ["a%20folder/b.html"]
    assert "<script>" not in page
    assert "8 keys of &lt;b&gt;" in page
    assert page.index("First &amp; foremost") < page.index("a &lt; b") < page.index("<summary>Provenance")
    assert '<abbr title="Its |meaning|.">RSE</abbr>' in page


def test_the_column_decides_what_is_a_number() -> None:
    """A sentence that begins with a digit is still a sentence."""
    page, markdown = as_html(EXAMPLE), as_markdown(EXAMPLE)
    assert "<td>8 keys of" in page
    assert '<td class="number">0.5</td>' in page
    assert "| what | RSE |\n| --- | ---: |\n| 8 keys of \\<b\\> | 0.5 |\n| b |  |" in markdown


def test_markdown_has_the_same_parts_in_order() -> None:
    markdown = as_markdown(EXAMPLE, {"curve": "example-curve.png"})
    parts = ("# \\<script\\>", "- First \\& foremost", "| 2x |", "## a \\< b", "![A curve](example-curve.png)", "### T")
    later = (
        "small",
        "## Legend\n\n- RSE: Its",
        "## Provenance",
        "````\n```\nmuse loss\n````",
    )
    places = [markdown.index(part) for part in (*parts, *later)]
    assert places == sorted(places)
    assert "![" not in as_markdown(EXAMPLE)


def test_columns_of_one_meaning_share_a_line_of_the_legend() -> None:
    columns = [
        text("run"),
        number("a", "Loss."),
        number("b", "Loss."),
        number("exact", "in words"),
        number("c", "Gap."),
    ]
    names = Table(("name",), [("exact",)])
    report = Report("t", sections=[Section("s", Table(columns, []))], names=names)
    assert report.definitions == {"a; b": "Loss.", "c": "Gap."}


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a row of the table 'T' has another number of cells than \['a', 'b'\]"):
        Table(("a", "b"), [("1",)], "T")


def test_short_names_tell_attentions_apart() -> None:
    common = "muse:Q8K8R1SP1B64,clustering=lloyd"
    names = ["exact", common, "muse:Q8K8R1SP1B64,tilt=false,clustering=lloyd", "muse:QK4B64,clustering=streaming"]
    assert list(short_names(names).values()) == [
        "exact", "Q8K8R1SP1B64", "Q8K8R1SP1B64,tilt=false", "QK4B64,clustering=streaming"
    ]  # fmt: skip
    most = [f"muse:QK{size}B64,clustering=lloyd" for size in (4, 8, 16)]
    assert short_names([*most, "muse:QK4B64"])["muse:QK4B64"] == "muse:QK4B64", "not one name for two attentions"
    (alone,) = short_names(["muse:QK4B64,differentiable_aggregation=false,clustering=lloyd"]).values()
    assert alone == "QK4B64,differentiable_aggregation=false", "told even of one attention"
    cautious = [f"Q8K8T{tolerance}B64,caution=2.0" for tolerance in (0.1, 0.2)]
    assert list(short_names(f"muse:{name}" for name in cautious).values()) == cautious, "told even of all"
    assert names_table(names).column("attention") == names


def test_a_section_shows_its_content_by_kind() -> None:
    table, figure = Table(("a",), [("1",)]), Figure("f", "F", "drawn", lambda: b"")
    section = Section("s", Note("small"), table, "words", figure)
    assert (section.prose, section.figures, section.tables, section.notes) == (["words"], [figure], [table], ["small"])


def test_an_optional_section_without_rows_is_left_out() -> None:
    empty, full = Table(("a",), []), Table(("a",), [("1",)])
    sections = [
        Section("1", empty),
        Section("2", "words", empty, is_optional=True),
        Section("3", empty, full, is_optional=True),
    ]
    assert [section.title for section in Report("t", sections=sections).sections] == ["1", "3"]


def test_what_is_not_known_is_an_empty_cell() -> None:
    table = Table.of([1, None], (number("n"), lambda item: item), (text("word"), lambda item: item and "one"))
    assert table.rows == [("1", "one"), ("", "")]
