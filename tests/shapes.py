"""The one list of named shapes, shared by every backend's conformance tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    name: str
    config: str
    length: int
    batch: int = 1
    heads: int = 2
    key_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    is_causal: bool = True
    key_offset: float = 0.0
    """how far from 0 the keys of a head lie together, in their standard deviations and in each dimension, about"""

    def __str__(self) -> str:
        return self.name

    def tensors(self, dtype: torch.dtype, *, requires_grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Fresh query, key and value; keys and queries of unit variance, with an offset that makes the tilt matter."""
        query = torch.randn(self.batch, self.heads, self.length, self.head_dim, dtype=torch.float64) + 0.5
        key = torch.randn(self.batch, self.key_heads, self.length, self.head_dim, dtype=torch.float64)
        value = torch.randn(self.batch, self.key_heads, self.length, self.value_dim, dtype=torch.float64)
        if self.key_offset:
            key += self.key_offset * torch.randn(self.key_heads, 1, self.head_dim, dtype=torch.float64)
        query, key, value = (tensor.to(dtype).requires_grad_(requires_grad) for tensor in (query, key, value))
        return query, key, value


SHAPES = [
    Shape("one token", "QK4R1B16", length=1),
    Shape("shorter than a block", "QK4R1B64", length=63),
    Shape("one whole block", "QK4R1B64", length=64),
    Shape("just over a block", "QK4R1B64", length=65),
    Shape("ragged 1000", "Q6K5R2B128", length=1000, heads=1, key_heads=1),
    Shape("ragged 4097", "QK4R1B1k", length=4097, heads=1, key_heads=1, head_dim=8, value_dim=8),
    Shape("batch 3", "QK4R2SP2B48", length=200, batch=3),
    Shape("query heads 9 to 3", "Q5K4R2B32", length=130, heads=9, key_heads=3),
    Shape("query heads 8 to 1", "Q3K6R2B32", length=130, heads=8, key_heads=1),
    Shape("head dim 64", "QK4R1B64", length=190, head_dim=64, value_dim=64),
    Shape("head dim 80", "QK4R1B64", length=190, head_dim=80, value_dim=80),
    Shape("head dim 128", "QK4R1B64", length=190, head_dim=128, value_dim=128),
    Shape("wide values", "QK4R1B64", length=190, head_dim=16, value_dim=40),
    Shape("narrow values", "QK4R1B64", length=190, head_dim=40, value_dim=16),
    Shape("full attention", "QK4R2B48", length=200, is_causal=False),
    Shape("blocks of one token", "QK3R2B1", length=20),
    Shape("blockwise, ragged 1000", "Q6K5T0.02B128", length=1000, heads=1, key_heads=1),
    Shape("blockwise, query heads 6 to 2", "Q5K4T0.05B32,tile=8", length=130, heads=6, key_heads=2, value_dim=24),
    Shape("blockwise, full attention", "QK4T0.05B48,tile=16", length=200, is_causal=False),
]

BLOCKWISE = [
    "Q4K5T0.1B32",
    "Q4K5T0.03B32,tile=4",
    "Q4K5T0.03B32,tile=1,caution=0",
    "Q1K20T0.1B32,tile=8",
    "Q4K5T0.3B32,tile=4,search=0.05",
    "Q4K5T0.03B32,second_order=false",
    "Q4K5T0.03B32,first_order=false",
    "Q4K5TinfB32",
]

VARIANTS = [
    "Q4K5R2SP1B32",
    "Q4K5R2SP2B32",
    "Q5K3R1SP1B32",
    "Q4K5R5SP9B32",
    "Q4K5R0B32",
    "Q4K5R2B32,monopole=false",
    "Q4K5R0B32,monopole=false",
    "Q4K5R2B32,tilt=false",
    "Q1K5R2B32",
    "Q4K5R0B32,dipole=tilted",
    "Q4K5R0B32,dipole=shared",
    "Q4K5R0B32,dipole=centred",
    "Q4K5R2B32,clustering=streaming",
    "Q4K5R2B32,cap_factor=1.5,query_cap_factor=1.5",
    "Q4K5R2B32,cap_factor=none",
    *BLOCKWISE,
]
