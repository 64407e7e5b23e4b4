"""Summaries of every bucket for each query centroid that may see it, a block at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.backends.torch.blockwise.buckets import Buckets
from muse_attention.backends.torch.clustering import finite
from muse_attention.backends.torch.grouping import take_rows, transposed
from muse_attention.core.exponential import exp_
from muse_attention.core.generations import Generations
from muse_attention.core.structures import Summaries

Table = Summaries
"""Summaries of all buckets that a generation sees, by its centroids, for `R` query heads: (R, Q, buckets, ...)."""


@dataclass(frozen=True)
class Spread:
    """How far apart the keys of each bucket are, in each dimension on average. It carries no gradient."""

    tilted: list[Tensor]
    """(R, Q, buckets) for each generation: `E |k - kbar|^2 / D` under the weights of a summary"""
    plain: Tensor
    """(buckets,): the same with equal weights"""


def summarise(buckets: Buckets, centroids: Tensor, generations: Generations) -> tuple[list[Table], Spread]:
    """The table of each generation, of (R, S, Q, D) centroids."""
    head_dim, value_dim = buckets.keys.shape[1], buckets.values.shape[1]
    heads, _, query_clusters, _ = centroids.shape
    widths = [generations.sees(number) * buckets.key_clusters for number in range(generations.number)]
    parts = ((), (head_dim,), (value_dim,))
    tables = [Table(*(centroids.new_zeros(heads, query_clusters, width, *part) for part in parts)) for width in widths]
    tilted = [torch.zeros_like(table.log_mass) for table in tables]
    plain = []
    for block in range(buckets.blocks):
        points = _points(centroids, block, generations)  # (C, D)
        rows, bucket = buckets.rows_of_block(block), buckets.bucket_of_rows(block)  # n rows
        of_block = buckets.of_block(block)
        keys, sizes = buckets.keys[rows], buckets.sizes[of_block]
        squared, mean, plain_of_block = _plain_spread(keys, bucket, sizes)
        plain.append(plain_of_block)
        wide = torch.cat([keys, buckets.values[rows], squared[:, None]], dim=1)
        logits = keys @ transposed(points)  # (n, C)
        shape = (buckets.key_clusters, points.shape[0])
        shift = logits.new_zeros(shape).scatter_reduce_(
            0, bucket[:, None].expand_as(logits), logits, "amax", include_self=False
        )
        weights = exp_(logits.sub_(take_rows(shift, bucket)))
        mass = logits.new_zeros(shape).index_add_(0, bucket, weights)
        log_mass = mass.log() + shift
        # One product for each bucket: no other bucket, of a later block least of all, may change how a sum is rounded.
        weights.div_(take_rows(mass, bucket))
        sums = points.new_zeros(*shape, wide.shape[1])
        for of_bucket, own_weights, own_rows in zip(
            sums, buckets.split(block, weights), buckets.split(block, wide), strict=True
        ):
            torch.mm(own_weights.mT, own_rows, out=of_bucket)
        key_mean, value_mean, moment = sums.split([head_dim, value_dim, 1], dim=-1)
        offset = (key_mean - mean[:, None]).square().sum(-1)
        variance = torch.where(sizes[:, None] > 1, (moment[..., 0] - offset).clamp_(min=0) / head_dim, 0)
        _write([table.log_mass for table in tables], log_mass, of_block)
        _write([table.key_mean for table in tables], key_mean, of_block)
        _write([table.value_mean for table in tables], value_mean, of_block)
        _write(tilted, variance, of_block)
    return tables, Spread(tilted, torch.cat(plain))


def summarise_backward(
    gradients: list[Table],
    tables: list[Table],
    buckets: Buckets,
    centroids: Tensor,
    generations: Generations,
    *,
    differentiable_aggregation: bool,
    add_to: tuple[Tensor, Tensor],
) -> None:
    """Add the gradients of keys and values to tables of the shapes of those in `buckets`."""
    head_dim = buckets.keys.shape[1]
    for block in range(buckets.blocks):
        of_block = buckets.of_block(block)
        points = _points(centroids, block, generations)  # (C, D)
        log_mass, *means = _read(tables, of_block)  # (K, C, ...)
        d_mass, *d_means = _read(gradients, of_block)
        d_wide = torch.cat(d_means, dim=-1)
        if differentiable_aggregation:
            # What is left of the response of a mean to its weights, once their sum is kept at 1.
            d_mass = d_mass - (d_wide * torch.cat(means, dim=-1)).sum(-1)
        rows, bucket = buckets.rows_of_block(block), buckets.bucket_of_rows(block)  # n rows
        logits = buckets.keys[rows] @ transposed(points)  # (n, C)
        weights = exp_(logits.sub_(take_rows(log_mass, bucket)).clamp_(max=0))
        own_rows = torch.cat([buckets.keys[rows], buckets.values[rows]], dim=1)
        to_rows = torch.empty_like(own_rows)
        to_logits = take_rows(d_mass, bucket)
        for own_d_wide, *parts in zip(
            d_wide, *(buckets.split(block, table) for table in (own_rows, weights, to_rows, to_logits)), strict=True
        ):
            of_bucket, own_weights, to_bucket, d_logits = parts
            torch.mm(own_weights, own_d_wide, out=to_bucket)
            if differentiable_aggregation:
                d_logits.addmm_(of_bucket, own_d_wide.mT)
        to_keys, to_values = to_rows.split([head_dim, d_wide.shape[2] - head_dim], dim=1)
        add_to[0][rows] += torch.addmm(to_keys, to_logits.mul_(weights), points)
        add_to[1][rows] += to_values


def _plain_spread(keys: Tensor, bucket: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Squared distances of (n, D) keys from the mean of their bucket, that mean, and the variance.

    Tilted variances are computed from distances to a nearby point, so that little cancels.
    """
    count = sizes.clamp(min=1).to(keys.dtype)
    mean = keys.new_zeros(sizes.shape[0], keys.shape[1]).index_add_(0, bucket, finite(keys)) / count[:, None]
    squared = (keys - take_rows(mean, bucket)).square().sum(-1)
    plain = torch.zeros_like(count).index_add_(0, bucket, squared) / (count * keys.shape[1])
    return squared, mean, torch.where(sizes > 1, plain, 0)


def _points(centroids: Tensor, block: int, generations: Generations) -> Tensor:
    """(C, D): the centroids that see a block, those of the last generations."""
    first = next(number for number in range(generations.number) if generations.sees(number) > block)
    return centroids[:, first:].transpose(0, 1).flatten(0, 2)


def _read(tables: list[Table], of_block: slice) -> list[Tensor]:
    """(K, C, ...): the parts of the tables that see a block."""
    seeing = [table for table in tables if table.log_mass.shape[2] >= of_block.stop]
    return [
        torch.cat([part[:, :, of_block].flatten(0, 1) for part in parts]).transpose(0, 1).contiguous()
        for parts in zip(*(table.parts() for table in seeing), strict=True)
    ]


def _write(targets: list[Tensor], source: Tensor, of_block: slice) -> None:
    """The reverse: (K, C, ...) into the targets (R, Q, buckets, ...) of the generations that see a block."""
    seeing = [target for target in targets if target.shape[2] >= of_block.stop]
    for target, part in zip(seeing, source.transpose(0, 1).chunk(len(seeing)), strict=True):
        target[:, :, of_block] = part.unflatten(0, target.shape[:2])
