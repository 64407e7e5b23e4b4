"""A sequence attended to in chunks against one call: outputs, lse and gradients."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import torch
from torch import Tensor

from muse_attention import ChunkedAttention, muse_attention
from tests.closeness import ROUNDING


class Split(NamedTuple):
    """A sequence, and where it is cut."""

    config: str
    heads: int
    key_heads: int
    length: int
    cuts: list[int]
    seed: int

    @classmethod
    def draw(cls, seed: int, *, longest: int = 64) -> Split:
        rng = random.Random(seed)
        block = rng.choice([7, 8, 16])
        sizes = f"Q{rng.choice([1, 3])}K{rng.choice([2, 5])}T{rng.choice([0, 0.01, 0.1, 0.5])}B{block}"
        option = rng.choice(["search=0.05", "caution=2", "first_order=false", "differentiable_aggregation=false"])
        heads, key_heads = rng.choice([(1, 1), (2, 2), (4, 2), (3, 1)])
        length = rng.randint(1, longest)
        cuts = sorted(rng.choices(range(1, length + 1), k=rng.randint(1, 5)))
        return cls(f"{sizes},tile={rng.choice([1, 4, 64])},{option}", heads, key_heads, length, cuts, seed)

    def check(
        self, *, backend: str, dtype: torch.dtype = torch.float64, device: str = "cpu", rounding: float = ROUNDING
    ) -> None:
        """Raise unless chunks give what one call gives."""
        generator = torch.Generator().manual_seed(self.seed)
        inputs = [
            (2 * torch.randn(1, heads, self.length, 8, generator=generator, dtype=torch.float64)).to(device, dtype)
            for heads in (self.heads, self.key_heads, self.key_heads)
        ]
        weights = torch.randn(1, self.heads, self.length, 9, generator=generator, dtype=torch.float64).to(device, dtype)
        results = []
        for is_whole in (True, False):
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            out, lse = self._whole(leaves, backend) if is_whole else self._chunks(leaves, backend)
            ((out * weights[..., :8]).sum() + (lse * weights[..., 8]).sum()).backward()
            results.append([out, lse, *(leaf.grad for leaf in leaves)])
        for name, one, chunks in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
            torch.testing.assert_close(
                chunks, one, rtol=rounding, atol=rounding, msg=lambda text, name=name: f"{self}, {name}: {text}"
            )

    def _whole(self, inputs: list[Tensor], backend: str) -> tuple[Tensor, Tensor]:
        settings = {"is_causal": True, "enable_gqa": True, "config": self.config, "backend": backend}
        return muse_attention(*inputs, **settings, return_lse=True)

    def _chunks(self, inputs: list[Tensor], backend: str) -> tuple[Tensor, Tensor]:
        attention = ChunkedAttention(self.config, backend=backend)
        parts = [
            attention(*(tensor[:, :, begin:end] for tensor in inputs), return_lse=True)
            for begin, end in itertools.pairwise([0, *self.cuts, self.length])
            if end > begin
        ]
        assert attention.length == self.length
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
