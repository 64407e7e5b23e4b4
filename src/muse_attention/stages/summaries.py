"""Stages 2 and 3: summarise every bucket for every query cluster, then accumulate over the blocks a query sees."""

from __future__ import annotations

import torch
from torch import Tensor

from muse_attention.stages.grouping import Groups, tiles
from muse_attention.structures import Summaries


def summarise(
    keys: Tensor, values: Tensor, centroids: Tensor, buckets: Groups, blocks: int, key_clusters: int
) -> Summaries:
    """Summaries of (G, N, D) keys and (G, N, Dv) values from (G, Q, D) query centroids.

    `buckets` groups the rows of all heads' keys by (head, block, key cluster).
    """
    heads, query_clusters, head_dim = centroids.shape
    value_dim = values.shape[-1]
    shape = (heads, query_clusters, blocks, key_clusters)
    log_mass = keys.new_full(shape, -torch.inf)
    key_mean = keys.new_zeros(*shape, head_dim)
    value_mean = keys.new_zeros(*shape, value_dim)
    for tile in tiles(buckets, query_clusters + head_dim + value_dim):
        at = _bucket_index(tile.group, blocks, key_clusters)
        tile_keys, tile_values = keys.flatten(0, 1)[tile.rows], values.flatten(0, 1)[tile.rows]
        logits = _tilt(centroids[at[0]], tile_keys, tile.valid)  # (T, Q, m)
        mass = logits.logsumexp(-1)
        weights = (logits - mass[..., None]).exp_()
        log_mass[at] = mass
        key_mean[at] = weights @ tile_keys
        value_mean[at] = weights @ tile_values
    return Summaries(log_mass, key_mean, value_mean)


