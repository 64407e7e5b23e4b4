"""The results of `muse eval tasks` for people: one HTML page, Markdown, and CSV."""

from __future__ import annotations

from collections.abc import Sequence

from muse_attention.by_name import config_at
from muse_attention.evaluation.attentions import in_words, muse_config
from muse_attention.evaluation.means import Mean
from muse_attention.evaluation.page import Page, Table
from muse_attention.evaluation.tasks.answers import Answer, Cell, Results
from muse_attention.evaluation.tasks.benchmarks import RULER
from muse_attention.machine import machine_lines
from muse_attention.markup import csv_text, fenced, markdown_line, markdown_list, markdown_table
from muse_attention.sizes import format_size

_MEASURED = (
    "Scores are those of lm-eval, without examples before the question and without a chat template: acc and acc_norm "
    "of ARC-Easy and SciQ, the share of the needles found (string_match_all) of RULER, and the edit similarity of "
    "LongBench's code completion. ± is the standard error of the mean over samples, for the gap that of the difference "
    "in each sample; 0 means that all samples had the same score, not that it is certain."
)
_PREFILL = (
    "An attention runs in prefill, and decoding is exact. Samples up to one block long are attended to exactly by MuSe "
    "too: the last column says how many were longer. MuSe clusters the whole prompt, so a later token can move a "
    "centroid, and with it the approximation error of an earlier output."
)
_DATA = (
    "Samples are those of the published set only if their number is that of the published set, and the hash that of "
    "its file. RULER's samples are made with the model's tokenizer: their hash is of themselves."
)


def mean_score(answers: Sequence[Answer], metric: str) -> Mean | None:
    """None if nothing was answered."""
    return Mean.of([answer.scores[metric] for answer in answers]) if answers else None


def gap_to_exact(cell: Cell, attention: str, metric: str) -> Mean | None:
    """Over the samples that both answered; None if there are none, and for exact attention itself."""
    if attention == "exact":
        return None
    exact = {answer.index: answer.scores[metric] for answer in cell.scored("exact")}
    own = {answer.index: answer.scores[metric] for answer in cell.scored(attention) if answer.index in exact}
    return Mean.of_differences(list(own.values()), [exact[index] for index in own]) if own else None


def longer_than_a_block(cell: Cell, attention: str) -> int | None:
    """Samples on which MuSe is more than exact attention; None for other attentions."""
    if config_at(attention, 1) is None:
        return None
    found = ((answer.tokens, config_at(attention, answer.tokens)) for answer in cell.scored(attention))
    return sum(config is not None and tokens > config.block_size for tokens, config in found)


def scores_table(results: Results) -> Table:
    header = ("task", "length", "attention", "metric", "score", "gap to exact", "samples", "longer than a block")
    rows = []
    for cell in results.cells.values():
        for attention in cell.answers:
            longer = longer_than_a_block(cell, attention)
            for metric in cell.benchmark.metrics:
                rows.append(
                    (
                        cell.task,
                        "" if cell.length is None else format_size(cell.length),
                        attention,
                        metric,
                        format_score(mean_score(cell.scored(attention), metric), signed=False),
                        ""
                        if attention == "exact"
                        else format_score(gap_to_exact(cell, attention, metric), signed=True),
                        samples_in_words(cell, attention),
                        "" if longer is None else str(longer),
                    )
                )
    return header, rows


def samples_in_words(cell: Cell, attention: str) -> str:
    """How many count, of how many there are in the published set, and what became of the others."""
    scored, failed = cell.scored(attention), cell.failed(attention)
    words = [f"{len(scored)} of {cell.benchmark.published} published"]
    if failed:
        words.append(f"{len(failed)} failed")
    if missing := cell.samples - len(scored) - len(failed):
        words.append(f"{missing} not asked yet")
    if cut := sum(answer.is_cut for answer in scored):
        words.append(f"{cut} cut to the model's context")
    return ", ".join(words)


def data_table(results: Results) -> Table:
    rows = [
        (
            cell.task,
            "" if cell.length is None else format_size(cell.length),
            cell.data.source,
            str(cell.data.rows),
            str(cell.benchmark.published),
            cell.data.sha256,
        )
        for cell in results.cells.values()
    ]
    return ("task", "length", "data", "rows", "published", "SHA-256"), rows


def failures_table(results: Results) -> Table:
    rows = [
        (
            cell.task,
            "" if cell.length is None else format_size(cell.length),
            attention,
            str(answer.index + 1),
            answer.error or "",
        )
        for cell in results.cells.values()
        for attention in cell.answers
        for answer in cell.failed(attention)
    ]
    return ("task", "length", "attention", "sample", "failed with"), rows


def markdown_report(results: Results, *, title: str) -> str:
    parts = [f"# {markdown_line(title)}", markdown_list(_facts(results)), fenced(results.commands)]
    parts += [markdown_table(*scores_table(results)), *map(markdown_line, _notes(results))]
    if results.failed:
        parts += ["## Samples that failed", markdown_table(*failures_table(results))]
    parts += ["## Data", markdown_table(*data_table(results)), _DATA]
    return "\n\n".join(parts) + "\n"


def html_report(results: Results, *, title: str) -> str:
    page = Page(title)
    for fact in _facts(results):
        page.paragraph(fact, is_note=True)
    page.code("\n".join(results.commands))
    page.section("Scores")
    page.table(*scores_table(results))
    for note in _notes(results):
        page.paragraph(note, is_note=True)
    if results.failed:
        page.section("Samples that failed")
        page.table(*failures_table(results))
    page.section("Data")
    page.table(*data_table(results))
    page.paragraph(_DATA, is_note=True)
    return page.html()


def as_csv(results: Results) -> str:
    """A line for every sample, attention and metric."""
    header = ["task", "length", "attention", "sample", "tokens", "is_cut", "metric", "score", "error"]
    rows = []
    for cell in results.cells.values():
        for attention, answers in cell.answers.items():
            for index in sorted(answers):
                answer = answers[index]
                begin = [cell.task, cell.length or "", attention, index + 1, answer.tokens, answer.is_cut]
                for metric in cell.benchmark.metrics:
                    score = f"{answer.scores[metric]:.6g}" if answer.error is None else ""
                    rows.append([*begin, metric, score, answer.error or ""])
    return csv_text(header, rows)


def format_score(score: Mean | None, *, signed: bool) -> str:
    if score is None:
        return "-"
    mean = f"{score.mean:+.3f}" if signed else f"{score.mean:.3f}"
    return mean if score.standard_error is None else f"{mean} ± {score.standard_error:.3f}"


def _notes(results: Results) -> list[str]:
    attentions = dict.fromkeys(attention for cell in results.cells.values() for attention in cell.answers)
    notes = [_MEASURED, _PREFILL]
    notes += [f"{attention}: {in_words(attention)}." for attention in attentions if muse_config(attention) is not None]
    there = {task for task, _ in results.cells}
    absent = [benchmark.name for benchmark in RULER if benchmark.name not in there]
    if absent and len(absent) < len(RULER):
        notes.append(f"Needle tasks of RULER that are not here: {', '.join(absent)}.")
    return notes


def _facts(results: Results) -> list[str]:
    settings = results.settings
    hardware, versions = machine_lines(results.machine)
    limit = "" if settings.limit is None else f", at most {settings.limit} samples of each task"
    return [
        f"Model: {settings.model}, {settings.dtype}, on {settings.device}",
        f"Tasks: {settings.harness}{limit}",
        f"Machine: {hardware}",
        f"Versions: {versions}",
    ]
