"""One setting of the method, or of the inputs, at many values, while the others stay fixed.

Most sweeps are the rows of a table of the paper: sizes, retrieval and blocks around `BASE`, and the summaries alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from muse_attention.config import MuSeConfig
from muse_attention.sizes import format_size
from muse_lab.benchmark.request import BenchmarkRequest, Shape
from muse_lab.benchmark.results import BenchmarkSettings

BASE = MuSeConfig.parse("Q128K128R8SP1B8k")
MONOPOLE_ONLY = BASE.replace(retrieved_clusters=0)
TOKENS = 128 * 1024
"""All sequences together, where their length is varied."""
SPAN = 16 * 1024
"""Tokens that the retrieved blocks of a cluster span, where they follow the block size."""
_SHAPE = tuple(field.name for field in dataclasses.fields(Shape))


def _same(value: int) -> int:
    return value


@dataclass(frozen=True)
class Sweep:
    label: str
    """what is varied, for people"""
    values: tuple[int, ...]
    fields: Mapping[str, Callable[[int], int]]
    """fields of `MuSeConfig` or of `Shape` as functions of the value; the first is the value itself"""
    base: MuSeConfig | None = BASE
    """the settings that do not vary; None for the default of the length"""

    def request(self, value: int, shape: Shape) -> BenchmarkRequest:
        changes: dict[str, Any] = {name: at(value) for name, at in self.fields.items()}
        shape_changes = {name: changes.pop(name) for name in self.varied_in_shape}
        base = self.base or MuSeConfig.for_length(shape.length)
        return BenchmarkRequest(f"muse:{base.replace(**changes)}", dataclasses.replace(shape, **shape_changes))

    def value_of(self, request: BenchmarkRequest) -> int:
        name = next(iter(self.fields))
        value: int = getattr(request.shape if name in _SHAPE else _config(request), name)
        return value

    @property
    def varied_in_shape(self) -> tuple[str, ...]:
        return tuple(name for name in self.fields if name in _SHAPE)


_A_SIXTEENTH: Mapping[str, Callable[[int], int]] = {"retrieved_clusters": lambda clusters: clusters // 16}
_CLUSTERS = {"query_clusters": _same, "key_clusters": _same}
_HEADS = {"heads": _same, "key_heads": _same}
_LENGTH_OF_TOKENS: Mapping[str, Callable[[int], int]] = {"length": _same, "batch": lambda length: TOKENS // length}

SWEEPS = {
    "clusters": Sweep("clusters of queries and of keys", (32, 64, 128, 256), _CLUSTERS),
    "clusters-and-retrieved": Sweep(
        "clusters of queries and of keys, a sixteenth retrieved",
        (16, 32, 64, 128, 256, 512),
        {**_CLUSTERS, **_A_SIXTEENTH},
    ),
    "query-clusters": Sweep("clusters of queries", (16, 32, 64, 128, 256), {"query_clusters": _same}),
    "key-clusters": Sweep(
        "clusters of keys, a sixteenth retrieved",
        (16, 32, 64, 128, 256),
        {"key_clusters": _same, **_A_SIXTEENTH},
    ),
    "retrieved": Sweep("retrieved clusters", (1, 2, 4, 8, 16), {"retrieved_clusters": _same}),
    "blocks-retrieved": Sweep("retrieved blocks of a cluster", (1, 2, 4), {"retrieved_blocks": _same}),
    "block-size": Sweep("block size", (2048, 4096, 8192, 16384), {"block_size": _same}),
    "block-size-of-span": Sweep(
        "block size, retrieved blocks of 16k tokens",
        (2048, 4096, 8192, 16384),
        {"block_size": _same, "retrieved_blocks": lambda block_size: SPAN // block_size},
        BASE.replace(retrieved_clusters=4),
    ),
    "monopole-length": Sweep("sequence length", (32768, 65536, 131072), _LENGTH_OF_TOKENS, MONOPOLE_ONLY),
    "monopole-length-16k": Sweep(
        "sequence length",
        (32768, 65536, 131072),
        _LENGTH_OF_TOKENS,
        MONOPOLE_ONLY.replace(query_clusters=64, key_clusters=64, block_size=16384),
    ),
    "monopole-clusters": Sweep(
        "clusters of queries and of keys", (64, 128, 256), _CLUSTERS, MONOPOLE_ONLY.replace(block_size=16384)
    ),
    "head-dim": Sweep("head dim", (64, 128), {"head_dim": _same}),
    "heads": Sweep("heads", (2, 4, 8, 16), _HEADS),
    "heads-of-default": Sweep("heads", (8, 16, 32, 64, 128), _HEADS, None),
}


def find_sweep(name: str) -> Sweep:
    if name not in SWEEPS:
        raise ValueError(f"unknown sweep {name!r}; use one of {', '.join(SWEEPS)}")
    return SWEEPS[name]


def sweep_requests(settings: BenchmarkSettings, length: int) -> tuple[BenchmarkRequest, ...]:
    """MuSe at every value of the sweep, except where a single block holds the whole length: that is exact attention.

    `length` is that of the shapes unless the sweep varies it.
    """
    assert settings.sweep is not None
    sweep = find_sweep(settings.sweep)
    _check_settings(settings, sweep)
    requests = [sweep.request(value, settings.shape(length)) for value in sweep.values]
    approximate = tuple(request for request in requests if _config(request).block_size < request.shape.length)
    if not approximate:
        smallest = min(_config(request).block_size for request in requests)
        raise ValueError(
            f"the sweep {settings.sweep} needs a length above {format_size(smallest)}, not {format_size(length)}: "
            "up to the size of a block attention is exact"
        )
    return approximate


def _check_settings(settings: BenchmarkSettings, sweep: Sweep) -> None:
    if "key_heads" in sweep.fields and settings.key_heads != settings.heads:
        raise ValueError(f"the sweep {settings.sweep} has as many key heads as heads; leave out --key-heads")
    if "batch" in sweep.fields and settings.batch != 1:
        raise ValueError(f"the sweep {settings.sweep} has batches of its own; leave out --batch")


def format_shape(shape: Shape, sweep_name: str | None) -> str:
    """The length, the heads where keys have fewer, and what the sweep varies of the shape."""
    parts = [format_size(shape.length)]
    if shape.key_heads != shape.heads:
        parts.append(format_heads(shape.heads, shape.key_heads))
    for name in () if sweep_name is None else find_sweep(sweep_name).varied_in_shape:
        if name not in ("length", "key_heads"):
            parts.append(f"{name.replace('_', ' ')} {getattr(shape, name)}")
    return ", ".join(parts)


def format_heads(heads: int, key_heads: int) -> str:
    """`8 heads`, or `32:8 heads` where 32 heads of queries share 8 of keys."""
    if heads != key_heads:
        return f"{heads}:{key_heads} heads"
    return "1 head" if heads == 1 else f"{heads} heads"


def curve_and_size(request: BenchmarkRequest, sweep_name: str | None) -> tuple[str, int]:
    """The name of the curve that a case belongs to, and its place on the axis."""
    if sweep_name is None:
        return request.attention, request.shape.length
    sweep = find_sweep(sweep_name)
    curve = "MuSe" if "length" in sweep.fields else f"MuSe at {format_size(request.shape.length)}"
    return curve, sweep.value_of(request)


def axis_label(sweep_name: str | None) -> str:
    return "sequence length" if sweep_name is None else find_sweep(sweep_name).label


def _config(request: BenchmarkRequest) -> MuSeConfig:
    return MuSeConfig.parse(request.attention.removeprefix("muse:"))
