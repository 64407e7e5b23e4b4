"""The results of `muse tune` for people: which configuration to take, tables, and the points of a picture."""

from __future__ import annotations

from collections.abc import Sequence

from muse_attention.config import MuSeConfig
from muse_attention.evaluation.attentions import in_words
from muse_attention.evaluation.page import Page, Table
from muse_attention.evaluation.tuning.candidates import Candidate, Results, choose, front
from muse_attention.fidelity_columns import ERROR, RETRIEVAL, TAIL, known, meaning
from muse_attention.machine import machine_lines
from muse_attention.markup import csv_text, fenced, markdown_line, markdown_list, markdown_table
from muse_attention.sizes import format_size

_MEASURED = (
    "Time: forward and backward of the whole operator, clustering included, over all samples and heads together, the "
    "median of the repeats. RSE: relative squared error of the output against exact attention in the same precision, "
    "pooled over all queries, heads and samples. The front: nothing measured is both as fast and more accurate."
)
_LOOKUP = (
    "Lookup: of exact attention's weight on what a query must look up, the share that lies in its own block or in "
    "buckets that it retrieves; lookup, exact: with keys that are the only one of their summary, which is as good. The "
    "pooled error does not see either."
)
_LOOKUPS = ("lookup", "lookup, exact")
_COLUMNS = (ERROR[0], *TAIL, *RETRIEVAL)


def verdict(results: Results) -> list[str]:
    """What to take, and what to know about it, a line each."""
    measured = results.measured
    if not measured or results.exact is None:
        return ["nothing has been measured yet; continue the run with --resume"]
    chosen = choose(measured, results.error)
    if chosen is None:
        best = min(measured, key=lambda candidate: candidate.error)
        return [
            f"nothing measured has an RSE of at most {results.error:g}; the lowest is {best.error:.3g}, "
            f"of {best.attention}, in {_milliseconds(best.time)} ms"
        ]
    speedup = results.exact.median / chosen.time
    lines = [
        f"the fastest with an RSE of at most {results.error:g} is {chosen.attention}: "
        f"RSE {chosen.error:.3g}, {_milliseconds(chosen.time)} ms, {speedup:.2f}x as fast as exact attention"
    ]
    if speedup <= 1:
        lines.append(f"exact attention is faster here, {_milliseconds(results.exact.median)} ms: use that")
    paper = _papers(results)
    if paper is not None and paper is not chosen:
        lines.append(
            f"the paper's method has RSE {paper.error:.3g} in {_milliseconds(paper.time)} ms ({paper.attention})"
        )
    if chosen.fidelity.get("at_budget", 0) > 0:
        share = f"{100 * chosen.fidelity['at_budget']:.0f}%"
        lines.append(f"{share} of the heads are at their budget: a larger R may lower the error")
    return lines


def shown(results: Results) -> list[Candidate]:
    """The front, what was chosen and the paper's method, from the fastest on."""
    others = [choose(results.measured, results.error), _papers(results)]
    found = [*front(results.measured), *(one for one in others if one is not None)]
    return sorted({candidate.attention: candidate for candidate in found}.values(), key=lambda one: one.time)


def table_of(results: Results, candidates: Sequence[Candidate]) -> Table:
    """The first column is the attention, the others are numbers."""
    columns = known(_COLUMNS, [candidate.fidelity for candidate in results.measured])
    has_lookups = any(candidate.lookup is not None for candidate in results.measured)
    header = ["attention", "ms", "speed-up", *(column.title for column in columns), *_LOOKUPS * has_lookups]
    rows = []
    for one in candidates:
        cells = [_milliseconds(one.time), _speedup(results, one), *(column.cell(one.fidelity) for column in columns)]
        if has_lookups:
            shares = () if one.lookup is None else (one.lookup.share, one.lookup.exact_share)
            cells += [f"{100 * share:.1f}%" for share in shares] or ["", ""]
        rows.append((one.attention, *cells))
    return tuple(header), rows


