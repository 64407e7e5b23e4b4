"""The report of `muse demo`: the long call first, then the two runs."""

from __future__ import annotations

import math

from muse_attention.sizes import format_size
from muse_lab.benchmark.results import BenchmarkResults, Case
from muse_lab.benchmark.sweeps import format_heads
from muse_lab.benchmark.tables import (
    format_error,
    format_ratio,
    format_seconds,
    format_spread,
    noise_lines,
    settings_line,
)
from muse_lab.evaluation.comparison import findings
from muse_lab.evaluation.comparison.results import ComparisonResults, Run
from muse_lab.records.attention_names import EXACT
from muse_lab.report.provenance import provenance_of
from muse_lab.report.tree import Card, Link, Note, Report, Section, Table, number, text

ATTENTIONS = {"muse": "MuSe, default", "moba": "MoBA"}
"""Names and labels of the attentions of the long call, beside exact attention."""
_RSE = "|o - o_exact|² / |o_exact|² of an output, the mean over queries. It is 0 for the exact output, and 1 for zeros."
_DISTANCE = "The root of the RSE: how far an output is from the exact one, as a share of its norm."
MEANING = f"RSE: {_RSE} Distance: its root. On synthetic queries and keys that form clusters."


def demo_report(call: BenchmarkResults, training: ComparisonResults, full_comparison: str) -> Report:
    """`full_comparison` is the address of the report of `muse compare`."""
    muse = _case(call, "muse")
    ratio, error = muse.speedup_forward_backward, _error(muse)
    return Report(
        "MuSe demo",
        verdict=[call_line(call), *training_lines(training)],
        cards=[
            Card("time of one call", format_seconds(muse.times.forward_backward_median),
                 f"exact: {format_seconds(muse.sdpa_times.forward_backward_median)}; {call_size(call)}"),
            Card("speed-up of one call", format_ratio(ratio), "forward + backward"),
            Card("error (RSE)", format_error(error), f"a distance of {math.sqrt(error):.0%}, on synthetic data"),
        ],
        sections=[
            Section("One long call", call_table(call), *map(Note, noise_lines(call))),
            Section(
                "A tiny model trained with both",
                Link("the full comparison", full_comparison, "loss by position and curves of training"),
                _runs_table(training),
            ),
        ],
        provenance=provenance_of(call, f"Data of the call: {settings_line(call.settings)}",
                                 f"Data of the training: {training.settings.corpus}"),
    )  # fmt: skip


def call_size(call: BenchmarkResults) -> str:
    shape = _case(call, "muse").shape
    return f"{format_size(shape.length)} tokens, {format_heads(shape.heads, shape.key_heads)}"


def call_line(call: BenchmarkResults) -> str:
    """The long call in a sentence: time, speed-up and error."""
    muse = _case(call, "muse")
    exact_time, muse_time = (format_seconds(times.forward_backward_median) for times in (muse.sdpa_times, muse.times))
    return (
        f"One causal call on {call_size(call)}, forward and backward: exact attention took {exact_time}, MuSe "
        f"{muse_time}. MuSe is {format_ratio(muse.speedup_forward_backward)} as fast. Its RSE is "
        f"{format_error(_error(muse))}, a distance of {math.sqrt(_error(muse)):.0%} from the exact output."
    )


def call_table(call: BenchmarkResults) -> Table:
    exact = _case(call, "muse").sdpa_times
    rows = [("exact", format_seconds(exact.forward_backward_median), format_spread(exact.spread), "", "", "")]
    for name, label in ATTENTIONS.items():
        case = _case(call, name)
        rows.append(
            (
                *(label, format_seconds(case.times.forward_backward_median), format_spread(case.times.spread)),
                *(format_ratio(case.speedup_forward_backward), format_error(_error(case))),
                f"{math.sqrt(_error(case)):.0%}",
            )
        )
    columns = [text("attention"), *map(number, ("forward + backward", "spread", "speed-up"))]
    return Table([*columns, number("RSE", _RSE), number("distance", _DISTANCE)], rows)


def training_lines(training: ComparisonResults) -> list[str]:
    """What the two runs show, why MuSe was slower, and what they do not show."""
    exact, muse = training.runs.values()
    ratio = findings.speedup(training, muse)
    assert ratio is not None
    return [
        f"A tiny model trained with MuSe on {muse.tokens:,} tokens reached a held-out loss of {_loss(training, muse)} "
        f"under exact attention; trained with exact attention throughout it reached {_loss(training, exact)}.",
        f"MuSe trained at {format_ratio(ratio)} the speed of exact attention, because the tiny model reads only "
        f"{format_size(muse.recipe.length)} tokens at a time: exact attention to so few keys costs less than finding "
        "clusters and summaries. MuSe is for sequences of 16k tokens or more, like the one of the call.",
        f"What this does not show: the end of training. The model saw {muse.tokens / muse.parameters:.1f} tokens for "
        "each parameter, where the paper has 20, and there is one seed.",
    ]


def _runs_table(training: ComparisonResults) -> Table:
    return Table.of(
        training.runs.values(),
        (text("trained with"), lambda run: run.name),
        (number("held-out loss, tested: exact"), lambda run: _loss(training, run)),
        (number("tokens/s"), lambda run: f"{run.curves.speeds[run.recipe.attention].tokens_per_second:,.0f}"),
    )


def _loss(training: ComparisonResults, run: Run) -> str:
    loss = training.loss(run, EXACT)
    assert loss is not None
    return f"{loss.mean:.3f}"


def _case(call: BenchmarkResults, name: str) -> Case:
    return next(case for case in call.cases if case.request.attention == name)


def _error(case: Case) -> float:
    return case.fidelity["relative_squared_error"]
