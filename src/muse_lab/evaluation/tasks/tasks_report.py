"""The report of `muse eval tasks`."""

from __future__ import annotations

from collections.abc import Sequence

from muse_attention.sizes import format_size
from muse_lab.evaluation.means import Mean, Share
from muse_lab.evaluation.tasks.answers import Answer, TaskAnswers, TaskResults
from muse_lab.evaluation.tasks.benchmarks import RULER
from muse_lab.records.attention_names import EXACT, block_size_of, short_names
from muse_lab.report.markup import csv_text
from muse_lab.report.provenance import count, names_table, provenance_of
from muse_lab.report.tree import Card, Note, Report, Section, Table, number, text

_SCORE = (
    "Of lm-eval, without examples before the question and without a chat template: acc and acc_norm of ARC-Easy and "
    "SciQ, the share of the needles found (string_match_all) of RULER, and the edit similarity of LongBench's code "
    "completion. Where every sample is right or wrong, the 95% Wilson interval is in parentheses; elsewhere ± is the "
    "standard error of the mean over samples."
)
_GAP = "Score less that of exact attention on the same samples, ± the standard error of the difference in each sample."
_LONGER = "Samples on which MuSe is more than exact attention: those up to one block long are attended to exactly."
_PREFILL = Note(
    "An attention runs in prefill, and decoding is exact. MuSe clusters the whole prompt, so a later token can move a "
    "centroid, and with it the approximation error of an earlier output."
)
_DATA = Note(
    "Samples are those of the published set only if their number is that of the published set, and the hash that of "
    "its file. RULER's samples are made with the model's tokenizer: their hash is of themselves."
)


def tasks_report(results: TaskResults, file_name: str) -> Report:
    if not results.cells:
        raise ValueError("no sample has been answered yet; run the command again to continue")
    settings = results.settings
    limit = "" if settings.limit is None else f", at most {settings.limit} samples of each task"
    there = {task for task, _ in results.cells}
    absent = [benchmark.name for benchmark in RULER if benchmark.name not in there]
    notes = [_PREFILL]
    if absent and len(absent) < len(RULER):
        notes.append(Note(f"Needle tasks of RULER that are not here: {', '.join(absent)}."))
    return Report(
        f"Standard tasks: {file_name}",
        verdict=[*_verdict(results), f"{settings.model}, {settings.harness}{limit}."],
        cards=_cards(results),
        sections=[
            Section.of("Scores", scores_table(results), *notes),
            Section.optional("Samples that failed", failures_table(results)),
            Section.of("Data", data_table(results), _DATA),
        ],
        names=names_table(results.named),
        provenance=provenance_of(
            results,
            f"Model: {settings.model}, {settings.dtype}, on {settings.device}",
            f"Tasks: {settings.harness}{limit}",
        ),
        csv=as_csv(results),
    )


def gap_to_exact(cell: TaskAnswers, attention: str, metric: str) -> Mean | None:
    """Over the samples that both answered; None if there are none, and for exact attention itself."""
    if attention == EXACT:
        return None
    exact = {answer.index: answer.scores[metric] for answer in cell.scored(EXACT)}
    own = {answer.index: answer.scores[metric] for answer in cell.scored(attention) if answer.index in exact}
    return Mean.of_differences(list(own.values()), [exact[index] for index in own]) if own else None


def longer_than_a_block(cell: TaskAnswers, attention: str) -> int | None:
    """Samples on which MuSe is more than exact attention; None for other attentions."""
    if block_size_of(attention, 1) is None:
        return None
    found = ((answer.tokens, block_size_of(attention, answer.tokens)) for answer in cell.scored(attention))
    return sum(size is not None and tokens > size for tokens, size in found)


