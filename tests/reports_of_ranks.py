"""Checks that several processes make together: what went wrong in each, by rank."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from tests.patience import PATIENCE
from tests.processes import free_port, running
from tests.ranks import CONTEXT

Reports = dict[str, list[str | None]]
"""By the name of the check: one entry of each rank that came to its end, None where nothing went wrong."""


def gather_reports(run: Callable[..., None], ranks: int, *arguments: object) -> Reports:
    """Of processes that call `run(rank, ranks, port, *arguments, connection)`, and send (check, what went wrong).

    They are killed when none has sent anything for `PATIENCE`.
    """
    port, pipes = free_port(), [CONTEXT.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        CONTEXT.Process(target=run, args=(rank, ranks, port, *arguments, sending))
        for rank, (_, sending) in enumerate(pipes)
    ]
    found: Reports = {}
    with running(*processes):
        for _, sending in pipes:
            sending.close()
        waiting: list[Any] = [receiving for receiving, _ in pipes]
        while waiting and (ready := wait(waiting, timeout=PATIENCE)):
            for connection in cast(list[Connection], ready):
                try:
                    name, failure = connection.recv()
                    found.setdefault(name, []).append(failure)
                except EOFError:
                    waiting.remove(connection)
    return found


def assert_nothing_went_wrong(found: Reports, check: str, ranks: int) -> None:
    reports = found.get(check, [])
    assert not any(reports), "\n".join(filter(None, reports))
    assert len(reports) == ranks, "not all ranks came to the end of it"
