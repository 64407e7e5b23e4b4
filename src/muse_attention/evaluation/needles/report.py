"""The results of `muse eval needles` for people: one HTML page, Markdown, and CSV, with the paper's numbers beside."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from muse_attention.evaluation.attentions import in_words, muse_config
from muse_attention.evaluation.means import Mean
from muse_attention.evaluation.needles.results import Results
from muse_attention.evaluation.needles.samples import BUCKETS, CANDIDATES, depth_of
from muse_attention.evaluation.needles.scores import Answer
from muse_attention.evaluation.needles.statistics import (
    Measure,
    Share,
    against_exact,
    answers,
    attentions,
    by_depth,
    by_sample,
    failures,
    groups,
    is_exact,
    is_preferred,
    share,
    token_means,
)
from muse_attention.evaluation.page import Page, Table
from muse_attention.machine import machine_lines
from muse_attention.markup import csv_text, fenced, markdown_line, markdown_list, markdown_table
from muse_attention.sizes import format_size

MEASURES: dict[str, Measure] = {"exact match": is_exact, f"right of {CANDIDATES}": is_preferred}
TASK = (
    "Somewhere in a repository a file defines a function whose name ends in a random uid of eight digits; the last "
    "file imports it, and the model completes the uid. Depth is where the definition is, as a share of the context: "
    "each of nine buckets is a tenth of it, named by its middle. multi-key has 2 or 4 other definitions; multi-query "
    "asks for 2 or 4, one after another, each right answer being fed before the next question."
)
_MEASURED = (
    "Exact match: greedy generation gives the uid. Right of 8: the uid is more probable than each of "
    "seven others, those of the prompt and random ones, so chance is 12.5%. n counts questions; ± is the binomial "
    "standard error, as in the paper, which is 0 where all are right or none is, and takes the questions of one sample "
    "for independent. Against exact: the difference in percentage points on the same samples, ± its standard error "
    "over samples. Log-probability is that of the uid, in nats. Tokens right and rank are of the uid's tokens, each "
    "given the right ones before it; a rank of 0 is the most probable token."
)
PREFILL = (
    "The attention reads the prompt, and predicts the first token of the first uid. What follows attends exactly to "
    "the keys and values that it left."
)
PLACES = (
    "Tokens are those of the uid, each given the right ones before it, and right if no other is more probable. Greedy "
    "generation breaks a tie its own way."
)
ALL_KINDS = "all kinds"
_PAPER: dict[str, tuple[str, str, str]] = {
    "single": ("2547", "97.80 ± 0.29%", "98.35 ± 0.25%"),
    "multi-key-2": ("2475", "92.73 ± 0.52%", "98.46 ± 0.25%"),
    "multi-key-4": ("2421", "81.50 ± 0.79%", "97.36 ± 0.33%"),
    "multi-query-2": ("538", "88.48 ± 1.38%", "98.70 ± 0.49%"),
    "multi-query-4": ("1060", "83.58 ± 1.14%", "98.77 ± 0.34%"),
}
PAPER_IN_WORDS = (
    "The paper's are models of 1B parameters at 64k, trained with exact attention or with MuSe, and all evaluated with "
    "exact attention. Its prompt is not printed, so these are not the same questions."
)


def summary_table(results: Results) -> Table:
    """Of every length, kind and attention."""
    header = (
        *("attention", "length", "kind", "n", "exact match", "against exact"),
        *(f"right of {CANDIDATES}", "against exact", "log-probability", "tokens right", "rank", "failed"),
    )
    failed = [(task.length, task.kind, task.attention) for task, _ in failures(results)]
    rows = []
    for length, kind in groups(results):
        for attention in attentions(results, length, kind):
            found = answers(results, length, kind, attention)
            tokens = token_means(found)
            shares = []
            for measure in MEASURES.values():
                gap = None if attention == "exact" else against_exact(results, length, kind, attention, measure)
                shares += [format_share(share(found, measure)), format_difference(gap)]
            rows.append(
                (
                    *(attention, format_size(length), kind, str(len(found)), *shares),
                    f"{statistics.fmean(answer.log_probability for answer in found):.2f}" if found else "",
                    "" if tokens is None else f"{tokens.right:.1%}",
                    "" if tokens is None else f"{tokens.rank:.1f}",
                    str(failed.count((length, kind, attention)) or ""),
                )
            )
    return header, rows


def depth_table(results: Results, length: int, kind: str, measure: Measure) -> Table:
    names = attentions(results, length, kind)
    return table_by_depth({name: answers(results, length, kind, name) for name in names}, measure)


def table_by_depth(columns: Mapping[str, Sequence[Answer]], measure: Measure) -> Table:
    """A row for every depth, a column for everything that has answers."""
    shares = [by_depth(found, measure) for found in columns.values()]
    rows = [
        (f"{depth_of(bucket):.2f}", *(with_number(column[bucket]) for column in shares)) for bucket in range(BUCKETS)
    ]
    return ("depth", *columns), rows


def depth_tables(results: Results, measure: Measure) -> Iterator[tuple[str, Table]]:
    """Of everything together, if there is more than one length and kind, and of each, by title."""
    found = groups(results)
    names = attentions(results, *found[0])
    shared = [group for group in found if all(answers(results, *group, name) for name in names)]
    if len(shared) > 1:
        together = {name: [answer for group in shared for answer in answers(results, *group, name)] for name in names}
        yield "all lengths and kinds", table_by_depth(together, measure)
    for length, kind in found:
        yield title_of(length, kind), depth_table(results, length, kind, measure)


def places_table(results: Results) -> Table:
    """Where in the answers errors are: the attention itself predicts the first token of the first uid alone."""
    header = ("attention", "length, kind", "first question", "its first token", "its other tokens", "later questions")
    rows = []
    for length in dict.fromkeys(length for length, _ in groups(results)):
        kinds = [kind for tokens, kind in groups(results) if tokens == length]
        panels = {kind: [kind] for kind in kinds} | ({ALL_KINDS: kinds} if len(kinds) > 1 else {})
        for panel, together in panels.items():
            for attention in attentions(results, length, kinds[0]):
                found = [
                    outcome.answers
                    for kind in together
                    for outcome in by_sample(results, length, kind, attention).values()
                ]
                firsts = [first for first, *_ in found]
                later = [answer for _, *others in found for answer in others]
                shares = (
                    share(firsts, is_exact),
                    share(firsts, lambda answer: answer.ranks[0] == 0),
                    share(firsts, lambda answer: not any(answer.ranks[1:])),
                    share(later, is_exact),
                )
                rows.append((attention, title_of(length, panel), *map(with_number, shares)))
    return header, rows


def depth_curves(results: Results, measure: Measure) -> dict[str, dict[str, list[tuple[float, float, float]]]]:
    """Of each attention, for each length and kind by its title."""
    return {
        title_of(length, kind): {
            name: depth_curve(answers(results, length, kind, name), measure)
            for name in attentions(results, length, kind)
        }
        for length, kind in groups(results)
    }


def depth_curve(found: Sequence[Answer], measure: Measure) -> list[tuple[float, float, float]]:
    """(depth, share, standard error)"""
    return [
        (depth_of(bucket), share.value, share.standard_error)
        for bucket, share in enumerate(by_depth(found, measure))
        if share is not None
    ]


def words_table(results: Results) -> Table:
    names = dict.fromkeys(task.attention for task in results.outcomes)
    return ("attention", "in words"), [(name, in_words(name)) for name in names]


def paper_table() -> Table:
    return ("kind", "n", "exact-trained", "MuSe-trained"), [(kind, *cells) for kind, cells in _PAPER.items()]


def failure_lines(results: Results) -> list[str]:
    return [
        f"{task.attention}, {title_of(task.length, task.kind)}, depth {depth_of(task.bucket):.2f}, "
        f"sample {task.number}: {error}"
        for task, error in failures(results)
    ]


def markdown_report(results: Results, *, title: str) -> str:
    parts = [f"# {markdown_line(title)}", markdown_list(_facts(results)), fenced(results.commands)]
    parts += [TASK, markdown_table(*summary_table(results)), _MEASURED, PREFILL]
    parts += ["## Where errors are", markdown_table(*places_table(results)), PLACES]
    for name, measure in MEASURES.items():
        for panel, table in depth_tables(results, measure):
            parts += [f"## {markdown_line(f'{name}: {panel}')}", markdown_table(*table)]
    if failures(results):
        parts += ["## Failed", fenced(failure_lines(results))]
    parts += ["## The paper", markdown_table(*paper_table()), PAPER_IN_WORDS]
    return "\n\n".join(parts) + "\n"


def html_report(results: Results, *, title: str, pictures: Mapping[str, bytes]) -> str:
    """`pictures` are those there are, by the name of the measure."""
    page = Page(title)
    for fact in _facts(results):
        page.paragraph(fact, is_note=True)
    page.code("\n".join(results.commands))
    page.paragraph(TASK)
    page.section("Attentions")
    page.table(*summary_table(results))
    page.paragraph(_MEASURED, is_note=True)
    page.paragraph(PREFILL, is_note=True)
    page.table(*words_table(results))
    page.section("Where errors are")
    page.table(*places_table(results))
    page.paragraph(PLACES, is_note=True)
    show_by_depth(page, functools.partial(depth_tables, results), pictures)
    if failures(results):
        page.section("Failed")
        page.code("\n".join(failure_lines(results)))
    show_paper(page)
    return page.html()


def show_by_depth(
    page: Page, tables: Callable[[Measure], Iterable[tuple[str, Table]]], pictures: Mapping[str, bytes]
) -> None:
    """A section for each measure."""
    for name, measure in MEASURES.items():
        page.section(f"{name} by depth".capitalize())
        if name in pictures:
            page.picture(pictures[name], f"{name} against depth, one panel per kind and length")
        page.tables_beside(*((panel, *table) for panel, table in tables(measure)))


def show_paper(page: Page) -> None:
    page.section("The paper")
    page.table(*paper_table())
    page.paragraph(PAPER_IN_WORDS, is_note=True)


def as_csv(results: Results) -> str:
    """A line for every question, and for every sample that failed."""
    header = (
        *("length", "kind", "attention", "bucket", "number", "question", "depth", "uid", "generated"),
        *("exact", "preferred", "log_probability", "margin", "ranks", "error"),
    )
    rows: list[Sequence[object]] = []
    for task, outcome in results.outcomes.items():
        sample = [task.length, task.kind, task.attention, task.bucket, task.number]
        for question, answer in enumerate(outcome.answers):
            asked = [question, f"{depth_of(answer.bucket):.2f}", answer.uid, answer.generated]
            scores = [int(answer.is_exact), int(answer.is_preferred), f"{answer.log_probability:.5g}"]
            ranks = " ".join(map(str, answer.ranks))
            rows.append([*sample, *asked, *scores, f"{answer.margin:.5g}", ranks, ""])
        if outcome.error:
            rows.append([*sample, *[""] * 9, outcome.error])
    return csv_text(header, rows)


def format_share(found: Share | None) -> str:
    return "" if found is None else f"{100 * found.value:.1f} ± {100 * found.standard_error:.1f}%"


def with_number(found: Share | None) -> str:
    return "" if found is None else f"{format_share(found)} of {found.number}"


def format_difference(difference: Mean | None) -> str:
    if difference is None:
        return ""
    error = "" if difference.standard_error is None else f" ± {100 * difference.standard_error:.1f}"
    return f"{100 * difference.mean:+.1f}{error}"


def title_of(length: int, kind: str) -> str:
    return f"{kind}, {format_size(length)}"


def _facts(results: Results) -> list[str]:
    settings = results.settings
    hardware, versions = machine_lines(results.machine)
    lines = [
        f"Model: {settings.model}, {settings.dtype}, on {settings.device}",
        f"Haystack: {settings.haystack}; seed {settings.seed}",
        f"Machine: {hardware}",
        f"Versions: {versions}",
    ]
    if same := _exact_in_one_block(results):
        lines.append(f"One block is the whole context, so MuSe is exact attention: {'; '.join(same)}")
    if failed := failures(results):
        lines.append(f"Failed: {len(failed)} of {len(results.outcomes)} samples")
    return lines


def _exact_in_one_block(results: Results) -> list[str]:
    """MuSe and the lengths at which it approximates nothing."""
    lengths: dict[str, list[int]] = {}
    for attention, length in sorted({(task.attention, task.length) for task in results.outcomes}):
        config = muse_config(attention)
        if config is not None and config.block_size >= length:
            lengths.setdefault(attention, []).append(length)
    return [f"{attention} at {', '.join(map(format_size, found))}" for attention, found in lengths.items()]