def markdown_report(results: Results, *, title: str) -> str:
    parts = [f"# {markdown_line(title)}", markdown_list(_facts(results)), fenced(results.commands)]
    parts += [markdown_list(verdict(results))]
    if results.measured:
        parts += ["## The front", markdown_table(*table_of(results, shown(results)))]
        parts += ["## Everything", markdown_table(*table_of(results, _by_time(results)))]
    return "\n\n".join([*parts, *map(markdown_line, _notes(results))]) + "\n"


def html_report(results: Results, *, title: str, picture: bytes | None) -> str:
    page = Page(title)
    for fact in _facts(results):
        page.paragraph(fact, is_note=True)
    page.code("\n".join(results.commands))
    for line in verdict(results):
        page.paragraph(line)
    if picture is not None:
        page.picture(picture, "Relative squared error against time, the front as a line")
    if results.measured:
        page.section("The front")
        page.table(*table_of(results, shown(results)))
        page.section("Everything")
        page.table(*table_of(results, _by_time(results)))
    for note in _notes(results):
        page.paragraph(note, is_note=True)
    return page.html()


def as_csv(results: Results) -> str:
    """A line for every attention; exact attention is the first."""
    measures = list(dict.fromkeys(name for candidate in results.measured for name in candidate.fidelity))
    on_front = {candidate.attention for candidate in front(results.measured)}
    chosen = choose(results.measured, results.error)
    rows: list[list[object]] = []
    if results.exact is not None:
        rows.append(["exact", f"{results.exact.median:.6g}", False, False, "", "", *[""] * len(measures)])
    for one in _by_time(results):
        shares = () if one.lookup is None else (one.lookup.share, one.lookup.exact_share)
        lookup = [f"{share:.6g}" for share in shares] or ["", ""]
        numbers = [f"{one.fidelity[name]:.6g}" if name in one.fidelity else "" for name in measures]
        is_chosen = chosen is not None and one.attention == chosen.attention
        rows.append([one.attention, f"{one.time:.6g}", one.attention in on_front, is_chosen, *lookup, *numbers])
    return csv_text(["attention", "seconds", "is_on_front", "is_chosen", "lookup", "lookup_exact", *measures], rows)


def points(candidates: Sequence[Candidate]) -> list[tuple[float, float]]:
    """(milliseconds, error)"""
    return [(1000 * candidate.time, candidate.error) for candidate in candidates]


def _by_time(results: Results) -> list[Candidate]:
    return sorted(results.measured, key=lambda candidate: candidate.time)


def _papers(results: Results) -> Candidate | None:
    name = f"muse:{MuSeConfig.paper(results.settings.length)}"
    return next((candidate for candidate in results.measured if candidate.attention == name), None)


def _speedup(results: Results, candidate: Candidate) -> str:
    return "" if results.exact is None else f"{results.exact.median / candidate.time:.2f}x"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


def _facts(results: Results) -> list[str]:
    settings = results.settings
    hardware, versions = machine_lines(results.machine)
    samples = "one sample" if settings.samples == 1 else f"{settings.samples} samples"
    facts = [
        f"Heads: {len(settings.heads)} of {settings.model}, head dim {settings.head_dim}, {settings.dtype}, on "
        f"{settings.device}: {'; '.join(settings.heads)}",
        f"Text: {settings.text}; {samples} of {format_size(settings.length)} tokens"
        + (f": {settings.laid}, which is harder than a text of that length" if settings.laid else ""),
        f"Machine: {hardware}",
        f"Versions: {versions}",
    ]
    if results.exact is not None:
        facts.insert(2, f"Exact attention: {_milliseconds(results.exact.median)} ms")
    return facts


def _notes(results: Results) -> list[str]:
    notes = [_MEASURED, meaning(candidate.fidelity for candidate in results.measured)]
    if any(candidate.lookup is not None for candidate in results.measured):
        notes.append(f"{_LOOKUP} {results.settings.lookups} lookups.")
    chosen = choose(results.measured, results.error)
    if chosen is not None:
        notes.append(f"{chosen.attention}: {in_words(chosen.attention)}.")
    failed = [candidate.attention for candidate in results.tuned if not candidate.is_measured]
    if failed:
        notes.append(f"Too little memory for: {', '.join(failed)}.")
    return [note for note in notes if note]
