"""What runs that learn from needles learn to look up, and what first: the answers that their probes measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from muse_lab.evaluation.comparison.results import ComparisonResults, Run
from muse_lab.evaluation.comparison.training_curves import Answers
from muse_lab.report.plots import Axis, coloured, line_figure
from muse_lab.report.tree import Figure, Section, Table, number, shown, text

Names = Mapping[str, str]
"""What the report calls each attention, by its full name."""

_ABOUT = (
    "Nats for each token of a uid in an import, in needle documents that are no samples of the run, under the "
    "attention of the update, which is exact in a tail. They are few, some hundred tokens, and the same each time. A "
    "model that cannot look a uid up where its function was defined has to guess it."
)
_LEARNT = 1 / 2
"""Share of the first loss from which on a kind of answer counts as being learnt."""


def answers_section(results: ComparisonResults, names: Names) -> Section:
    """Not shown where no run learnt from needles."""
    tables = (answers_table(results, names), *kind_tables(results, names))
    return Section.optional("Learning to look needles up", _ABOUT, _figure(results, names), *tables)


def answers_by_attention(run: Run) -> dict[str, list[Answers]]:
    """Of each attention that they were measured under, by its full name."""
    found: dict[str, list[Answers]] = {}
    for answers in run.curves.answers:
        found.setdefault(answers.attention, []).append(answers)
    return found


def answers_table(results: ComparisonResults, names: Names) -> Table:
    rows = []
    for who, found in _measured(results, names).items():
        losses = [answers.loss for answers in found]
        chosen = (losses[0], losses[(len(losses) - 1) // 2], losses[-1], min(losses))
        rows.append((*who, str(len(losses)), *(f"{loss:.3f}" for loss in chosen)))
    titles = ("measurements", "first", "middle", "last", "lowest")
    return Table((text("run"), text("measured under"), *map(number, titles)), rows)


def kind_tables(results: ComparisonResults, names: Names) -> Iterator[Table]:
    """Whether the rest of a uid is learnt before its first token, and near needles before far ones."""
    measured = {who: found for who, found in _measured(results, names).items() if found[-1].by_kind}
    kinds = list(dict.fromkeys(kind for found in measured.values() for kind in found[-1].by_kind))
    if kinds:
        columns = (text("run"), text("measured under"), *map(number, kinds))
        last = [
            (*who, *(shown(found[-1].by_kind.get(kind), ".3f") for kind in kinds)) for who, found in measured.items()
        ]
        yield Table(columns, last, "The last measurement, by kind of answer")
        learnt = [(*who, *(_learnt(found, kind) for kind in kinds)) for who, found in measured.items()]
        yield Table(columns, learnt, "Million tokens until half of the first loss is left")


def _learnt(found: Sequence[Answers], kind: str) -> str:
    """Empty where it never is."""
    enough = _LEARNT * found[0].by_kind.get(kind, -math.inf)
    tokens = (answers.tokens for answers in found if answers.by_kind.get(kind, math.inf) <= enough)
    return next((f"{reached / 1e6:,.1f}" for reached in tokens), "")


def _figure(results: ComparisonResults, names: Names) -> Figure:
    curves = (
        (", ".join(who), [(answers.tokens / 1e6, answers.loss) for answers in found])
        for who, found in _measured(results, names).items()
    )
    x, y = Axis("tokens (millions)"), Axis("nats for a token of the answer", from_zero=True)
    return line_figure("answers", "Loss of uids in imports", coloured(curves, "."), x, y)


def _measured(results: ComparisonResults, names: Names) -> dict[tuple[str, str], list[Answers]]:
    """By the run, and by the attention that they were measured under."""
    return {
        (run.name, names[attention]): found
        for run in results.runs.values()
        for attention, found in answers_by_attention(run).items()
    }
