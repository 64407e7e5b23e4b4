"""Records of what the attention operator was called with and what it selected, for measurements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from muse_attention.core.call import Call
from muse_attention.core.structures import Selection


@dataclass(frozen=True, kw_only=True)
class RecordedCall(Call):
    """One call of `ops.attend`. The backend `reference` and the attentions of other libraries make none."""

    backend: str
    selection: Selection
    """what the call selected"""


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[RecordedCall]]:
    """A list of the calls made in this context, in order. Calls inside compiled code are not recorded."""
    calls: list[RecordedCall] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


@contextlib.contextmanager
def unrecorded_calls() -> Iterator[None]:
    """Calls made in this context are not recorded."""
    token = _calls.set(None)
    try:
        yield
    finally:
        _calls.reset(token)


def record(call: Call, backend: str, selection: Selection) -> None:
    calls = _calls.get()
    if calls is not None:
        calls.append(RecordedCall(**{**vars(call), "backend": backend, "selection": selection}))


_calls: ContextVar[list[RecordedCall] | None] = ContextVar("calls", default=None)
