"""The pipeline, in float64 where float32 is too coarse for its logits.

The backward pass finds the weights again from the lse: `p = exp(s - L)`. In float32 an `L` of 600 is rounded by up to
3e-5, and so is every weight. Plain PyTorch keeps the weights and has no such error. So a float32 call on a CPU whose
lse turns out large is computed again in float64, and its lse is kept in float64 for the backward pass. On a GPU that
would wait for the device: there, float32 is computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muse_attention.backends import pipeline
from muse_attention.config import MuSeConfig
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Clusters, Partial, Selection

LARGEST_LSE = 64.0
"""From here on, float32 would cost the weights six of their 24 bits."""


def lse_dtype(query: Tensor, backend: str) -> torch.dtype:
    """What `forward` returns the lse in: float64 where it may have been computed so."""
    may_repeat = backend == "torch" and query.dtype == torch.float32 and query.device.type == "cpu"
    return torch.float64 if may_repeat else compute_dtype(query.dtype)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Clusters,
    chosen: Selection | None,
    config: MuSeConfig,
    *,
    is_causal: bool,
    scale: float,
    backend: str,
) -> tuple[Partial, Selection, Tensor]:
    """`pipeline.forward`, its lse in `lse_dtype`."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Partial, Selection, Tensor]:
        return pipeline.forward(
            query, key, value, clusters, chosen, config, is_causal=is_causal, scale=scale, backend=backend
        )

    merged, selected, memory = attend(query, key, value)
    if _is_too_coarse(query, merged.lse, backend):
        merged, selected, memory = attend(query.double(), key.double(), value.double())
    return Partial(merged.out.to(query.dtype), merged.lse.to(lse_dtype(query, backend))), selected, memory


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Clusters,
    selected: Selection,
    merged: Partial,
    memory: Tensor,
    config: MuSeConfig,
    *,
    is_causal: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`pipeline.backward`, in the precision that `forward` ended up with."""
    dtype = torch.float64 if _is_too_coarse(query, merged.lse, backend) else query.dtype
    wide = compute_dtype(dtype)
    return pipeline.backward(
        grad_out.to(dtype),
        None if grad_lse is None else grad_lse.to(wide),
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        clusters,
        selected,
        Partial(merged.out.to(dtype), merged.lse.to(wide)),
        memory,
        config,
        is_causal=is_causal,
        scale=scale,
        backend=backend,
    )


def _is_too_coarse(query: Tensor, lse: Tensor, backend: str) -> bool:
    """Whether a call may be repeated in float64, and has to be. A lse that is not finite counts as large."""
    if lse_dtype(query, backend) == compute_dtype(query.dtype):
        return False
    return not bool(lse.abs().max() <= LARGEST_LSE)
