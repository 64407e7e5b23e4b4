"""Measures of fidelity as columns of tables: titles, formats and definitions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from muse_lab.report import tree

Item = TypeVar("Item")


class Column(NamedTuple):
    measure: str
    """its name in `Fidelity.pooled` or `GradientErrors.pooled`"""
    title: str
    format: Callable[[float], str]
    definition: str

    def cell(self, pooled: Mapping[str, float]) -> str:
        """Empty where the measure is not known."""
        return self.format(pooled[self.measure]) if self.measure in pooled else ""


def _digits(number: float) -> str:
    return f"{number:.3g}"


def _share(number: float) -> str:
    return "0%" if number == 0 else f"{number:.2g}%" if (number := 100 * number) < 1 else f"{number:.1f}%"


ERROR = (
    Column(
        "relative_squared_error",
        "RSE",
        _digits,
        "Relative squared error |o - o_exact|^2 / |o_exact|^2 of a query, the mean over queries, heads and samples.",
    ),
    Column("cosine", "cosine", "{:.4f}".format, "Cosine of o and o_exact, averaged likewise."),
    Column(
        "centred_error",
        "RSE, centred",
        _digits,
        "Sum of |o - o_exact|^2 over that of |o_exact - m|^2, m being the mean o_exact: no constant hides the error.",
    ),
    Column("lse_gap", "lse gap", _digits, "lse_exact - lse, averaged over queries."),
)
TAIL = (
    Column("error_p99", "RSE 99%", _digits, "The 99th percentile over the queries of a head, averaged over heads."),
    Column(
        "error_p999", "RSE 99.9%", _digits, "The 99.9th percentile over the queries of a head, averaged over heads."
    ),
    Column("share_far_off", "RSE > 0.1", _share, "Share of queries with a larger error, averaged over heads."),
)
RETRIEVAL = (
    Column(
        "pairs_per_query",
        "pairs",
        "{:.2f}".format,
        "Buckets (a key cluster in a block) that a query retrieves, the mean over all queries.",
    ),
    Column("keys_per_query", "keys", "{:.1f}".format, "Keys that a query retrieves, the mean over all queries."),
    Column("share_retrieving", "retrieving", _share, "Share of queries that retrieve anything."),
    Column(
        "found_share",
        "found",
        _share,
        "Of exact attention's weights above 0.05 on keys outside of the query's own block and other than the first "
        "token, the share on keys that are retrieved or alone in their summary, averaged over heads that have such.",
    ),
)
LEAK = (
    Column(
        "future_influence",
        "leak",
        _digits,
        "Relative squared change of an output in the first half when the second half is replaced by the next sample's, "
        "the mean over queries, heads and samples.",
    ),
    Column("first_half_error", "RSE, first half", _digits, "RSE of the same queries."),
)
_GRADIENT = (
    "Relative squared error of a head's whole gradient, sum |{0} - {0}_exact|^2 / sum |{0}_exact|^2. The gradient of "
    "the output is Gaussian noise from a fixed seed, as large as the head's exact output."
)
GRADIENTS = (
    Column("query_gradient_error", "dq RSE", _digits, _GRADIENT.format("dq")),
    Column("key_gradient_error", "dk RSE", _digits, _GRADIENT.format("dk")),
    Column("value_gradient_error", "dv RSE", _digits, _GRADIENT.format("dv")),
)
COLUMNS = (*ERROR, *TAIL, *RETRIEVAL, *GRADIENTS)


def known(columns: Sequence[Column], pooled: Iterable[Mapping[str, float]]) -> list[Column]:
    """The columns that have a value in at least one row."""
    names = {name for row in pooled for name in row}
    return [column for column in columns if column.measure in names]


def measure_columns(
    measures: Collection[Column], items: Collection[Item], pooled: Callable[[Item], Mapping[str, float]]
) -> list[tuple[tree.Column, Callable[[Item], str]]]:
    """Columns for `Table.of`: the measures that `pooled` has for at least one item."""
    shown = known(tuple(measures), map(pooled, items))
    return [(tree.number(measure.title, measure.definition), _cell(measure, pooled)) for measure in shown]


def _cell(measure: Column, pooled: Callable[[Item], Mapping[str, float]]) -> Callable[[Item], str]:
    return lambda item: measure.cell(pooled(item))