def scores_table(results: TaskResults) -> Table:
    names = short_names(results.named)
    rows = [
        (cell, attention, metric)
        for cell in results.cells.values()
        for attention in cell.answers
        for metric in cell.benchmark.metrics
    ]
    return Table.of(
        rows,
        (text("task"), lambda row: row[0].task),
        (text("length"), lambda row: _length(row[0])),
        (text("attention"), lambda row: names[row[1]]),
        (text("metric"), lambda row: row[2]),
        (number("score", _SCORE), lambda row: format_score(row[0].scored(row[1]), row[2])),
        (number("gap to exact", _GAP), lambda row: format_gap(*row)),
        (text("samples"), lambda row: samples_in_words(*row[:2])),
        (number("longer than a block", _LONGER), lambda row: longer_than_a_block(*row[:2])),
    )


def samples_in_words(cell: TaskAnswers, attention: str) -> str:
    """How many count, of how many there are in the published set, and what became of the others."""
    scored, failed = cell.scored(attention), cell.failed(attention)
    words = [f"{len(scored)} of {cell.published} published"]
    if failed:
        words.append(f"{len(failed)} failed")
    if missing := cell.samples - len(scored) - len(failed):
        words.append(f"{missing} not asked yet")
    if cut := sum(answer.is_cut for answer in scored):
        words.append(f"{cut} cut to the model's context")
    return ", ".join(words)


def data_table(results: TaskResults) -> Table:
    return Table.of(
        results.cells.values(),
        (text("task"), lambda cell: cell.task),
        (text("length"), _length),
        (text("data"), lambda cell: cell.data.source),
        (number("rows"), lambda cell: cell.data.rows),
        (number("published"), lambda cell: cell.published),
        (text("SHA-256"), lambda cell: cell.data.sha256),
    )


def failures_table(results: TaskResults) -> Table:
    names = short_names(results.named)
    rows = [
        (cell.task, _length(cell), names[attention], str(answer.index + 1), answer.error or "")
        for cell in results.cells.values()
        for attention in cell.answers
        for answer in cell.failed(attention)
    ]
    return Table((*map(text, ("task", "length", "attention")), number("sample"), text("failed with")), rows)


def as_csv(results: TaskResults) -> str:
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


def format_score(answers: Sequence[Answer], metric: str) -> str:
    """With the interval of a share where all scores are 0 or 1."""
    scores = [answer.scores[metric] for answer in answers]
    if not scores:
        return "-"
    if set(scores) <= {0.0, 1.0}:
        return str(Share(round(sum(scores)), len(scores)))
    return Mean.of(scores).shown(".3f")


def format_gap(cell: TaskAnswers, attention: str, metric: str) -> str:
    """Empty for exact attention itself."""
    gap = gap_to_exact(cell, attention, metric)
    return "" if attention == EXACT else "-" if gap is None else gap.shown("+.3f")


def _length(cell: TaskAnswers) -> str:
    return "" if cell.length is None else format_size(cell.length)


def _gaps(results: TaskResults) -> list[tuple[float, str, str, str]]:
    """Of each attention in each task, with the first metric: the gap, the attention, the task, and the gap in words."""
    return [
        (gap.mean, name, f"{cell.task} {_length(cell)}".rstrip(), format_gap(cell, name, metric))
        for cell in results.cells.values()
        for name in cell.answers
        for metric in cell.benchmark.metrics[:1]
        if (gap := gap_to_exact(cell, name, metric)) is not None
    ]


def _verdict(results: TaskResults) -> list[str]:
    gaps, names = _gaps(results), short_names(results.named)
    if not gaps:
        return [f"{count(len(results.cells), 'task')} under exact attention alone: nothing to compare it with."]
    _, attention, task, words = min(gaps)
    return [f"The largest loss against exact attention: {words} of {names[attention]} in {task}."]


def _cards(results: TaskResults) -> list[Card]:
    names, gaps = short_names(results.named), _gaps(results)
    answered = sum(len(cell.scored(name)) for cell in results.cells.values() for name in cell.answers)
    mean_gaps = {
        name: Mean.of([gap for gap, one, _, _ in gaps if one == name]).mean for name in names if name != EXACT and gaps
    }
    return [
        *(Card("mean gap to exact", f"{gap:+.3f}", f"{names[name]}, over tasks") for name, gap in mean_gaps.items()),
        Card("tasks", str(len(results.cells))),
        Card("answers", f"{answered:,}", f"{results.failed} failed" if results.failed else ""),
    ][-6:]
