"""Which backend serves a call: `torch` anywhere, `triton` on CUDA, `reference` on request."""

from __future__ import annotations

import functools

from torch import Tensor

from muse_attention.backends.protocol import Backend
from muse_attention.backends.triton import limits
from muse_attention.config import MuSeConfig

BACKENDS: tuple[str, ...] = ("auto", "torch", "triton", "reference")


def resolve_backend(backend: str, query: Tensor, value: Tensor, config: MuSeConfig) -> str:
    """The backend that serves these tensors. Raises ValueError if a named backend cannot serve them."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}")
    if backend == "triton":
        obstacle = limits.why_not(query, value, config)
        if obstacle is not None:
            raise ValueError(f"backend='triton' {obstacle}, or use backend='torch'")
    if backend == "auto":
        on_gpu = query.device.type == "cuda"
        return "triton" if on_gpu and limits.why_not(query, value, config) is None else "torch"
    return backend


@functools.cache
def backend_named(name: str) -> Backend:
    """`torch` or `triton`. Each is imported where it is used: without a GPU, Triton need not be installed."""
    if name == "triton":
        from muse_attention.backends.triton.backend import TritonBackend

        return TritonBackend()
    if name == "torch":
        from muse_attention.backends.torch.backend import TorchBackend

        return TorchBackend()
    raise ValueError(f"backend={name!r} has no operators; use torch or triton")
