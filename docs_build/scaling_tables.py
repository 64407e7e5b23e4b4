"""The tables of docs/scaling.md: `python -m docs_build.scaling_tables`.

Bytes are those of `ulysses_bytes`. Times and memory of attention are read from benchmarks/speed, for as many heads as
one GPU has on `SEQUENCE_RANKS[0]` ranks. Nothing is extrapolated to other lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from docs_build.kept_tensors import OF_EXACT, Heads, kept_bytes, share_of_exact
from docs_build.marked_tables import with_table
from docs_build.records import DEFAULT, SYNTHETIC, Timing, read_timings
from muse_attention.distributed import ulysses_bytes
from muse_attention.sizes import format_size

PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
HEADS, HEAD_DIM, ELEMENT_SIZE = 64, 64, 2
LENGTHS = tuple(1 << exponent for exponent in range(16, 21))
GPUS = (8, 16, 32, 64, 128, 256, 512)
SEQUENCE_RANKS = (8, 64)
"""a node, and all heads on a rank each"""
RECORDED_HEADS = HEADS // SEQUENCE_RANKS[0]
KEPT_LENGTH, KEPT_HEADS = 1 << 16, (Heads(8, 8, 64), Heads(32, 8, 128))
NODE_SPEED, NETWORK_SPEED = 450e9, 50e9
"""Bytes per second and GPU in one direction, nominal: NVLink of an H200, and a network of 400 Gbit/s."""


def make_tables(timings: list[Timing]) -> dict[str, str]:
    """Tables in Markdown, by name."""
    recorded = {timing.length: timing for timing in timings if (timing.method, timing.data) == (DEFAULT, SYNTHETIC)}
    return {
        "bytes": _bytes_table(),
        "time": _time_table(recorded),
        "memory": _memory_table(recorded),
        "kept": _kept_table(),
        "kept by length": _kept_by_length_table(),
    }


def with_tables(text: str, tables: dict[str, str]) -> str:
    """docs/scaling.md with its tables replaced."""
    for name, table in tables.items():
        text = with_table(text, table, f"<!-- {name}: python -m docs_build.scaling_tables -->")
    return text


def _bytes_table() -> str:
    """What a rank sends, forward and backward, for one layer and one sequence."""
    rows = [
        [
            str(gpus),
            f"{gpus // ranks} x {ranks}",
            *(_megabytes(2 * _sent(length, ranks)) for length in LENGTHS),
        ]
        for gpus in GPUS
        for ranks in [min(gpus, HEADS)]
    ]
    return _table(["GPUs", "mesh, data x sequence", *map(format_size, LENGTHS)], rows)


def _time_table(recorded: dict[int, Timing]) -> str:
    few, many = SEQUENCE_RANKS
    rows = []
    for length in LENGTHS:
        timing = recorded.get(length)
        inside, across = (
            2 * _sent(length, ranks) / speed for ranks, speed in ((few, NODE_SPEED), (many, NETWORK_SPEED))
        )
        row = [format_size(length), "", _milliseconds(inside), "", "", _milliseconds(across), ""]
        if timing is not None:
            own = timing.seconds * few / many
            row[1], row[3] = _milliseconds(timing.seconds), f"{inside / timing.seconds:.0%}"
            row[4], row[6] = _milliseconds(own), f"{across / own:.0%}"
        rows.append([cell or "not recorded" for cell in row])
    titles = [f"{what}, {ranks} ranks" for ranks in SEQUENCE_RANKS for what in ("MuSe", "exchange", "exchange / MuSe")]
    return _table(["length", *titles], rows)


def _memory_table(recorded: dict[int, Timing]) -> str:
    rows = []
    for length in LENGTHS:
        activation = length * RECORDED_HEADS * HEAD_DIM * ELEMENT_SIZE
        extra = recorded[length].extra_memory if length in recorded else None
        cells = [_megabytes(3 * activation), _megabytes(2 * activation)]
        rows.append([format_size(length), *cells, "not recorded" if extra is None else _megabytes(extra)])
    return _table(["length", "queries, keys, values", "exchange", "attention, with outputs and gradients"], rows)


def _kept_table() -> str:
    of_kinds = [kept_bytes(KEPT_LENGTH, heads) for heads in KEPT_HEADS]
    rows = [
        [name if name in OF_EXACT else f"*{name}*", *(f"{kept[name] / 1e6:,.1f} MB" for kept in of_kinds)]
        for name in of_kinds[0]
        if any(kept[name] for kept in of_kinds)
    ]
    rows.append(["total, relative to exact attention", *(f"{share_of_exact(kept):.2f}" for kept in of_kinds)])
    return _table(["tensor", *map(_describe, KEPT_HEADS)], rows)


def _kept_by_length_table() -> str:
    lengths = [1 << exponent for exponent in range(14, 21)]
    rows = [
        [_describe(heads), *(f"{share_of_exact(kept_bytes(length, heads)):.2f}" for length in lengths)]
        for heads in KEPT_HEADS
    ]
    return _table(["heads", *map(format_size, lengths)], rows)


def _describe(heads: Heads) -> str:
    shared = "" if heads.heads == heads.key_heads else f":{heads.key_heads}"
    return f"{heads.heads}{shared} heads of {heads.head_dim}"


def _sent(length: int, ranks: int) -> int:
    return ulysses_bytes(
        length=length, heads=HEADS, key_heads=HEADS, head_dim=HEAD_DIM, ranks=ranks, element_size=ELEMENT_SIZE
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---:"] * len(titles)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, rule, *rows))


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


if __name__ == "__main__":
    tables = make_tables(read_timings(heads=RECORDED_HEADS, head_dim=HEAD_DIM))
    PAGE.write_text(with_tables(PAGE.read_text(), tables))
    print("\n\n".join(tables.values()))
