"""The report of `muse eval needles`, with the paper's numbers beside."""

from __future__ import annotations

import statistics

from muse_attention.sizes import format_size
from muse_lab.evaluation.needles import panels
from muse_lab.evaluation.needles.results import NeedleResults
from muse_lab.evaluation.needles.statistics import (
    Asked,
    difference,
    failures,
    in_order,
    is_exact,
    share,
)
from muse_lab.pretraining.needles.samples import depth_of
from muse_lab.records.attention_names import EXACT, block_size_of, short_names
from muse_lab.records.means import WILSON, Mean
from muse_lab.report.provenance import names_table, provenance_of
from muse_lab.report.tree import Note, Report, Section, Table, number, shown, text

TASK = (
    "Somewhere in a repository a file defines a function whose name ends in a random uid of eight digits; the last "
    "file imports it, and the model completes the uid. Depth is where the definition is, as a share of the context: "
    "each of nine buckets is a tenth of it, named by its middle. multi-key has 2 or 4 other definitions; multi-query "
    "asks for 2 or 4, one after another, each right answer being fed before the next question."
)
PREFILL = Note(
    "The attention reads the prompt, and predicts the first token of the first uid. What follows attends exactly to "
    "the keys and values that it left."
)
_PLACES = Note(
    "Tokens are those of the uid, each given the right ones before it, and right if no other is more probable. Greedy "
    "generation may break a tie in another way."
)
_AGAINST = "Difference in percentage points on the same samples, ± its standard error over samples."
_SUMMARY = (
    number("n", "Questions."),
    *(
        column
        for name in panels.MEASURES
        for column in (number(name, panels.DEFINITIONS[name]), number(f"{name}: against exact", _AGAINST))
    ),
    number("log-probability", "Log-probability of the uid in nats, the mean over questions."),
    number("tokens right", "Share of the uid's tokens that are the most probable, each given those before it."),
    number("rank", "Mean number of tokens that are more probable than that of the uid."),
    number("failed", "Samples that ended in an error. They count in no share."),
)
_PAPER = """\
single        | 2547 | 97.80 ± 0.29% | 98.35 ± 0.25%
multi-key-2   | 2475 | 92.73 ± 0.52% | 98.46 ± 0.25%
multi-key-4   | 2421 | 81.50 ± 0.79% | 97.36 ± 0.33%
multi-query-2 | 538  | 88.48 ± 1.38% | 98.70 ± 0.49%
multi-query-4 | 1060 | 83.58 ± 1.14% | 98.77 ± 0.34%"""


def needle_report(results: NeedleResults, file_name: str) -> Report:
    if len(failures(results)) == len(results.measured):
        raise ValueError("no sample has been answered yet; run the command again to continue")
    settings = results.settings
    failed = Table.of(
        failures(results),
        (text("attention"), lambda failure: failure[0].attention),
        (text("length, kind"), lambda failure: panels.title_of(failure[0].length, failure[0].kind)),
        (number("depth"), lambda failure: f"{depth_of(failure[0].bucket):.2f}"),
        (number("sample"), lambda failure: failure[0].number),
        (text("error"), lambda failure: failure[1]),
    )
    columns = columns_of(results)
    warnings = [f"Failed: {len(failed.rows)} of {len(results.measured)} samples"] if failed.rows else []
    if same := _exact_in_one_block(results):
        warnings.append(f"One block is the whole context, so MuSe is exact attention: {'; '.join(same)}")
    return Report(
        f"Needles: {file_name}",
        verdict=[
            panels.found_in_words(columns),
            WILSON,
            f"{settings.model}, in {settings.haystack}.",
            *warnings,
        ],
        cards=panels.cards(columns),
        sections=[
            Section("Attentions", TASK, summary_table(results), PREFILL),
            Section("Where errors are", places_table(results), _PLACES),
            *(
                Section(
                    f"{measure} by depth".capitalize(),
                    *panels.heat_maps(columns, measure),
                    *panels.depth_tables(columns, measure),
                )
                for measure in panels.MEASURES
            ),
            Section("Failed", failed, is_optional=True),
            paper_section(),
        ],
        names=names_table(results.named),
        provenance=provenance_of(results, *settings.facts),
    )


def columns_of(results: NeedleResults) -> dict[str, Asked]:
    """Its attentions, by their short names."""
    return {short: Asked(results, name) for name, short in short_names(results.named).items()}


def summary_table(results: NeedleResults) -> Table:
    """A row for every length, kind and attention."""
    failed = [(task.length, task.kind, task.attention) for task, _ in failures(results)]
    names, exact = short_names(results.named), Asked(results, EXACT)
    rows = []
    for cell in in_order(dict.fromkeys((task.length, task.kind, task.attention) for task in results.measured)):
        length, kind, attention = cell
        asked = Asked(results, attention)
        answers = asked.answers([(length, kind)])
        shares = []
        for measure in panels.MEASURES.values():
            gap = None if attention == EXACT else difference(asked, exact, [(length, kind)], measure)
            shares += [shown(share(answers, measure)), format_difference(gap)]
        ranks = [rank for answer in answers for rank in answer.ranks]
        rows.append(
            (
                *(names[attention], format_size(length), kind, str(len(answers)), *shares),
                f"{statistics.fmean(answer.log_probability for answer in answers):.2f}" if answers else "",
                f"{ranks.count(0) / len(ranks):.1%}" if ranks else "",
                f"{statistics.fmean(ranks):.1f}" if ranks else "",
                str(failed.count(cell) or ""),
            )
        )
    return Table((text("attention"), number("length"), text("kind"), *_SUMMARY), rows)


def places_table(results: NeedleResults) -> Table:
    """Which part of answers has errors: the attention itself predicts only the first token of the first uid."""
    rows = []
    for panel in panels.panels_of(columns_of(results)):
        for kind, together in panel.by_kind.items():
            for name, asked in panel.columns.items():
                samples = [outcome.answers for outcome in asked.samples(together).values()]
                firsts = [first for first, *_ in samples]
                shares = (
                    share(firsts, is_exact),
                    share(firsts, lambda answer: answer.ranks[0] == 0),
                    share(firsts, lambda answer: not any(answer.ranks[1:])),
                    share([answer for _, *others in samples for answer in others], is_exact),
                )
                rows.append((name, panels.title_of(panel.length, kind), *map(panels.with_number, shares)))
    shares_of = ("first question", "its first token", "its other tokens", "later questions")
    return Table((text("attention"), text("length, kind"), *map(number, shares_of)), rows)


def paper_section() -> Section:
    rows = [tuple(map(str.strip, line.split("|"))) for line in _PAPER.splitlines()]
    note = Note(
        "The paper's are models of 1B parameters at 64k, trained with exact attention or with MuSe, and all evaluated "
        "with exact attention, ± the binomial standard error. Its prompt is not printed, so these are not the same "
        "questions."
    )
    return Section("The paper", Table(("kind", "n", "exact-trained", "MuSe-trained"), rows), note)


def format_difference(difference: Mean | None) -> str:
    return "" if difference is None else difference.shown("+.1f", scale=100)


def _exact_in_one_block(results: NeedleResults) -> list[str]:
    """MuSe and the lengths at which it approximates nothing."""
    lengths: dict[str, list[int]] = {}
    for attention, length in sorted({(task.attention, task.length) for task in results.measured}):
        size = block_size_of(attention)
        if size is not None and size >= length:
            lengths.setdefault(attention, []).append(length)
    return [f"{attention} at {', '.join(map(format_size, exact_at))}" for attention, exact_at in lengths.items()]
