"""What a call keeps for its backward pass, tensor by tensor, as autograd saves it: from shapes alone, without a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muse_attention import MuSeConfig, ops
from muse_attention.core.call import Call

_NAMES = (
    "queries", "keys", "values", "query centroids", "clusters of queries", "clusters of keys", "spread of keys",
    "opened clusters", "retrieved buckets", "output", "lse", "sorted order, slopes",
)  # fmt: skip
OF_EXACT = ("queries", "keys", "values", "output", "lse")
"""What exact attention keeps, too."""


class Heads(NamedTuple):
    heads: int
    key_heads: int
    head_dim: int


def kept_bytes(length: int, heads: Heads) -> dict[str, int]:
    """Bytes of a causal call in bfloat16 with the default of its length, by the kernels."""
    query, key, value = (
        torch.empty(1, number, length, heads.head_dim, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for number in (heads.heads, heads.key_heads, heads.key_heads)
    )
    config, scale = MuSeConfig.for_length(length), heads.head_dim**-0.5
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        clusters = ops.cluster(query, key, config, is_causal=True, scale=scale, backend="triton")
        ops.attend(Call(query, key, value, clusters, config, is_causal=True, scale=scale), "triton")
    return {name: tensor.nbytes for name, tensor in zip(_NAMES, saved, strict=True)}


def share_of_exact(kept: dict[str, int]) -> float:
    """All that is kept, in units of what exact attention keeps."""
    return sum(kept.values()) / sum(kept[name] for name in OF_EXACT)
