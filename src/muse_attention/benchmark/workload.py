"""What is measured: one attention layer's forward and backward pass on clustered synthetic data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from muse_attention.synthetic import clustered_qkv

AttentionCall = Callable[..., Tensor]
"""Anything with the call of `scaled_dot_product_attention`."""

SDPA = "sdpa"
"""The name of the baseline, which is PyTorch's own and not one of `get_attention`."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def sdpa(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    """The baseline. On CUDA it goes through cuDNN, the fastest there is, which PyTorch does not choose by itself."""
    if query.device.type != "cuda":
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    with sdpa_kernel(_FASTEST_FIRST, set_priority=True):
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal)


@dataclass(frozen=True)
class Workload:
    """Inputs (batch, heads, length, head_dim), leaves of the graph, and the gradient that arrives at the output."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    is_causal: bool

    @classmethod
    def create(
        cls,
        *,
        batch: int,
        heads: int,
        length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        is_causal: bool,
        seed: int = 0,
    ) -> Self:
        query, key, value = clustered_qkv(batch, heads, length, head_dim, seed=seed, dtype=dtype, device=device)
        generator = torch.Generator().manual_seed(seed + 1)
        grad_out = torch.randn(batch, heads, length, head_dim, generator=generator).to(device, dtype)
        for leaf in (query, key, value):
            leaf.requires_grad_()
        return cls(query, key, value, grad_out, is_causal)

    @property
    def device(self) -> torch.device:
        return self.query.device

    def forward(self, attention: AttentionCall) -> Tensor:
        """The output, recorded by autograd, as in training."""
        return attention(self.query, self.key, self.value, is_causal=self.is_causal)

    def backward(self, out: Tensor) -> None:
        """Gradients of query, key and value; `clear_gradients` drops them."""
        out.backward(self.grad_out)

    def clear_gradients(self) -> None:
        for leaf in (self.query, self.key, self.value):
            leaf.grad = None


def check_device(device: str) -> None:
    """A ValueError unless it is a device to measure on."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; use cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' needs a CUDA device, and PyTorch finds none here; use cpu")
