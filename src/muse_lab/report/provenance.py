"""The provenance of a report's numbers, and what the short names of attentions stand for."""

from __future__ import annotations

from collections.abc import Iterable

from muse_lab.records.attention_names import in_words, short_names
from muse_lab.records.machine import machine_lines
from muse_lab.records.stored_results import StoredResults
from muse_lab.report.tree import Provenance, Table, text


def provenance_of(results: StoredResults, *facts: str) -> Provenance:
    """The facts, the machine and its versions, and the commands that measured the results."""
    hardware, versions = machine_lines(results.machine)
    return Provenance((*facts, f"Machine: {hardware}", f"Versions: {versions}"), tuple(results.commands))


def names_table(attentions: Iterable[str]) -> Table:
    """What the short names of attentions stand for."""
    columns = (text("name"), text("attention"), text("in words"))
    return Table(columns, [(short, name, in_words(name)) for name, short in short_names(attentions).items()])


def count(number: int, noun: str) -> str:
    """`one sample`, `3 samples`"""
    return f"one {noun}" if number == 1 else f"{number:,} {noun}s"
