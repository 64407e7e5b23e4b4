"""Where the numbers of a report come from."""

from __future__ import annotations

from typing import Any, Protocol

from muse_attention.machine import machine_lines
from muse_attention.report.tree import Provenance


class _Measured(Protocol):
    @property
    def machine(self) -> dict[str, Any]: ...
    @property
    def commands(self) -> list[str]: ...


def provenance_of(results: _Measured, *facts: str) -> Provenance:
    """The facts, the machine and its versions, and the commands that measured the results."""
    hardware, versions = machine_lines(results.machine)
    return Provenance((*facts, f"Machine: {hardware}", f"Versions: {versions}"), tuple(results.commands))


def count(number: int, noun: str) -> str:
    """`one sample`, `3 samples`"""
    return f"one {noun}" if number == 1 else f"{number:,} {noun}s"
