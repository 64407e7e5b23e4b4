"""The dipole variant: a first-order correction of the values that the summaries stand for.

Every summary term of a query with residual `r` has the value `vbar + C r` instead of `vbar`, with one matrix per
segment, `C = sum_j p(j) Cov_j(v, k)`: the covariances inside the key clusters, over all blocks the segment sees,
merged by the weight `p(j)` that the query centroid gives to each cluster.

Moments are summaries too, of the values `(v, vec(v k^T))`, so they are built, accumulated and differentiated by the
functions that do it for the means. The weights of `tilted` covariances agree with the merge, so their sum over clusters
is one moment per block, less the products of the clusters' means.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.backends.torch.grouping import Groups, group_rows, tiles
from muse_attention.backends.torch.layout import FarField
from muse_attention.backends.torch.summaries import accumulate, accumulate_backward, summarise, summarise_backward
from muse_attention.core.exponential import exp_
from muse_attention.core.structures import Summaries


@dataclass(frozen=True)
class Correction:
    """The matrices of all segments, and what their backward needs."""

    matrix: Tensor
    """(nb, G, Q, Dv, D)"""
    merge_weights: Tensor
    """(G, Q, nb, K): `p(j)`; 0 for empty clusters"""
    tilt_points: Tensor
    """(G, T, D): every query centroid (`tilted`), one point per query head (`centred`), or the origin (`shared`)"""
    moment_cluster: Tensor
    """(G, N) int64: the cluster in which a key's moment is summed; one for all if `tilted`"""
    moments: Summaries
    """(G, T, nb, clusters), with Dv + Dv D values"""
    accumulated_moments: Summaries


def find_correction(far: FarField, accumulated: Summaries) -> Correction:
    """The correction for the `accumulated` summaries of what each block sees."""
    kind, values = far.config.dipole, far.values
    key_cluster, key_clusters = far.key_cluster, far.config.key_clusters
    if kind == "tilted":
        tilt_points, key_cluster, key_clusters = far.centroids, torch.zeros_like(key_cluster), 1
    elif kind == "centred":
        key_heads, length = key_cluster.shape
        sizes = far.segments.sizes.view(far.blocks, key_heads, far.query_heads, -1).sum(0)  # (G, heads, Q / heads)
        shares = sizes.to(values.dtype) / length
        tilt_points = (shares[..., None] * far.centroids.unflatten(1, shares.shape[1:])).sum(2)
    else:
        tilt_points = torch.zeros_like(far.centroids[:, :1])
    of_blocks = [
        summarise(block_keys, _with_moments(block_keys, block_values), tilt_points, buckets, 1, key_clusters).parts()
        for _, block_keys, block_values, buckets in _blocks(far, key_cluster, key_clusters)
    ]
    moments = Summaries(*(torch.cat(parts, dim=2) for parts in zip(*of_blocks, strict=True)))
    accumulated_moments = accumulate(moments, is_causal=far.is_causal)

    mass = accumulated.log_mass
    total = mass.logsumexp(-1, keepdim=True)
    merge_weights = torch.where(mass == -torch.inf, 0, exp_((mass - total).clamp_(max=0)))
    if kind == "tilted":
        matrix = _split_moments(accumulated_moments, values)[1][:, :, :, 0]
        matrix = matrix - torch.einsum(
            "gibj,gibjv,gibjd->gibvd", merge_weights, accumulated.value_mean, accumulated.key_mean
        )
    else:
        weights = merge_weights.unflatten(1, (tilt_points.shape[1], -1))
        matrix = torch.einsum("gtibj,gtbjvd->gtibvd", weights, _covariance(accumulated_moments, values)).flatten(1, 2)
    matrix = matrix.permute(2, 0, 1, 3, 4).contiguous()
    return Correction(matrix, merge_weights, tilt_points, key_cluster, moments, accumulated_moments)


