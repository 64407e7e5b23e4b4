"""What the attention operator was called with and what it selected, for measurements of what an attention did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from muse_attention.config import MuSeConfig
from muse_attention.core.structures import Clusters, Selection


@dataclass(frozen=True)
class Call:
    """One call of `operator.attend`: every attention of the library ends in one, save the backend `reference`."""

    query: Tensor
    """(batch, query heads, N, D)"""
    key: Tensor
    """(batch, key heads, N, D)"""
    value: Tensor
    """(batch, key heads, N, Dv)"""
    clusters: Clusters
    config: MuSeConfig
    is_causal: bool
    scale: float
    backend: str
    selection: Selection
    """what came out"""


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """A list of the calls made in this context, in order. Calls inside compiled code are not recorded."""
    calls: list[Call] = []
    before = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(before)


@contextlib.contextmanager
def unrecorded_calls() -> Iterator[None]:
    """Calls made in this context are not recorded."""
    before = _calls.set(None)
    try:
        yield
    finally:
        _calls.reset(before)


def record(call: Call) -> None:
    calls = _calls.get()
    if calls is not None:
        calls.append(call)


_calls: ContextVar[list[Call] | None] = ContextVar("calls", default=None)
