"""Measures of fidelity as columns of tables: what they are called, how they are written, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple


class Column(NamedTuple):
    measure: str
    """its name in `Fidelity.pooled`"""
    title: str
    format: Callable[[float], str]

    @property
    def narrow_title(self) -> str:
        """In two lines, if it has several words."""
        return self.title.replace(" ", "\n", 1)

    def cell(self, pooled: Mapping[str, float]) -> str:
        """Empty where the measure is not known."""
        return self.format(pooled[self.measure]) if self.measure in pooled else ""


def _digits(number: float) -> str:
    return f"{number:.3g}"


def _share(number: float) -> str:
    return "0%" if number == 0 else f"{number:.2g}%" if (number := 100 * number) < 1 else f"{number:.1f}%"


ERROR = (
    Column("relative_squared_error", "RSE", _digits),
    Column("cosine", "cosine", "{:.4f}".format),
    Column("energy_error", "energy error", _digits),
    Column("lse_gap", "lse gap", _digits),
)
TAIL = (
    Column("error_p99", "RSE 99%", _digits),
    Column("error_p999", "RSE 99.9%", _digits),
    Column("share_far_off", "RSE > 0.1", _share),
)
RETRIEVAL = (
    Column("pairs_per_query", "pairs", "{:.2f}".format),
    Column("keys_per_query", "keys", "{:.1f}".format),
    Column("share_retrieving", "retrieving", _share),
    Column("at_budget", "at budget", _share),
)
GRADIENTS = (
    Column("query_gradient_error", "dq RSE", _digits),
    Column("key_gradient_error", "dk RSE", _digits),
    Column("value_gradient_error", "dv RSE", _digits),
)
COLUMNS = (*ERROR, *TAIL, *RETRIEVAL, *GRADIENTS)

_MEANINGS = {
    TAIL: "RSE 99% and 99.9%: what so many queries of a head do not exceed; RSE > 0.1: the share of queries above "
    "that; each averaged over heads.",
    RETRIEVAL: "Pairs: buckets (a key cluster in a block) that a query retrieves, keys: those in them, both means over "
    "all queries; retrieving: the share of queries that retrieve anything; at budget: the share of heads that would "
    "retrieve more with twice the budget (with a tolerance).",
    GRADIENTS: "dq, dk, dv: the relative squared error of a head's whole gradient, sum |dq - dq_exact|^2 / "
    "sum |dq_exact|^2, for a gradient of the output that is Gaussian noise from a fixed seed, as large as the head's "
    "exact output.",
}


def known(columns: Sequence[Column], pooled: Iterable[Mapping[str, float]]) -> list[Column]:
    """The columns that any row has something in."""
    names = {name for row in pooled for name in row}
    return [column for column in columns if column.measure in names]


def meaning(pooled: Iterable[Mapping[str, float]]) -> str:
    """What the columns beyond the errors mean, of those that are known."""
    rows = list(pooled)
    return " ".join(text for columns, text in _MEANINGS.items() if known(columns, rows))
