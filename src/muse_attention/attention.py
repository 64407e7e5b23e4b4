"""`muse_attention`: check the arguments, choose a backend, call it."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from muse_attention import ops
from muse_attention.backends import reference
from muse_attention.backends.choice import resolve_backend
from muse_attention.config import MuSeConfig
from muse_attention.core.arguments import check_arguments
from muse_attention.core.call import Call
from muse_attention.core.cluster_shapes import ClusterShapes
from muse_attention.core.precision import compute_dtype
from muse_attention.core.sides import single_cluster
from muse_attention.core.structures import Clusters, Partial

FEW_SUMMARIES = 1 << 20
"""Up to this many summaries of a head take seconds to compute, even where exact attention would be faster."""


@overload
def muse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    config: MuSeConfig | str | None = None,
    backend: str = "auto",
    return_lse: Literal[False] = False,
    clusters: Clusters | None = None,
) -> Tensor: ...


@overload
def muse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    config: MuSeConfig | str | None = None,
    backend: str = "auto",
    return_lse: Literal[True],
    clusters: Clusters | None = None,
) -> tuple[Tensor, Tensor]: ...


def muse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    config: MuSeConfig | str | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    clusters: Clusters | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multipole Semantic Attention, with the same signature as `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: (batch, heads, length, head_dim)
        key: (batch, key heads, length, head_dim); fewer heads than `query` with `enable_gqa=True`
        value: (batch, key heads, length, value_dim)
        attn_mask: part of the signature; anything but None raises ValueError
        dropout_p: part of the signature; anything but 0.0 raises ValueError
        is_causal: attend to the past only
        scale: factor of the logits, 1/sqrt(head_dim) by default
        config: a `MuSeConfig`, its text (`"Q16K128T0.1B4k"`; without `B` the block size follows the length),
            `"paper"` for `MuSeConfig.paper(length)`, or None for `MuSeConfig.for_length(length)`
        backend: `torch` (any device), `reference` (dense, slow, the definition), `triton` (CUDA), or `auto`
        return_lse: also return the logsumexp of each query's logits, (batch, heads, length), natural logarithm,
            float32 (float64 for float64 inputs), differentiable
        clusters: a clustering from `find_clusters`, held fixed; None finds one

    Returns:
        (batch, heads, length, value_dim) in the dtype of `query`, or that and the lse.
    """
    query, factor = check_arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    settings = resolve_config(config, query.shape[2])
    chosen = resolve_backend(backend, query, value, settings)
    if clusters is not None:
        _check_clusters(clusters, query, key, settings, is_causal=is_causal)
    if chosen == "reference":
        merged = attend_by_reference(query, key, value, settings, is_causal=is_causal, scale=factor, clusters=clusters)
    else:
        query, key, value = ops.as_contiguous(query, key, value)
        if clusters is None or query.shape[2] <= settings.block_size:
            clusters = clusters_of(query, key, settings, is_causal=is_causal, scale=factor, backend=chosen)
        merged, _ = ops.attend(Call(query, key, value, clusters, settings, is_causal, factor), chosen)
    return (merged.out, merged.lse) if return_lse else merged.out


def attend_by_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: MuSeConfig,
    *,
    is_causal: bool,
    scale: float,
    clusters: Clusters | None = None,
) -> Partial:
    """Attention by the reference backend, of arguments that are checked already."""
    query, key, value = ops.cast_for_autocast(query, key, value)
    wide = compute_dtype(query.dtype)
    with torch.autocast(query.device.type, enabled=False):
        result = reference.reference_attention(
            query.to(wide), key.to(wide), value.to(wide), config, is_causal=is_causal, scale=scale, clusters=clusters
        )
    return Partial(result.out.to(query.dtype), result.lse)


def clusters_of(
    query: Tensor, key: Tensor, config: MuSeConfig, *, is_causal: bool, scale: float, backend: str
) -> Clusters:
    """The clusters of a call. A sequence of one block needs none."""
    if query.shape[2] <= config.block_size:
        return single_cluster(query, key)
    return ops.cluster(query, key, config, is_causal=is_causal, scale=scale, backend=backend)


