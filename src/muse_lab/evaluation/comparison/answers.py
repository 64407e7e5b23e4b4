"""What runs trained on needles learn to look up, as measured by their probes."""

from __future__ import annotations

from collections.abc import Mapping

from muse_lab.evaluation.comparison.results import ComparisonResults
from muse_lab.evaluation.comparison.training_curves import Answers
from muse_lab.report.plots import Axis, coloured, line_figure
from muse_lab.report.tree import Figure, Section, Table, number, shown, text

Names = Mapping[str, str]
"""Short names of attentions, by their full names."""

_ABOUT = (
    "Nats for each token of a uid in an import, in needle documents that are no samples of the run, under the "
    "attention of the update, which is exact in a tail. They are some hundred tokens, the same each time. A "
    "model that cannot look a uid up where its function was defined has to guess it."
)


def answers_section(results: ComparisonResults, names: Names) -> Section:
    """Not shown where no run learnt from needles."""
    by_kind = kind_table(results, names)
    tables = [answers_table(results, names), *([by_kind] if by_kind.rows else [])]
    return Section("Learning to look needles up", _ABOUT, _figure(results, names), *tables, is_optional=True)


def answers_table(results: ComparisonResults, names: Names) -> Table:
    rows = []
    for labels, measurements in _measured(results, names).items():
        losses = [answers.loss for answers in measurements]
        chosen = (losses[0], losses[(len(losses) - 1) // 2], losses[-1], min(losses))
        rows.append((*labels, str(len(losses)), *(f"{loss:.3f}" for loss in chosen)))
    titles = ("measurements", "first", "middle", "last", "lowest")
    return Table((text("run"), text("measured under"), *map(number, titles)), rows)


def kind_table(results: ComparisonResults, names: Names) -> Table:
    """The last losses by kind of answer: first and later tokens of a uid, near and far needles."""
    measured = _measured(results, names)
    last = {labels: answers[-1].by_kind for labels, answers in measured.items() if answers[-1].by_kind}
    kinds = list(dict.fromkeys(kind for by_kind in last.values() for kind in by_kind))
    rows = [(*labels, *(shown(by_kind.get(kind), ".3f") for kind in kinds)) for labels, by_kind in last.items()]
    columns = (text("run"), text("measured under"), *map(number, kinds))
    return Table(columns, rows, "The last measurement, by kind of answer")


def _figure(results: ComparisonResults, names: Names) -> Figure:
    curves = (
        (", ".join(labels), [(answers.tokens / 1e6, answers.loss) for answers in measurements])
        for labels, measurements in _measured(results, names).items()
    )
    x, y = Axis("tokens (millions)"), Axis("nats for a token of the answer", from_zero=True)
    return line_figure("answers", "Loss of uids in imports", coloured(curves, "."), x, y)


def _measured(results: ComparisonResults, names: Names) -> dict[tuple[str, str], list[Answers]]:
    """The answers by run and by the attention that they were measured under."""
    measured: dict[tuple[str, str], list[Answers]] = {}
    for run in results.runs.values():
        for answers in run.curves.answers:
            measured.setdefault((run.name, names[answers.attention]), []).append(answers)
    return measured
