"""What the fuzzer draws: shapes, configurations, layouts, values. A case is a pure function of seed and number."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention import MuSeConfig
from tests.layouts import LAYOUTS, interleaved

FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Case:
    seed: int
    number: int
    kind: str
    """`numbers`, or `poison`: something is not finite"""
    attention: str
    backend: str
    dtype: str
    batch: int
    heads: int
    key_heads: int
    length: int
    head_dim: int
    value_dim: int
    is_causal: bool
    scale: float | None
    values: str
    """what the numbers are like: a name in `VALUES`"""
    layouts: tuple[str, str, str]
    """of query, key and value: names in `LAYOUTS`"""
    gradient_layout: str
    autocast: bool

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + self.number)


def draw(seed: int, number: int, device: str = "cpu") -> Case:
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(["numbers", "poison"], [9, 1])[0]
    key_heads = rng.choice([1, 1, 2, 3])
    heads = key_heads * rng.choice([1, 1, 2, 3])
    head_dim = rng.choice([1, 2, 3, 7, 8, 16, 16, 31, 40])
    length = rng.choice([1, 2, rng.randint(3, 20), rng.randint(20, 90), rng.randint(20, 90)])
    block = rng.choice([1, rng.randint(2, 15), rng.randint(16, 40), max(1, length // 3), 200])
    backend, dtype = "torch", rng.choice(["float32", "float32", "float32", "float64", "bfloat16", "float16"])
    if device == "cuda":
        backend = "torch" if dtype == "float64" else rng.choice(["triton", "triton", "torch"])
        # Kernels are compiled for each head dimension and number of clusters, which takes seconds: few of them.
        length, head_dim, block = length * rng.choice([1, 5, 17]), rng.choice([16, 64]), rng.choice([16, 128, 200])
    attention = rng.choice(["muse"] * 6 + ["exact", "block_diagonal", "moba"])
    length = min(length, 25 * block)  # the reference walks over all blocks for each query
    if attention == "muse":
        config = draw_config(rng, block, backend)
        if device == "cuda":
            few, many = rng.choice([(4, 4), (3, 20)])
            config = config.replace(query_clusters=few, key_clusters=many)
            if config.tolerance is None:
                config = config.replace(retrieved_clusters=min(2, config.retrieved_clusters))
        attention = f"muse:{config}"
    elif attention == "block_diagonal":
        attention = f"block_diagonal:{block}"
    elif attention == "moba":
        attention = f"moba:L{block * rng.choice([1, 2, 4])}B{block}R{rng.randint(1, 4)}"
    values = rng.choice(["normal", "normal", *VALUES])
    is_large = values.startswith("logits of")
    if "dipole" in attention and is_large:
        values = "normal"  # residuals of that size are far outside of a first order: it amplifies every rounding
    if dtype == "float64" and "T" in attention and is_large:
        # Where one key has all the weight, sigma is the root of a difference that is all rounding: it has half of the
        # digits. In lower precision plain PyTorch, which has the same, is compared with.
        values = "normal"
    kinds = list(LAYOUTS)
    layouts = [rng.choice(["contiguous", *kinds]) for _ in range(3)]
    if rng.random() < 0.15:
        layouts = ["interleaved"] * 3
    return Case(
        seed=seed,
        number=number,
        kind=kind,
        attention=attention,
        backend=backend,
        dtype=dtype,
        batch=rng.choice([1, 1, 2, 3]),
        heads=heads,
        key_heads=key_heads,
        length=length,
        head_dim=head_dim,
        value_dim=rng.choice([head_dim, head_dim, rng.choice([1, 5, 8, 24]) if device == "cpu" else 24]),
        is_causal=rng.random() < 0.6,
        scale=rng.choice([None, None, None, None, 0.5, 1.0, -0.3, 0.1, 3, 1e-50, -1e-3] if device == "cpu" else _FEW),
        values=values,
        layouts=(layouts[0], layouts[1], layouts[2]),
        gradient_layout=rng.choice(["contiguous", *kinds]),
        autocast=dtype == "float32" and backend != "triton" and rng.random() < 0.05,
    )


_FEW = [None, None, None, -0.3, 0.1]
"""Scales on a GPU."""


def draw_config(rng: random.Random, block: int, backend: str) -> MuSeConfig:
    key_clusters = rng.choice([rng.randint(1, 6), rng.randint(1, 6), 40])
    tolerance = rng.choice([None, None, None, 0.3, 0.1, 0.01, 0.0, math.inf])
    if tolerance is not None:
        return MuSeConfig(
            query_clusters=rng.randint(1, 6),
            key_clusters=key_clusters,
            tolerance=tolerance,
            caution=rng.choice([0, 2, 2, 30]),
            search=rng.choice([None, 0.3, 0.01]),
            tile=rng.choice([1, 4, 16, 64]),
            first_order=rng.choice([None, True, False]),
            second_order=rng.choice([None, True, False]),
            block_size=block,
            differentiable_aggregation=rng.random() < 0.6,
            seed=rng.randint(0, 3),
        )
    dipole = rng.choice(["none"] * 5 + ["tilted", "shared", "centred"]) if backend == "torch" else "none"
    return MuSeConfig(
        query_clusters=rng.randint(1, 6),
        key_clusters=key_clusters,
        retrieved_clusters=0 if dipole != "none" else rng.randint(0, min(7, key_clusters)),
        retrieved_blocks=rng.randint(1, 3),
        block_size=block,
        tilt=rng.random() < 0.8,
        monopole=dipole != "none" or rng.random() < 0.8,
        dipole=dipole,
        differentiable_aggregation=rng.random() < 0.6,
        clustering=rng.choice(["auto", "streaming", "lloyd"]),
        cap_factor=rng.choice([None, 1.0, 1.5, 4.0]),
        query_cap_factor=rng.choice([None, None, 1.0, 4.0]),
        seed=rng.randint(0, 3),
    )


def _sharp(size: float) -> Callable[..., None]:
    """Logits of about this size, each query with another favourite."""

    def change(query: Tensor, key: Tensor, value: Tensor) -> None:
        query *= math.sqrt(size)
        key *= math.sqrt(size)

    return change


def _offset_keys(query: Tensor, key: Tensor, value: Tensor) -> None:
    key += 30 * key[:1, :1, :1]


def _equal_keys(query: Tensor, key: Tensor, value: Tensor) -> None:
    key[:] = key[:, :, :1].clone()


def _few_distinct(query: Tensor, key: Tensor, value: Tensor) -> None:
    for tensor in (query, key, value):
        tensor[:] = tensor[:, :, torch.arange(tensor.shape[2]) % min(3, tensor.shape[2])].clone()


def _zeros(query: Tensor, key: Tensor, value: Tensor) -> None:
    for tensor in (query, key, value):
        tensor.zero_()


def _outlying_key(query: Tensor, key: Tensor, value: Tensor) -> None:
    key[:, :, key.shape[2] // 3] *= 300


def _outlying_query(query: Tensor, key: Tensor, value: Tensor) -> None:
    query[:, :, -1] *= -300


def _tiny(query: Tensor, key: Tensor, value: Tensor) -> None:
    for tensor in (query, key, value):
        tensor *= 1e-30


def _large_values(query: Tensor, key: Tensor, value: Tensor) -> None:
    value *= 1e3


VALUES: dict[str, Callable[..., None]] = {
    "normal": lambda query, key, value: None,
    "logits of 20": _sharp(20),
    "logits of 600": _sharp(600),
    "logits of 2000": _sharp(2000),
    "offset keys": _offset_keys,
    "equal keys": _equal_keys,
    "few distinct": _few_distinct,
    "zeros": _zeros,
    "outlying key": _outlying_key,
    "outlying query": _outlying_query,
    "tiny": _tiny,
    "large values": _large_values,
}


def make_inputs(case: Case, device: str) -> list[Tensor]:
    """Query, key and value in their layouts."""
    shapes = [(case.heads, case.head_dim), (case.key_heads, case.head_dim), (case.key_heads, case.value_dim)]
    generator = case.generator
    tensors = [
        torch.randn(case.batch, heads, case.length, dim, generator=generator, dtype=torch.float64)
        for heads, dim in shapes
    ]
    VALUES[case.values](*tensors)
    if case.kind == "poison":
        rng = random.Random(f"{case.seed}/{case.number}/poison")
        target, at = tensors[rng.randrange(3)], rng.randrange(case.length)
        target[..., at, rng.randrange(target.shape[-1])] = rng.choice([math.nan, math.inf, -math.inf])
    tensors = [tensor.to(FLOATS[case.dtype]).to(device) for tensor in tensors]
    if case.layouts[0] == "interleaved":
        return interleaved(tensors)
    return [LAYOUTS[layout](tensor) for layout, tensor in zip(case.layouts, tensors, strict=True)]


def make_weights(case: Case, device: str) -> tuple[Tensor, Tensor]:
    generator = case.generator
    shape = (case.batch, case.heads, case.length)
    of_out = torch.randn(*shape, case.value_dim, generator=generator).to(FLOATS[case.dtype]).to(device)
    of_lse = torch.randn(*shape, generator=generator).to(device)
    return LAYOUTS[case.gradient_layout](of_out), of_lse