def find_clusters(
    query: Tensor,
    key: Tensor,
    *,
    config: MuSeConfig | str | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
) -> Clusters:
    """The clustering that `muse_attention` would find: to inspect, or to pass back as `clusters` and hold fixed.

    With a tolerance it depends on `is_causal`: causal query centroids are found from earlier blocks.
    """
    query, factor = check_arguments(query, key, key, None, 0.0, is_causal, scale, True)
    settings = resolve_config(config, query.shape[2])
    chosen = resolve_backend(backend, query, key, settings)
    if chosen == "reference":
        query, key = ops.cast_for_autocast(query.detach(), key.detach())
        wide = compute_dtype(query.dtype)
        with torch.autocast(query.device.type, enabled=False):
            return reference.find_clusters(query.to(wide) * factor, key.to(wide), settings, is_causal=is_causal)
    return ops.cluster(query, key, settings, is_causal=is_causal, scale=factor, backend=chosen)


def resolve_config(config: MuSeConfig | str | None, length: int) -> MuSeConfig:
    """The configuration that the argument `config` names for a sequence of this length."""
    if config is None:
        return MuSeConfig.for_length(length)
    if isinstance(config, str):
        config = MuSeConfig.named(config, length)
    elif not isinstance(config, MuSeConfig):
        raise ValueError(
            f"config={config!r} is a {type(config).__name__}; it must be a MuSeConfig, a string like 'QK32R2B1k', or "
            "None"
        )
    if config.tolerance is None and config.retrieved_clusters > config.key_clusters:
        raise ValueError(
            f"config has retrieved_clusters={config.retrieved_clusters} of key_clusters={config.key_clusters}; "
            f"retrieve at most {config.key_clusters}"
        )
    blocks = -(-length // config.block_size)  # (The compiler cannot call a method of a constant.)
    summaries = (config.query_clusters if config.tilt else 1) * config.key_clusters * blocks
    if blocks > 1 and summaries > FEW_SUMMARIES and summaries >= 2 * length * length:
        raise ValueError(
            f"config has query_clusters={config.query_clusters} and key_clusters={config.key_clusters} in {blocks} "
            f"blocks, {summaries} summaries: more work than exact attention to {length} tokens; use fewer clusters, or "
            "a larger block_size"
        )
    return config


def _check_clusters(clusters: Clusters, query: Tensor, key: Tensor, config: MuSeConfig, *, is_causal: bool) -> None:
    """Check shapes, devices, dtypes and the range of assignments, beyond which a kernel would write out of bounds."""
    if not isinstance(clusters, Clusters):
        raise ValueError(f"clusters is a {type(clusters).__name__}; it must be Clusters, as find_clusters returns them")
    shapes = ClusterShapes.of(config, query.shape[2], query.shape[3], is_causal=is_causal)
    expected = {
        "query_centroids": (*query.shape[:2], *shapes.query_centroids),
        "query_assignment": tuple(query.shape[:3]),
        "key_centroids": (*key.shape[:2], *shapes.key_centroids),
        "key_assignment": tuple(key.shape[:3]),
    }
    for name, shape in expected.items():
        tensor = getattr(clusters, name)
        if tensor.device != query.device:
            raise ValueError(f"clusters.{name} is on {tensor.device}, query on {query.device}; move it there")
        allowed = (torch.int32, torch.int64) if name.endswith("assignment") else (torch.float32, torch.float64)
        if tensor.dtype not in allowed:
            raise ValueError(f"clusters.{name} has dtype {tensor.dtype}; it must be {' or '.join(map(str, allowed))}")
        actual = tuple(tensor.shape)
        if actual != shape:
            raise ValueError(
                f"clusters.{name} has shape {actual} where these tensors and this config need {shape}; "
                "find them with the same config, length and is_causal"
            )
    if shapes.key_spread is not None:
        spread, shape = clusters.key_spread, (*key.shape[:2], *shapes.key_spread)
        if spread is None or tuple(spread.shape) != shape or spread.device != query.device:
            raise ValueError(f"clusters.key_spread must be of shape {shape} here; find them with the same config")
    for side in ("query", "key"):
        centroids, assignment = (getattr(clusters, f"{side}_{part}") for part in ("centroids", "assignment"))
        number = centroids.shape[-2]
        _check_contents(
            ((assignment >= 0) & (assignment < number)).all(),
            f"clusters.{side}_assignment has a number that is not from 0 to {number - 1}",
        )
        _check_contents(centroids.isfinite().all(), f"clusters.{side}_centroids has a number that is not finite")


def _check_contents(are_good: Tensor, message: str) -> None:
    message = f"{message}; use clusters as find_clusters returns them"
    if are_good.device.type == "cpu" and not torch.compiler.is_compiling():
        if not are_good:
            raise ValueError(message)
    elif are_good.device.type != "meta":
        torch._assert_async(are_good, message)  # the device checks it, so the host need not wait
