"""One choice of the method, or of the inputs, at many values: the others stay as they are in `BASE`."""

from __future__ import annotations

from dataclasses import dataclass

from muse_attention.benchmark.request import Request, Shape
from muse_attention.benchmark.results import Settings
from muse_attention.config import MuSeConfig
from muse_attention.sizes import format_size

BASE = MuSeConfig.parse("Q128K128R8SP1B8k")


@dataclass(frozen=True)
class Sweep:
    varied: tuple[str, ...]
    """fields of `MuSeConfig`, or of `Shape`, which all have the same value"""
    values: tuple[int, ...]
    label: str
    """what is varied, for people"""

    @property
    def is_of_shape(self) -> bool:
        return self.varied[0] in Shape._fields

    def request(self, value: int, shape: Shape) -> Request:
        changes = dict.fromkeys(self.varied, value)
        if self.is_of_shape:
            return Request(f"muse:{BASE}", shape._replace(**changes))
        return Request(f"muse:{BASE.replace(**changes)}", shape)

    def value_of(self, request: Request) -> int:
        varied = request.shape if self.is_of_shape else _config(request)
        value: int = getattr(varied, self.varied[0])
        return value


SWEEPS = {
    "clusters": Sweep(("query_clusters", "key_clusters"), (32, 64, 128, 256), "clusters of queries and of keys"),
    "retrieved": Sweep(("retrieved_clusters",), (1, 2, 4, 8, 16), "retrieved clusters"),
    "blocks-retrieved": Sweep(("retrieved_blocks",), (1, 2, 4), "retrieved blocks of a cluster"),
    "block-size": Sweep(("block_size",), (2048, 4096, 8192, 16384), "block size"),
    "head-dim": Sweep(("head_dim",), (64, 128), "head dim"),
    "heads": Sweep(("heads",), (2, 4, 8, 16), "heads"),
}


def find_sweep(name: str) -> Sweep:
    if name not in SWEEPS:
        raise ValueError(f"unknown sweep {name!r}; use one of {', '.join(SWEEPS)}")
    return SWEEPS[name]


def sweep_requests(settings: Settings, length: int) -> tuple[Request, ...]:
    """MuSe at every value of the sweep, save where a single block holds the whole length: that is exact attention."""
    if settings.sweep is None:
        raise ValueError("the settings name no sweep")
    sweep = find_sweep(settings.sweep)
    shape = Shape(length, settings.heads, settings.head_dim)
    requests = [sweep.request(value, shape) for value in sweep.values]
    approximate = tuple(request for request in requests if _config(request).block_size < length)
    if not approximate:
        smallest = min(_config(request).block_size for request in requests)
        raise ValueError(
            f"the sweep {settings.sweep} needs a length above {format_size(smallest)}, not {format_size(length)}: "
            "up to the size of a block attention is exact"
        )
    return approximate


def format_shape(shape: Shape, sweep_name: str | None) -> str:
    """The length, and the heads or head dimension where the sweep is over them."""
    length = format_size(shape.length)
    sweep = None if sweep_name is None else find_sweep(sweep_name)
    if sweep is None or not sweep.is_of_shape:
        return length
    return f"{length}, {sweep.label} {getattr(shape, sweep.varied[0])}"


def _config(request: Request) -> MuSeConfig:
    return MuSeConfig.parse(request.attention.removeprefix("muse:"))
