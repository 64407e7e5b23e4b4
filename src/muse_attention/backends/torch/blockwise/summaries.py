"""Summaries of every bucket for each query centroid that may see it, a block at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.backends.torch.blockwise.buckets import Buckets
from muse_attention.backends.torch.clustering import finite
from muse_attention.backends.torch.grouping import Groups, Tiles, tiles, transposed
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
    sizes = [generations.sees(number) * buckets.key_clusters for number in range(generations.number)]
    parts = ((), (head_dim,), (value_dim,))
    tables = [Table(*(centroids.new_zeros(heads, query_clusters, size, *part) for part in parts)) for size in sizes]
    tilted = [torch.zeros_like(table.log_mass) for table in tables]
    squared, mean, plain = _plain_spread(buckets)
    wide = torch.cat([buckets.keys, buckets.values, squared[:, None]], dim=1)
    for block in range(buckets.blocks):
        points = _points(centroids, block, generations)  # (C, D)
        of_points = transposed(points)
        log_mass = points.new_full((buckets.key_clusters, points.shape[0]), -torch.inf)
        sums = points.new_zeros(buckets.key_clusters, points.shape[0], wide.shape[1])
        for tile in _tiles_of_block(buckets, block, points.shape[0]):
            rows = tile.gather(wide)  # (T, m, D + Dv + 1)
            logits = (rows[..., :head_dim].flatten(0, 1) @ of_points).view(*rows.shape[:2], -1)  # (T, m, C)
            # Padding repeats a key of the bucket, so the maximum is right without a mask.
            shift = logits.amax(1, keepdim=True)
            weights = exp_(logits.sub_(shift)).mul_(tile.valid[..., None])
            mass = weights.sum(1, keepdim=True)
            log_mass[tile.group] = (mass.log() + shift)[:, 0]
            sums[tile.group] = torch.bmm(weights.div_(mass).mT, rows)
        of_block = buckets.of_block(block)
        key_mean, value_mean, moment = sums.split([head_dim, value_dim, 1], dim=-1)
        offset = (key_mean - mean[of_block, None]).square().sum(-1)
        variance = torch.where(buckets.sizes[of_block, None] > 1, (moment[..., 0] - offset).clamp_(min=0) / head_dim, 0)
        _write([table.log_mass for table in tables], log_mass, of_block)
        _write([table.key_mean for table in tables], key_mean, of_block)
        _write([table.value_mean for table in tables], value_mean, of_block)
        _write(tilted, variance, of_block)
    return tables, Spread(tilted, plain)


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
    wide = torch.cat([buckets.keys, buckets.values], dim=1)
    for block in range(buckets.blocks):
        of_block = buckets.of_block(block)
        points = _points(centroids, block, generations)  # (C, D)
        of_points = transposed(points)
        log_mass, *means = _read(tables, of_block)  # (K, C, ...)
        d_mass, *d_means = _read(gradients, of_block)
        d_wide = torch.cat(d_means, dim=-1)
        if differentiable_aggregation:
            # What is left of the response of a mean to its weights, once their sum is kept at 1.
            d_mass = d_mass - (d_wide * torch.cat(means, dim=-1)).sum(-1)
        for tile in _tiles_of_block(buckets, block, points.shape[0]):
            rows, d_rows = tile.gather(wide), d_wide[tile.group]  # (T, m, D + Dv), (T, C, D + Dv)
            # Padding gets weights as well, but `add` drops what they give.
            logits = (rows[..., :head_dim].flatten(0, 1) @ of_points).view(*rows.shape[:2], -1)  # (T, m, C)
            weights = exp_(logits.sub_(log_mass[tile.group, None]).clamp_(max=0))
            to_rows = torch.bmm(weights, d_rows)
            d_logits = d_mass[tile.group, None]
            if differentiable_aggregation:
                d_logits = torch.baddbmm(d_logits, rows, transposed(d_rows))
            to_rows[..., :head_dim] += ((weights * d_logits).flatten(0, 1) @ points).view(*rows.shape[:2], -1)
            tile.add(add_to[0], to_rows[..., :head_dim])
            tile.add(add_to[1], to_rows[..., head_dim:])


def _plain_spread(buckets: Buckets) -> tuple[Tensor, Tensor, Tensor]:
    """Squared distances of keys from the mean of their bucket, that mean, and the variance.

    Tilted variances are computed from distances to a nearby point, so that little cancels.
    """
    keys, sizes = buckets.keys[:-1], buckets.sizes
    bucket = torch.repeat_interleave(torch.arange(sizes.shape[0], device=sizes.device), sizes)
    count = sizes.clamp(min=1).to(keys.dtype)
    mean = keys.new_zeros(sizes.shape[0], keys.shape[1]).index_add_(0, bucket, finite(keys)) / count[:, None]
    squared = (keys - mean[bucket]).square().sum(-1)
    plain = torch.zeros_like(count).index_add_(0, bucket, squared) / (count * keys.shape[1])
    return torch.nn.functional.pad(squared, (0, 1)), mean, torch.where(sizes > 1, plain, 0)


def _points(centroids: Tensor, block: int, generations: Generations) -> Tensor:
    """(C, D): the centroids that see a block, those of the last generations."""
    first = next(number for number in range(generations.number) if generations.sees(number) > block)
    return centroids[:, first:].transpose(0, 1).flatten(0, 2)


def _tiles_of_block(buckets: Buckets, block: int, points: int) -> Iterator[Tiles]:
    """Tiles of the rows of `buckets`; their groups count from 0 in the block."""
    of_block = buckets.of_block(block)
    rows = torch.arange(buckets.order.shape[0], device=buckets.order.device)
    groups = Groups(rows, buckets.starts[of_block], buckets.sizes[of_block])
    return tiles(groups, points + buckets.keys.shape[1] + buckets.values.shape[1])


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