def find_correction_backward(
    grad_matrix: Tensor, correction: Correction, far: FarField, accumulated: Summaries
) -> tuple[Tensor, Tensor, Summaries]:
    """Gradients of keys and of values through their moments, and of the accumulated summaries."""
    keys, values = far.keys, far.values
    differentiable_aggregation = far.config.differentiable_aggregation
    grad_matrix = grad_matrix.permute(1, 2, 0, 3, 4)  # (G, Q, nb, Dv, D)
    weights = correction.merge_weights
    grad_accumulated = accumulated.zeros_like()
    grad_moments = correction.moments.zeros_like()
    grad_first, grad_second = _split_moments(grad_moments, values)
    if far.config.dipole == "tilted":
        by_keys = torch.einsum("gibvd,gibjd->gibjv", grad_matrix, accumulated.key_mean)
        by_values = torch.einsum("gibvd,gibjv->gibjd", grad_matrix, accumulated.value_mean)
        grad_accumulated.value_mean.sub_(weights[..., None] * by_keys)
        grad_accumulated.key_mean.sub_(weights[..., None] * by_values)
        grad_weights = -(by_keys * accumulated.value_mean).sum(-1)
        grad_second[:, :, :, 0].copy_(grad_matrix)
    else:
        per_tilt = (correction.tilt_points.shape[1], -1)
        grad_matrix = grad_matrix.unflatten(1, per_tilt)
        covariance = _covariance(correction.accumulated_moments, values)
        grad_covariance = torch.einsum("gtibj,gtibvd->gtbjvd", weights.unflatten(1, per_tilt), grad_matrix)
        grad_weights = torch.einsum("gtibvd,gtbjvd->gtibj", grad_matrix, covariance).flatten(1, 2)
        value_mean, _ = _split_moments(correction.accumulated_moments, values)
        key_mean = correction.accumulated_moments.key_mean
        grad_second.copy_(grad_covariance)
        grad_first.copy_(-torch.einsum("gtbjvd,gtbjd->gtbjv", grad_covariance, key_mean))
        grad_moments.key_mean.copy_(-torch.einsum("gtbjvd,gtbjv->gtbjd", grad_covariance, value_mean))
    if differentiable_aggregation:
        centred = grad_weights - (weights * grad_weights).sum(-1, keepdim=True)
        grad_accumulated.log_mass.copy_(weights * centred)

    of_blocks = correction.moments.zeros_like()
    accumulate_backward(
        grad_moments,
        correction.moments,
        correction.accumulated_moments,
        is_causal=far.is_causal,
        add_to=of_blocks,
        shares_are_frozen=not differentiable_aggregation,
    )
    grad_keys, grad_values = torch.empty_like(keys), torch.empty_like(values)
    value_dim = values.shape[-1]
    clusters = correction.moments.log_mass.shape[-1]
    for block, block_keys, block_values, buckets in _blocks(far, correction.moment_cluster, clusters):
        augmented = _with_moments(block_keys, block_values)
        tables = tuple(part.new_zeros(part[..., 0].numel() + 1, part.shape[2]) for part in (block_keys, augmented))
        summarise_backward(
            _at_block(of_blocks, block),
            _at_block(correction.moments, block),
            block_keys,
            augmented,
            correction.tilt_points,
            buckets,
            differentiable_aggregation=differentiable_aggregation,
            add_to=(tables[0], tables[1]),
        )
        grad_block_keys, grad_augmented = tables[0][:-1].view_as(block_keys), tables[1][:-1].view_as(augmented)
        grad_product = grad_augmented[..., value_dim:].unflatten(-1, (value_dim, -1))  # (G, n, Dv, D)
        begin = block * far.config.block_size
        rows = slice(begin, begin + block_keys.shape[1])
        grad_keys[:, rows] = grad_block_keys + (block_values[..., None, :] @ grad_product)[..., 0, :]
        grad_values[:, rows] = grad_augmented[..., :value_dim] + (grad_product @ block_keys[..., None])[..., 0]
    return grad_keys, grad_values, grad_accumulated


def shift_values(correction: Correction, residuals: Tensor, segments: Groups) -> Tensor:
    """(rows, Dv): `C r` of each query, which every one of its summary terms gains."""
    table = correction.matrix.flatten(0, 2)
    shift = residuals.new_zeros(residuals.shape[0] + 1, table.shape[1])
    for tile in tiles(segments, residuals.shape[1] + table.shape[1]):
        tile.scatter(shift, tile.gather(residuals) @ table[tile.group].mT)
    return shift[:-1]


def shift_values_backward(
    grad_shift: Tensor, correction: Correction, residuals: Tensor, segments: Groups
) -> tuple[Tensor, Tensor]:
    """Gradients of residuals and of the matrices."""
    table = correction.matrix.flatten(0, 2)
    grad_residuals = residuals.new_zeros(residuals.shape[0] + 1, residuals.shape[1])
    grad_table = torch.zeros_like(table)
    for tile in tiles(segments, residuals.shape[1] + table.shape[1]):
        tile_grad = tile.gather(grad_shift) * tile.valid[..., None]
        tile.scatter(grad_residuals, tile_grad @ table[tile.group])
        grad_table[tile.group] = tile_grad.mT @ tile.gather(residuals)
    return grad_residuals[:-1], grad_table.view_as(correction.matrix)


def _with_moments(keys: Tensor, values: Tensor) -> Tensor:
    """(G, n, Dv + Dv D): `(v, vec(v k^T))` of each token."""
    return torch.cat([values, (values[..., :, None] * keys[..., None, :]).flatten(-2)], dim=-1)


def _split_moments(moments: Summaries, values: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the first (..., Dv) and second (..., Dv, D) moments."""
    value_dim = values.shape[-1]
    second = moments.value_mean[..., value_dim:].unflatten(-1, (value_dim, -1))
    return moments.value_mean[..., :value_dim], second


def _covariance(moments: Summaries, values: Tensor) -> Tensor:
    value_mean, second = _split_moments(moments, values)
    return second - value_mean[..., :, None] * moments.key_mean[..., None, :]


def _at_block(summaries: Summaries, block: int) -> Summaries:
    return Summaries(*(part[:, :, block : block + 1] for part in summaries.parts()))


def _blocks(far: FarField, key_cluster: Tensor, clusters: int) -> Iterator[tuple[int, Tensor, Tensor, Groups]]:
    """One block at a time, because a token's moment has Dv D numbers: its keys, values and buckets."""
    head = torch.arange(far.keys.shape[0], device=far.keys.device)[:, None] * clusters
    parts = (tensor.split(far.config.block_size, 1) for tensor in (far.keys, far.values, key_cluster))
    for block, (block_keys, block_values, block_cluster) in enumerate(zip(*parts, strict=True)):
        buckets = group_rows((head + block_cluster).flatten(), far.keys.shape[0] * clusters)
        yield block, block_keys, block_values, buckets
