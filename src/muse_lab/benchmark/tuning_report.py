"""The report of `muse tune`: which configuration to take, and what else was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from muse_attention.config import MuSeConfig
from muse_attention.sizes import format_size
from muse_lab.benchmark.timing import Times
from muse_lab.benchmark.tuning import Candidate, TuningResults, front
from muse_lab.records.attention_names import short_names
from muse_lab.report.fidelity_columns import ERROR, LEAK, RETRIEVAL, TAIL, measure_columns
from muse_lab.report.plots import BLACK, GREY, PALETTE, ROUNDING, Axis, Line, Rule, line_figure
from muse_lab.report.provenance import count, names_table, provenance_of
from muse_lab.report.tree import Card, Column, Figure, Note, Report, Section, Table, number, text

_TIME = (
    "Milliseconds of forward and backward of the whole operator, clustering included, over all samples and heads "
    "together, the median of the repeats."
)
_COST = "Loss of the model on the samples under the attention, minus that under exact attention, in nats."
_LOOKUP = (
    "Share of exact attention's weight on what a query must look up that lies in its own block or in buckets that it "
    "retrieves. The pooled error does not show it."
)
_LOOKUP_EXACT = "The same with keys that are alone in their summary, which is then exact."
_LOOKUPS: tuple[tuple[Column, Callable[[Candidate], str]], ...] = (
    (number("lookup", _LOOKUP), lambda one: _looked_up(one, "share")),
    (number("lookup, exact", _LOOKUP_EXACT), lambda one: _looked_up(one, "exact_share")),
)
_COLUMNS = (ERROR[0], *TAIL, *RETRIEVAL, *LEAK)


def tuning_report(results: TuningResults, file_name: str) -> Report:
    if not results.measured:
        raise ValueError("no configuration has been measured yet; run the command again to continue")
    settings = results.settings
    laid = f": {settings.laid}, which is harder than a text of that length" if settings.laid else ""
    chosen, goal = results.chosen, results.goal
    failed = [candidate.attention for candidate in results.tuned if not candidate.is_measured]
    notes = ["The front: nothing measured is both as fast and more accurate."]
    if any(candidate.lookup is not None for candidate in results.measured):
        notes.append(f"Lookups: {settings.lookups}.")
    if failed:
        notes.append(f"Too little memory for: {', '.join(failed)}.")
    facts = [
        f"Heads: {len(settings.heads)} of {settings.model}, head dim {settings.head_dim}, {settings.dtype}, on "
        f"{settings.device}: {'; '.join(settings.heads)}",
        f"Text: {settings.text}; {count(settings.samples, 'sample')} of {format_size(settings.length)} tokens{laid}",
    ]
    if results.exact is not None:
        facts.append(f"Exact attention: {_milliseconds(results.exact.forward_backward_median)} ms")
    return Report(
        f"Time against error: {file_name}",
        verdict=verdict(results),
        cards=[] if chosen is None or goal is None else [
            Card("speed-up", _speedup(results, chosen), "over exact attention"),
            *([Card("cost", f"{chosen.cost.signed()} nats")] if chosen.cost is not None else []),
            Card("RSE", f"{chosen.error:.3g}", "" if goal.error is None else f"at most {goal.error:.3g} was asked for"),
            Card("forward + backward", f"{_milliseconds(chosen.time)} ms"),
            *([Card("lookup", _looked_up(chosen, "share"))] if chosen.lookup is not None else []),
        ],
        sections=[
            Section("The front", _figure(results), table_of(results, shown(results)), *map(Note, notes)),
            Section("Everything", table_of(results, sorted(results.measured, key=lambda one: one.time))),
        ],
        names=names_table(candidate.attention for candidate in results.measured),
        provenance=provenance_of(results, *facts),
    )  # fmt: skip


def verdict(results: TuningResults) -> list[str]:
    """The configuration to take, and what to know about it, a line each."""
    measured = results.measured
    if not measured or results.exact is None:
        return ["Nothing has been measured yet; run the command again to continue"]
    chosen, goal = results.chosen, results.goal
    if chosen is None and results.cost is not None:
        return _costs_too_much(results, results.exact)
    if chosen is None:
        best = min(measured, key=lambda candidate: candidate.error)
        unreached = "The paper's sizes were not measured" if goal is None else f"Nothing measured has {goal}"
        return [
            f"{unreached}; the lowest RSE is {best.error:.3g}, of {best.attention}, in {_milliseconds(best.time)} ms"
        ]
    speedup = results.exact.forward_backward_median / chosen.time
    cost = "" if chosen.cost is None else f"{chosen.cost.signed()} nats, "
    lines = [
        f"The fastest with {goal} is {chosen.attention}: "
        f"{cost}RSE {chosen.error:.3g}, {_milliseconds(chosen.time)} ms, {speedup:.2f}x as fast as exact attention"
    ]
    if speedup <= 1:
        lines.append(
            f"Exact attention is faster here, {_milliseconds(results.exact.forward_backward_median)} ms: use that"
        )
    paper = _paper(results)
    if paper is not None and paper is not chosen:
        lines.append(
            f"The paper's method has RSE {paper.error:.3g} in {_milliseconds(paper.time)} ms ({paper.attention})"
        )
    return lines


def _costs_too_much(results: TuningResults, exact: Times) -> list[str]:
    known = [(candidate.cost, candidate) for candidate in results.faster if candidate.cost is not None]
    is_complete = len(known) == len(results.faster)
    lines = [f"Nothing {'faster than exact attention' if is_complete else 'measured so far'} has {results.goal}"]
    if known:
        cost, cheapest = min(known, key=lambda one: one[0].mean)
        lines[0] += f"; the lowest is {cost.signed()}, of {cheapest.attention}, in {_milliseconds(cheapest.time)} ms"
    if is_complete:
        lines.append(f"Exact attention takes {_milliseconds(exact.forward_backward_median)} ms: use that")
    return lines


def shown(results: TuningResults) -> list[Candidate]:
    """The front, the chosen configuration and the paper's method, from the fastest on."""
    named = [results.chosen, _paper(results)]
    candidates = [*front(results.measured), *(candidate for candidate in named if candidate is not None)]
    return sorted({candidate.attention: candidate for candidate in candidates}.values(), key=lambda one: one.time)


