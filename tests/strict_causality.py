"""Nothing later changes a bit: random cases of blockwise MuSe, for every backend.

What comes after a random position becomes something else. Before it the output and the lse keep every bit, and a loss
of what comes before it has no gradient after it. Packed documents are rows in which this holds as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from muse_attention import MuSeConfig, muse_attention, muse_attn_varlen_func
from muse_lab.synthetic import clustered_qkv


@dataclass(frozen=True)
class Combination:
    """What kernels are compiled for."""

    config: str
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class Case:
    seed: int
    combination: Combination
    heads: int
    key_heads: int
    sharpness: float
    documents: tuple[int, ...]
    """lengths; one that is not packed is a call of `muse_attention`"""
    is_packed: bool

    @property
    def length(self) -> int:
        return sum(self.documents)

    def tensors(self, seed: int, dtype: torch.dtype, device: str) -> list[Tensor]:
        tensors = clustered_qkv(
            1,
            self.heads,
            self.length,
            self.combination.head_dim,
            key_heads=self.key_heads,
            value_dim=self.combination.value_dim,
            sharpness=self.sharpness,
            topics=20,
            seed=seed,
            device=device,
            dtype=dtype,
        )
        return list(tensors)

    def attend(self, tensors: Sequence[Tensor], backend: str) -> tuple[Tensor, Tensor]:
        """(1, heads, length, value_dim) and (1, heads, length)."""
        config = self.combination.config
        if not self.is_packed:
            settings = {"is_causal": True, "enable_gqa": True, "config": config, "backend": backend}
            return muse_attention(*tensors, **settings, return_lse=True)
        ends, longest = [0, *accumulate(self.documents)], max(self.documents)
        out, lse = muse_attn_varlen_func(
            *(tensor[0].transpose(0, 1) for tensor in tensors),
            ends,
            ends,
            longest,
            longest,
            causal=True,
            config=config,
            backend=backend,
            return_lse=True,
        )
        return out.transpose(0, 1)[None], lse[None]


def draw_combination(rng: random.Random) -> Combination:
    """Any, of sizes for the CPU."""
    block, head_dim = rng.choice([8, 11, 16, 32]), rng.choice([8, 16, 33])
    config = (
        f"Q{rng.randint(1, 8)}K{rng.choice([1, 5, 16, 70])}T{rng.choice([0, 0.02, 0.1, 0.3])}B{block},"
        f"tile={rng.choice([1, 4, 16, 64])},caution={rng.choice([0, 2])},search={rng.choice(['none', 0.1, 0.01])},"
        f"first_order={rng.choice(['true', 'false'])},second_order={rng.choice(['true', 'false'])},"
        f"differentiable_aggregation={rng.choice(['true', 'false'])}"
    )
    return Combination(config, head_dim, rng.choice([head_dim, 12, 40]))


def draw_case(
    seed: int,
    combine: Callable[[random.Random], Combination] = draw_combination,
    *,
    most_blocks: int = 5,
    most_heads: int = 2,
    is_packed: bool | None = None,
) -> Case:
    """At least a little more than one block; a quarter of all cases is packed unless the caller says which are."""
    rng = random.Random(seed)
    combination = combine(rng)
    block = MuSeConfig.parse(combination.config).block_size
    key_heads = rng.randint(1, most_heads)
    if is_packed is None:
        is_packed = rng.random() < 0.25
    documents = [rng.randint(block + 1, most_blocks * block)]
    if is_packed:
        documents += [rng.choice([1, block, block + 1, documents[0], rng.randint(1, 3 * block)]) for _ in range(2)]
        rng.shuffle(documents)
    return Case(
        seed,
        combination,
        key_heads * rng.choice([1, 2]),
        key_heads,
        rng.choice([0.3, 1, 6]),
        tuple(documents),
        is_packed,
    )


def assert_nothing_later_matters(
    case: Case,
    *,
    backend: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    cuts: int = 1,
    with_gradients: bool = True,
) -> None:
    rng = random.Random(case.seed)
    inputs, others = (case.tensors(seed, dtype, device) for seed in (case.seed, case.seed + 1_000_000))
    inputs = [tensor.requires_grad_() for tensor in inputs]
    out, lse = case.attend(inputs, backend)
    weights = torch.randn_like(out), torch.randn_like(lse)
    for _ in range(cuts):
        cut = rng.randint(1, case.length - 1)
        factor = rng.choice([1, 1, 30])  # also to logits that nothing before has
        with torch.no_grad():
            changed = [
                torch.cat([old[:, :, :cut], factor * new[:, :, cut:]], 2)
                for old, new in zip(inputs, others, strict=True)
            ]
            after = case.attend(changed, backend)
        for name, found, expected in zip(("out", "lse"), after, (out, lse), strict=True):
            assert torch.equal(found[:, :, :cut], expected[:, :, :cut]), f"{name} before {cut} of {case}"
    if with_gradients:  # of what comes before the last cut
        of_past = [(part * weight)[:, :, :cut].sum() for part, weight in zip((out, lse), weights, strict=True)]
        for name, gradient in zip("qkv", torch.autograd.grad(of_past, inputs), strict=True):
            assert (gradient[:, :, cut:] == 0).all(), f"gradient of {name} after {cut} of {case}"
            assert (gradient[:, :, :cut] != 0).any(), f"no gradient of {name} before {cut} of {case}"
