"""What is measured: one attention layer's forward and backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

AttentionCall = Callable[..., Tensor]
"""A function with the signature of `scaled_dot_product_attention`."""

SDPA = "sdpa"
"""The name of the baseline, which is PyTorch's own and not one of `get_attention`."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_FASTEST_FIRST = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "FlashAttention",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient attention",
    SDPBackend.MATH: "plain matrix products",
}
"""The operators behind `scaled_dot_product_attention`, and their usual names."""


def sdpa(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, enable_gqa: bool = False) -> Tensor:
    """The baseline. On CUDA it goes through cuDNN, the fastest there is, which PyTorch does not choose by itself.

    cuDNN and FlashAttention take grouped queries as they are, without repeated keys and values.
    """
    with _fastest_first(query.device):
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=enable_gqa)


def _fastest_first(device: torch.device) -> contextlib.AbstractContextManager[None]:
    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel(list(_FASTEST_FIRST), set_priority=True)


@dataclass(frozen=True, kw_only=True)
class CallSettings:
    """Settings of calls that are measured: their device, sizes and data, and how often they run."""

    device: str
    heads: int
    key_heads: int
    """key and value heads; fewer than heads: grouped queries"""
    head_dim: int
    dtype: str
    causal: bool
    repeats: int
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError unless inputs can have these sizes."""
        for name in ("batch", "heads", "key_heads", "head_dim", "repeats"):
            size = getattr(self, name, 1)
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        if self.heads % self.key_heads:
            raise ValueError(
                f"{self.heads} heads cannot share {self.key_heads} key heads evenly; choose a --key-heads that divides "
                f"{self.heads}"
            )


@dataclass(frozen=True)
class Workload:
    """Inputs, leaves of the graph, and the gradient that arrives at the output.

    Queries are (batch, heads, length, head_dim), keys and values (batch, key heads, length, head_dim).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    is_causal: bool

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, seed: int = 0) -> Self:
        generator = torch.Generator().manual_seed(seed + 1)
        grad_out = torch.randn(*query.shape[:-1], value.shape[-1], generator=generator).to(value)
        query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
        return cls(query, key, value, grad_out, is_causal)

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of every attention call."""
        return {"is_causal": self.is_causal, "enable_gqa": self.query.shape[1] != self.key.shape[1]}

    @property
    def sdpa_backend(self) -> str:
        """The operator of PyTorch that `sdpa` goes through."""
        with _fastest_first(self.device):
            chosen = torch._fused_sdp_choice(*self.tensors, **self.arguments)
        return _FASTEST_FIRST[SDPBackend(chosen)]

    def forward(self, attention: AttentionCall) -> Tensor:
        """The output, recorded by autograd, as in training."""
        return attention(*self.tensors, **self.arguments)

    def backward(self, out: Tensor) -> None:
        """Gradients of query, key and value; `clear_gradients` drops them."""
        out.backward(self.grad_out)

    def clear_gradients(self) -> None:
        for leaf in self.tensors:
            leaf.grad = None


def check_device(device: str) -> None:
    """Raise ValueError unless it is a device to measure on."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; use cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' needs a CUDA device, and PyTorch finds none here; use cpu")
