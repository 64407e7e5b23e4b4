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
    "heads": Sweep(("heads", "key_heads"), (2, 4, 8, 16), "heads"),
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
    if "key_heads" in sweep.varied and settings.key_heads != settings.heads:
        raise ValueError(f"the sweep {settings.sweep} has as many key heads as heads; leave out --key-heads")
    shape = settings.shape(length)
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
    """The length, the heads where keys have fewer, and what the sweep varies if it is of the shape."""
    parts = [format_size(shape.length)]
    if shape.key_heads != shape.heads:
        parts.append(format_heads(shape.heads, shape.key_heads))
    sweep = None if sweep_name is None else find_sweep(sweep_name)
    if sweep is not None and sweep.is_of_shape:
        parts.append(f"{sweep.label} {getattr(shape, sweep.varied[0])}")
    return ", ".join(parts)


def format_heads(heads: int, key_heads: int) -> str:
    """`8 heads`, or `32:8 heads` where 32 heads of queries share 8 of keys."""
    if heads != key_heads:
        return f"{heads}:{key_heads} heads"
    return "1 head" if heads == 1 else f"{heads} heads"


def _config(request: Request) -> MuSeConfig:
    return MuSeConfig.parse(request.attention.removeprefix("muse:"))
