"""MuSe attention line by line: the definition, and the oracle every backend is tested against.

Everything is dense, in the dtype of the inputs, through plain autograd. It is slow and takes memory quadratic in the
length on purpose. `blockwise.py` is the method with a tolerance, `paper.py` the paper's.
"""

from __future__ import annotations

import math

from torch import Tensor

from muse_attention.backends.reference import blockwise, paper
from muse_attention.backends.reference.result import Reference
from muse_attention.config import MuSeConfig
from muse_attention.core.call import Call
from muse_attention.core.structures import Clusters, Selection


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: MuSeConfig,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    clusters: Clusters | None = None,
    selection: Selection | None = None,
) -> Reference:
    """MuSe attention of (batch, heads, N, D) tensors; `clusters` and `selection` may be handed in, held fixed."""
    scaled = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if clusters is None:
        clusters = find_clusters(scaled.detach(), key.detach(), config, is_causal=is_causal)
    method = paper if config.tolerance is None else blockwise
    return method.attend(Call(scaled, key, value, clusters, config, is_causal, scale=1.0), selection)


def find_clusters(scaled_query: Tensor, key: Tensor, config: MuSeConfig, *, is_causal: bool) -> Clusters:
    if config.tolerance is None:
        return paper.find_clusters(scaled_query, key, config)
    return blockwise.find_clusters(scaled_query, key, config, is_causal=is_causal)