def summarise_backward(
    gradient: Summaries,
    summaries: Summaries,
    keys: Tensor,
    values: Tensor,
    centroids: Tensor,
    buckets: Groups,
    *,
    differentiable_aggregation: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values from the gradients of their summaries."""
    _, query_clusters, blocks, key_clusters = summaries.log_mass.shape
    head_dim, value_dim = keys.shape[-1], values.shape[-1]
    grad_keys = _with_spare_row(keys)
    grad_values = _with_spare_row(values)
    for tile in tiles(buckets, query_clusters + head_dim + value_dim):
        at = _bucket_index(tile.group, blocks, key_clusters)
        tile_keys, tile_values = keys.flatten(0, 1)[tile.rows], values.flatten(0, 1)[tile.rows]
        tile_centroids = centroids[at[0]]
        d_key_mean, d_value_mean = gradient.key_mean[at], gradient.value_mean[at]  # (T, Q, D), (T, Q, Dv)
        logits = _tilt(tile_centroids, tile_keys, tile.valid)
        weights = (logits - summaries.log_mass[at][..., None]).clamp_(max=0).exp_()  # (T, Q, m)
        d_logits = gradient.log_mass[at][..., None]
        if differentiable_aggregation:
            response = d_key_mean @ tile_keys.mT
            response += d_value_mean @ tile_values.mT
            mean_response = (d_key_mean * summaries.key_mean[at]).sum(-1)
            mean_response += (d_value_mean * summaries.value_mean[at]).sum(-1)
            d_logits = d_logits + response - mean_response[..., None]
        tile.scatter(grad_keys, weights.mT @ d_key_mean + (weights * d_logits).mT @ tile_centroids)
        tile.scatter(grad_values, weights.mT @ d_value_mean)
    return grad_keys[:-1].view_as(keys), grad_values[:-1].view_as(values)


def accumulate(summaries: Summaries, *, is_causal: bool) -> Summaries:
    """For each block, one summary per key cluster of all the blocks it sees: the earlier ones, or all others."""
    parts = (summaries.log_mass, summaries.key_mean, summaries.value_mean)
    seen = _exclusive_scan(parts, reverse=False)
    if not is_causal:
        seen = _combine(seen, _exclusive_scan(parts, reverse=True))
    return Summaries(*seen)


def accumulate_backward(
    gradient: Summaries,
    summaries: Summaries,
    accumulated: Summaries,
    *,
    is_causal: bool,
    differentiable_aggregation: bool,
) -> Summaries:
    """Gradients of the summaries of each block from the gradients of the accumulated ones.

    With `omega = exp(mu_b' - muA_b)`, the share of block `b'` in what block `b` sees, block `b'` receives the sum over
    all such `b` of `omega` times the gradient at `b`. Where block `b` sees blocks on both sides, `omega` is the share
    of `b'` in its side times the share of that side; each factor is at most 1, so nothing overflows.
    """
    d_mass = gradient.log_mass
    if differentiable_aggregation:
        d_mass = d_mass - (gradient.key_mean * accumulated.key_mean).sum(-1)
        d_mass -= (gradient.value_mean * accumulated.value_mean).sum(-1)
    at_accumulated = (d_mass, gradient.key_mean, gradient.value_mean)
    if is_causal:
        received = _exclusive_scan_backward(at_accumulated, summaries.log_mass, accumulated.log_mass, reverse=False)
    else:
        received = None
        for reverse in (False, True):
            (side,) = _exclusive_scan((summaries.log_mass,), reverse=reverse)
            share = _ratio(side, accumulated.log_mass)
            weighted = tuple(_scale(share, part) for part in at_accumulated)
            one_side = _exclusive_scan_backward(weighted, summaries.log_mass, side, reverse=reverse)
            received = one_side if received is None else tuple(a + b for a, b in zip(received, one_side, strict=True))
        assert received is not None
    d_mass, d_key_mean, d_value_mean = received
    if differentiable_aggregation:
        d_mass = d_mass + (d_key_mean * summaries.key_mean).sum(-1)
        d_mass += (d_value_mean * summaries.value_mean).sum(-1)
    return Summaries(d_mass, d_key_mean, d_value_mean)


def _tilt(centroids: Tensor, keys: Tensor, valid: Tensor) -> Tensor:
    """(T, Q, m): `c_i . k`, -inf at padding."""
    return torch.bmm(centroids, keys.mT).masked_fill_(~valid[:, None], -torch.inf)


def _bucket_index(group: Tensor, blocks: int, key_clusters: int) -> tuple[Tensor, slice, Tensor, Tensor]:
    """Where the summaries of buckets lie: indexing (G, Q, nb, K, ...) with it gives (T, Q, ...)."""
    return (
        group // (blocks * key_clusters),
        slice(None),
        group // key_clusters % blocks,
        group % key_clusters,
    )


def _with_spare_row(like: Tensor) -> Tensor:
    """Zeros for the rows of all heads, and one more row for padding."""
    return like.new_zeros(like.shape[0] * like.shape[1] + 1, like.shape[2])


def _exclusive_scan(parts: tuple[Tensor, ...], *, reverse: bool) -> tuple[Tensor, ...]:
    """At each block, (log-mass, means...) of all blocks before it (after it, in `reverse`), combined."""
    scanned = tuple(torch.empty_like(part) for part in parts)
    running = tuple(torch.zeros_like(part[:, :, 0]) for part in parts)
    running[0].fill_(-torch.inf)
    blocks = range(parts[0].shape[2])
    for block in reversed(blocks) if reverse else blocks:
        for target, state in zip(scanned, running, strict=True):
            target[:, :, block] = state
        running = _combine(running, tuple(part[:, :, block] for part in parts))
    return scanned


def _combine(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """(log-mass, means...) of two disjoint sets of keys, as one."""
    log_mass = torch.logaddexp(first[0], second[0])
    first_share, second_share = _ratio(first[0], log_mass), _ratio(second[0], log_mass)
    means = (_scale(first_share, a) + _scale(second_share, b) for a, b in zip(first[1:], second[1:], strict=True))
    return log_mass, *means


def _exclusive_scan_backward(
    gradient: tuple[Tensor, ...], log_mass: Tensor, scanned_mass: Tensor, *, reverse: bool
) -> tuple[Tensor, ...]:
    """At each block `b'`, the sum over the blocks `b` that scanned it of `exp(mu_b' - scanned_b)` gradient_b."""
    received = [torch.zeros_like(part) for part in gradient]
    blocks = range(log_mass.shape[2])
    walk = list(blocks if reverse else reversed(blocks))
    running = [part[:, :, walk[0]] for part in gradient]
    for after, block in zip(walk, walk[1:], strict=False):
        # `running` = sum over the b already passed of exp(scanned_after - scanned_b) gradient_b.
        share = _ratio(log_mass[:, :, block], scanned_mass[:, :, after])
        kept = _ratio(scanned_mass[:, :, block], scanned_mass[:, :, after])
        for target, state in zip(received, running, strict=True):
            target[:, :, block] = _scale(share, state)
        running = [part[:, :, block] + _scale(kept, state) for part, state in zip(gradient, running, strict=True)]
    return tuple(received)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """`exp(part - whole)`, at most 1; 0 where the part is empty."""
    return torch.where(part == -torch.inf, 0, (part - whole).clamp(max=0).exp())


def _scale(weights: Tensor, rows: Tensor) -> Tensor:
    return weights * rows if rows.dim() == weights.dim() else weights[..., None] * rows
