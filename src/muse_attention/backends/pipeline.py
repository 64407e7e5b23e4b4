"""MuSe attention as a sequence of stages, forward and backward, for every backend.

The output is one softmax over a mixed list of terms. Each stage attends to some of the terms and yields a `Partial`;
merging the partials gives the output `O` and the logsumexp `L`. No gradient flows through the merge: with
`delta = sum(dO * O) - dL`, the backward of a stage needs only `(dO, L, delta)` and its own inputs.

The own block goes through the fused operators of the device. Everything beyond it is the far field of a backend:
`stages.far_field` in PyTorch, or `kernels.far_field` in Triton, with the same functions. A new kind of term in the
softmax is a pair of functions in a stage of each, and a line in their `attend` and `attend_backward`.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from muse_attention.backends.triton.plan import Plan
from muse_attention.config import MuSeConfig
from muse_attention.core import local
from muse_attention.core.bits import number_of_words
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Clusters, Partial, Selection, SelectionShapes, Side


def find_clusters(query: Tensor, key: Tensor, config: MuSeConfig, *, scale: float, backend: str) -> Clusters:
    """Cluster the scaled queries and the keys of each head."""
    queries = Side(query, scale, config.query_clusters, config.largest_query_cluster)
    keys = Side(key, 1.0, config.key_clusters, config.largest_key_cluster)
    found, spread = _far_field(backend).find_clusters([queries, keys] if config.tilt else [keys], config)
    if not config.tilt:
        # Without a tilt every query cluster would see the same summaries, so one with centroid 0 stands for all.
        one = (
            query.new_zeros(*query.shape[:2], 1, query.shape[3], dtype=compute_dtype(query.dtype)),
            query.new_zeros(query.shape[:3], dtype=torch.int32),
        )
        found = [one, *found]
    (query_centroids, query_assignment), (key_centroids, key_assignment) = found
    return Clusters(query_centroids, query_assignment, key_centroids, key_assignment, spread)


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
    """Output and lse, the selection behind them, and the memory of what `backward` need not find again.

    A `chosen` selection is used as it is.
    """
    own = local.attend(query, key, value, config.block_size, is_causal=is_causal, scale=scale)
    shapes = selection_shapes(config, query.shape[2])
    if not has_far_field(config, query.shape[2]):
        integers = clusters.query_assignment
        nothing = Selection(*(integers.new_full((*query.shape[:3], *shape), shapes.none) for shape in shapes.both))
        return own, chosen or nothing, integers.new_empty(0)
    merged: tuple[Partial, Selection, Tensor] = _far_field(backend).attend(
        own, query, key, value, clusters, chosen, shapes, config, is_causal=is_causal, scale=scale
    )
    return merged


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
    """Gradients of query, key and value. Clusters and selection are constants."""
    own = local.attend_backward(
        grad_out, grad_lse, query, key, value, merged.out, merged.lse, config.block_size, is_causal=is_causal,
        scale=scale,
    )  # fmt: skip
    if not has_far_field(config, query.shape[2]):
        return own
    gradients: tuple[Tensor, Tensor, Tensor] = _far_field(backend).attend_backward(
        own, grad_out, grad_lse, query, key, value, clusters, selected, merged, memory, config, is_causal=is_causal,
        scale=scale,
    )  # fmt: skip
    return gradients


def has_far_field(config: MuSeConfig, length: int) -> bool:
    """Whether anything beyond a query's own block is attended to."""
    return length > config.block_size and (config.monopole or config.retrieved_clusters > 0)


def selection_shapes(config: MuSeConfig, length: int) -> SelectionShapes:
    """Room for the clusters and blocks per cluster of the paper's rule, or for the bits of all that a query may see."""
    blocks = config.number_of_blocks(length)
    if config.tolerance is not None:
        words = number_of_words(config.key_clusters)
        return SelectionShapes((words,), (blocks, words), 0)
    clusters = min(config.retrieved_clusters, config.key_clusters)
    return SelectionShapes((clusters,), (clusters, min(config.retrieved_blocks, blocks)), -1)


def memory_size(
    config: MuSeConfig, heads: int, key_heads: int, length: int, query_clusters: int, picks: int, backend: str
) -> int:
    """Integers in the memory of a forward pass."""
    if not (backend == "triton" and has_far_field(config, length)):
        return 0
    blocks = config.number_of_blocks(length)
    shapes = Plan.shapes(
        heads, key_heads, length, blocks, query_clusters, config.key_clusters, picks,
        is_ragged=config.tolerance is not None,
    )  # fmt: skip
    return Plan.size(shapes)


def _far_field(backend: str) -> ModuleType:
    """The kernels are imported where they are used: without a GPU, Triton need not be there."""
    if backend == "triton":
        from muse_attention.backends.triton import far_field as in_triton

        return in_triton
    from muse_attention.backends.torch import far_field as in_pytorch

    return in_pytorch