def table_of(results: TuningResults, candidates: Sequence[Candidate]) -> Table:
    """The first column is the attention, the others are numbers."""
    names = short_names(candidate.attention for candidate in results.measured)
    has_costs = any(candidate.cost is not None for candidate in results.measured)
    has_lookups = any(candidate.lookup is not None for candidate in results.measured)
    return Table.of(
        candidates,
        (text("attention"), lambda one: names[one.attention]),
        (number("ms", _TIME), lambda one: _milliseconds(one.time)),
        (number("speed-up", "Over exact attention."), lambda one: _speedup(results, one)),
        *[(number("cost", _COST), lambda one: one.cost and one.cost.signed())] * has_costs,
        *measure_columns(_COLUMNS, results.measured, lambda one: one.fidelity),
        *_LOOKUPS * has_lookups,
    )


def _figure(results: TuningResults) -> Figure:
    chosen, goal = results.chosen, results.goal
    lines = [
        Line("measured", _points(results.measured), GREY, "o", "", marker_size=3.5),
        Line("front", _points(front(results.measured)), PALETTE[0], "o"),
    ]
    if chosen is not None and chosen.error > ROUNDING:
        name = short_names(one.attention for one in results.measured)[chosen.attention]
        lines.append(Line(name, _points([chosen]), PALETTE[1], "*", "", marker_size=11))
    rules = [Rule(f"error {goal.error:.3g}", goal.error, GREY)] if goal is not None and goal.error else []
    if results.exact is not None:
        rules.append(Rule("exact attention", 1000 * results.exact.forward_backward_median, BLACK, is_vertical=True))
    x, y = Axis("forward + backward (ms)", log=10), Axis("relative squared error", log=10)
    return line_figure("", "Error against time, with the front as a line", lines, x, y, above=ROUNDING, rules=rules)


def _points(candidates: Sequence[Candidate]) -> list[tuple[float, float]]:
    """(milliseconds, error)"""
    return [(1000 * candidate.time, candidate.error) for candidate in candidates]


def _paper(results: TuningResults) -> Candidate | None:
    name = f"muse:{MuSeConfig.paper(results.settings.length)}"
    return next((candidate for candidate in results.measured if candidate.attention == name), None)


def _speedup(results: TuningResults, candidate: Candidate) -> str:
    return "" if results.exact is None else f"{results.exact.forward_backward_median / candidate.time:.2f}x"


def _looked_up(candidate: Candidate, share: str) -> str:
    """Empty where nothing had to be looked up."""
    return "" if candidate.lookup is None else f"{getattr(candidate.lookup, share):.1%}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"
