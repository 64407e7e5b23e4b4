"""Stages 2 and 3: summarise every bucket for every query cluster, then accumulate over the blocks a query sees."""

from __future__ import annotations

import torch
from torch import Tensor

from muse_attention.backends.torch.grouping import Groups, tiles
from muse_attention.core.exponential import exp_
from muse_attention.core.structures import Summaries


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
        tile_keys, tile_values = tile.gather(keys.flatten(0, 1)), tile.gather(values.flatten(0, 1))
        logits = torch.bmm(centroids[at[0]], tile_keys.mT)  # (T, Q, m)
        # Padding repeats a key of the bucket, so the maximum is right without a mask.
        shift = logits.amax(-1, keepdim=True)
        weights = exp_(logits.sub_(shift)).mul_(tile.valid[:, None])
        mass = weights.sum(-1, keepdim=True)
        log_mass[at] = (mass.log() + shift)[..., 0]
        weights /= mass
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
    add_to: tuple[Tensor, Tensor],
) -> None:
    """Add to the tables `add_to`, (G N + 1, D) and (G N + 1, Dv), the gradients of keys and values.

    `gradient` is that of their summaries.
    """
    _, query_clusters, blocks, key_clusters = summaries.log_mass.shape
    head_dim, value_dim = keys.shape[-1], values.shape[-1]
    grad_keys, grad_values = add_to
    for tile in tiles(buckets, query_clusters + head_dim + value_dim):
        at = _bucket_index(tile.group, blocks, key_clusters)
        tile_keys, tile_values = tile.gather(keys.flatten(0, 1)), tile.gather(values.flatten(0, 1))
        tile_centroids = centroids[at[0]]
        d_key_mean, d_value_mean = gradient.key_mean[at], gradient.value_mean[at]  # (T, Q, D), (T, Q, Dv)
        # Padding gets weights as well, but `add` drops what they give.
        logits = torch.bmm(tile_centroids, tile_keys.mT)  # (T, Q, m)
        weights = exp_(logits.sub_(summaries.log_mass[at][..., None]).clamp_(max=0))
        d_logits = gradient.log_mass[at][..., None]
        if differentiable_aggregation:
            response = d_key_mean @ tile_keys.mT
            response += d_value_mean @ tile_values.mT
            mean_response = (d_key_mean * summaries.key_mean[at]).sum(-1)
            mean_response += (d_value_mean * summaries.value_mean[at]).sum(-1)
            d_logits = response.add_((gradient.log_mass[at] - mean_response)[..., None])
        tile.add(grad_keys, weights.mT @ d_key_mean + (weights * d_logits).mT @ tile_centroids)
        tile.add(grad_values, weights.mT @ d_value_mean)


def accumulate(summaries: Summaries, *, is_causal: bool) -> Summaries:
    """For each block, one summary per key cluster of all the blocks it sees: the earlier ones, or all others."""
    parts = summaries.parts()
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
    add_to: Summaries,
    shares_are_frozen: bool = False,
) -> None:
    """Add to `add_to` the gradients of each block's summaries, from the `gradient` of the accumulated ones.

    With `omega = exp(mu_b' - muA_b)`, the share of block `b'` in what block `b` sees, block `b'` receives the sum over
    all such `b` of `omega` times the gradient at `b`. Where block `b` sees blocks on both sides, `omega` is the share
    of `b'` in its side times the share of that side; each factor is at most 1, so nothing overflows.
    """
    for reverse in (False,) if is_causal else (False, True):
        side = accumulated.log_mass
        if not is_causal:
            (side,) = _exclusive_scan((summaries.log_mass,), reverse=reverse)
        blocks = range(side.shape[2])
        walk = list(blocks if reverse else reversed(blocks))
        running: tuple[Tensor, ...] | None = None
        for block, after in zip(walk, [None, *walk], strict=False):
            mass = side[:, :, block]
            if running is not None:
                # `running` = sum over the b already passed of exp(side_after - side_b) times the gradient at b.
                share = _ratio(summaries.log_mass[:, :, block], side[:, :, after])
                d_mass, d_keys, d_values = (_scale(share, part) for part in running)
                if not shares_are_frozen:
                    d_mass += (d_keys * summaries.key_mean[:, :, block]).sum(-1)
                    d_mass += (d_values * summaries.value_mean[:, :, block]).sum(-1)
                add_to.log_mass[:, :, block] += d_mass
                add_to.key_mean[:, :, block] += d_keys
                add_to.value_mean[:, :, block] += d_values
            d_mass, d_keys, d_values = (part[:, :, block] for part in gradient.parts())
            if not shares_are_frozen:
                d_mass = d_mass - (d_keys * accumulated.key_mean[:, :, block]).sum(-1)
                d_mass -= (d_values * accumulated.value_mean[:, :, block]).sum(-1)
            here: tuple[Tensor, ...] = (d_mass, d_keys, d_values)
            if not is_causal:
                here = tuple(_scale(_ratio(mass, accumulated.log_mass[:, :, block]), part) for part in here)
            if running is not None:
                kept = _ratio(mass, side[:, :, after])
                here = tuple(part + _scale(kept, state) for part, state in zip(here, running, strict=True))
            running = here


def _bucket_index(group: Tensor, blocks: int, key_clusters: int) -> tuple[Tensor, slice, Tensor, Tensor]:
    """Where the summaries of buckets lie: indexing (G, Q, nb, K, ...) with it gives (T, Q, ...)."""
    return (
        group // (blocks * key_clusters),
        slice(None),
        group // key_clusters % blocks,
        group % key_clusters,
    )


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


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """`exp(part - whole)`, at most 1; 0 where the part is empty."""
    return torch.where(part == -torch.inf, 0, exp_((part - whole).clamp_(max=0)))


def _scale(weights: Tensor, rows: Tensor) -> Tensor:
    return weights * rows if rows.dim() == weights.dim() else weights[..., None] * rows
