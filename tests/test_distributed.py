"""Attention over a mesh of 1, 2 and 4 processes is that of one process. `tests/mesh_checks.py` has what they check."""

from __future__ import annotations

import functools
import socket
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("typer")
pytest.importorskip("rich")

from muse_attention.distributed import ulysses_bytes
from tests.mesh_checks import CHECKS, TIMEOUT, run
from tests.ranks import CONTEXT


@functools.cache
def reports(ranks: int) -> dict[str, list[str | None]]:
    """What went wrong in each check, by rank; all checks in the same processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        CONTEXT.Process(target=run, args=(rank, ranks, port, sending)) for rank, (_, sending) in enumerate(pipes)
    ]
    found: dict[str, list[str | None]] = {}
    try:
        for process, (_, sending) in zip(processes, pipes, strict=True):
            process.start()
            sending.close()
        waiting: list[Any] = [receiving for receiving, _ in pipes]
        while waiting and (ready := wait(waiting, timeout=TIMEOUT)):
            for connection in cast(list[Connection], ready):
                try:
                    name, _, failure = connection.recv()
                    found.setdefault(name, []).append(failure)
                except EOFError:
                    waiting.remove(connection)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


@pytest.mark.parametrize(
    ("ranks", "check"), [(ranks, check.__name__) for ranks, checks in CHECKS.items() for check in checks]
)
def test_processes_together(ranks: int, check: str) -> None:
    found = reports(ranks).get(check, [])
    assert not any(found), "\n".join(filter(None, found))
    assert len(found) == ranks, "not all ranks came to the end of it"


def test_bytes_of_a_large_model() -> None:
    """64k tokens, 32:8 heads, 8 ranks: 1/8 of the tokens, 7/8 of the heads, two bytes."""
    case = {"length": 1 << 16, "heads": 32, "head_dim": 128, "ranks": 8}
    assert ulysses_bytes(key_heads=8, **case) == (1 << 13) * (28 + 7) * 256 * 2
    assert ulysses_bytes(key_heads=2, **case) == ulysses_bytes(key_heads=8, **case)  # each of two is sent to four
    assert ulysses_bytes(key_heads=8, **case | {"ranks": 1}) == 0
    with pytest.raises(ValueError, match="do not divide; use 1, 2, 4, 8, 16 or 32 ranks"):
        ulysses_bytes(key_heads=8, **case | {"ranks": 12})
