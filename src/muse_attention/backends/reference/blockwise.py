"""Blockwise MuSe, the method with a tolerance. With a causal mask, no output depends on later tokens.

1. Each block clusters its own keys. A bucket is a cluster of a block. Query centroids are found from the past, in
   generations (`core/generations.py`), and a query takes the nearest of its block's generation (`find_clusters`).
2. Every bucket is summarised as each query centroid that may see it does (`_summarise`): log-mass, tilted means of keys
   and values, and how far its keys are apart (`_spread`).
3. A query sees the summary of every visible bucket. To second order its logit has what the spread of the keys adds for
   a query off its centroid (`_mass_off_centroid`). To first order its value has what the keys on the query's side of
   the centroid add, by one matrix for all the buckets that a block sees (`_slopes`).
4. It wants the keys of a bucket whose summary is expected to be wrong by the tolerance or more (`_expected_error`), or
   in which a search finds a key of some weight (`_largest_logit`). Queries of a tile search and retrieve together,
   none for an earlier one (`_select`).
5. One softmax over the query's own block, the retrieved keys, and the summaries of all the rest.

Symbols: `q = c + r` is a query, its centroid and its residual; `mu`, `kbar`, `vbar` are a summary's log-mass and tilted
means; `s` is a generation, `i` a query cluster, `b` a block, `j` a cluster of its keys, `n` a query, `m` a key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.backends.reference.clustering import assign, find_centroids
from muse_attention.backends.reference.masked import masked_logsumexp, masked_softmax, take_rows
from muse_attention.backends.reference.result import Reference
from muse_attention.config import MuSeConfig
from muse_attention.core.call import Call
from muse_attention.core.expected_error import (
    DEVIATIONS_OF_SUSPICION,
    LARGEST_GROWTH,
    LEAST_PLAIN_SPREAD,
    SUSPICION,
)
from muse_attention.core.generations import Generations
from muse_attention.core.query_tiles import NO_ROW, place_in_tiles, tiles_of_block
from muse_attention.core.slopes import LARGEST_REACH, TILT_OF_SLOPE
from muse_attention.core.structures import Clusters, Selection, Summaries


def attend(call: Call, selection: Selection | None) -> Reference:
    """Attention of scaled queries."""
    q, key, value, clusters, config = call.query, call.key, call.value, call.clusters, call.config
    is_causal, length = call.is_causal, q.shape[-2]
    generations = call.generations
    group = q.shape[1] // key.shape[1]  # Query heads that share a key head share its clusters too.
    k, v = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    at = torch.arange(length, device=q.device)
    block = at // config.block_size  # (n,)
    generation = torch.tensor([generations.of_block(int(b)) for b in block], device=q.device)
    buckets = generations.blocks * config.key_clusters
    bucket = block * config.key_clusters + clusters.key_assignment.long().repeat_interleave(group, dim=1)  # (.., m)
    of_key = bucket[:, :, None].expand(-1, -1, length, -1)  # (batch, heads, n, m)

    centroids = clusters.query_centroids.to(q.dtype).flatten(2, 3)  # (batch, heads, s i, D)
    member = bucket[:, :, None] == torch.arange(buckets, device=q.device)[:, None]  # (batch, heads, buckets, m)
    summaries, tilted = _summarise(k, v, centroids, member, config)

    # What each query reads: the summaries of its generation and cluster.
    row = generation * config.query_clusters + clusters.query_assignment.long()  # (batch, heads, n)
    r = q - take_rows(centroids, row)
    mu, kbar, vbar = (take_rows(table, row) for table in summaries.parts())
    logits = torch.einsum("xhnd,xhntd->xhnt", r, kbar) + mu  # (batch, heads, n, buckets)
    block_of_bucket = torch.arange(buckets, device=q.device) // config.key_clusters
    sees = block[:, None] > block_of_bucket if is_causal else block[:, None] != block_of_bucket  # (n, buckets)
    exists = sees & (mu != -math.inf)

    # All of this is constant for the gradient: a gradient through it makes no measurable difference.
    with torch.no_grad():
        spread = _spread(k, summaries, tilted, member)
        variance, size = take_rows(spread.tilted, row), spread.size[:, :, None]
        assert clusters.key_spread is not None
        assert config.tolerance is not None
        metric = clusters.key_spread.to(q.dtype).repeat_interleave(group, dim=1)[:, :, generation]
        width = (metric * r * r).sum(-1, keepdim=True)  # (batch, heads, n, 1)
        mass = _mass_off_centroid((variance * width).sqrt(), size)
    if config.uses_second_order:
        logits = logits + mass

    token_logits = q @ k.mT
    own = block[:, None] == block
    if is_causal:
        own = own & (at[:, None] >= at)
    own = own.expand(*q.shape[:2], length, length)
    if selection is None:
        with torch.no_grad():
            lse = torch.logaddexp(masked_logsumexp(token_logits, own), masked_logsumexp(logits, exists))
            # Where a centroid looks at one key of a bucket, its weights do not tell how far away the others are.
            variance = torch.maximum(variance, LEAST_PLAIN_SPREAD * spread.plain[:, :, None])
            log_weight, sigma = logits - lse[..., None], (variance * width).sqrt()
            wanted = exists & (_expected_error(log_weight, sigma, size, config) >= config.tolerance)
            if config.search is not None:
                highest = log_weight + (DEVIATIONS_OF_SUSPICION * sigma).clamp(max=LARGEST_GROWTH)
                suspected = exists & (highest >= math.log(SUSPICION * config.search))
                searched = _select(suspected, clusters.query_assignment, generations, config)
                is_searched = _retrieved(searched, clusters.query_assignment, generations, config) & sees
                wanted |= is_searched & (
                    _largest_logit(token_logits, of_key, buckets) - lse[..., None] >= math.log(config.search)
                )
            selection = _select(wanted, clusters.query_assignment, generations, config)
    retrieved = _retrieved(selection, clusters.query_assignment, generations, config) & sees

    # Three groups of terms. Together they contain every visible key exactly once.
    stays = exists & ~retrieved
    key_retrieved = retrieved.gather(-1, of_key)
    all_logits = torch.cat([token_logits, token_logits, logits], dim=-1)
    present = torch.cat([own, key_retrieved, stays], dim=-1)
    lse = masked_logsumexp(all_logits, present)
    weights = masked_softmax(all_logits, lse, present)
    own_weights, key_weights, summary_weights = weights.split([length, length, buckets], dim=-1)
    out = (own_weights + key_weights) @ v + torch.einsum("xhnt,xhntd->xhnd", summary_weights, vbar)
    if config.uses_first_order:
        with torch.no_grad():
            slope, spread_of_keys = _slopes(k, v, clusters.query_centroids.to(q.dtype), bucket, generations, config)
        reach = (spread_of_keys[:, :, block] * width[..., 0]).sqrt()  # (batch, heads, n)
        off = r * (LARGEST_REACH / reach.clamp(min=LARGEST_REACH))[..., None]
        change = torch.einsum("xhnd,xhnde->xhne", off, slope[:, :, block])
        out = out + summary_weights.sum(-1, keepdim=True) * change
    stands_for = own.int() + key_retrieved.int() + stays.gather(-1, of_key).int()
    return Reference(out, lse, clusters, selection, weights, stands_for)


# --- 1. Clusters -----------------------------------------------------------------------------------------------------


def find_clusters(scaled_query: Tensor, key: Tensor, config: MuSeConfig, *, is_causal: bool) -> Clusters:
    """Clusters of the keys of each block that is seen, and of the queries before each generation."""
    length = key.shape[-2]
    generations = Generations(config.number_of_blocks(length), is_causal)
    blocks_of_keys = key.split(config.block_size, dim=-2)[: generations.seen_blocks]
    of_blocks = [find_centroids(block, config.key_clusters, config) for block in blocks_of_keys]
    nearest = [
        assign(block, centroids, None, config) for block, centroids in zip(blocks_of_keys, of_blocks, strict=True)
    ]
    key_centroids = (
        torch.stack(of_blocks, 2) if of_blocks else key.new_empty(*key.shape[:2], 0, config.key_clusters, key.shape[-1])
    )
    unseen = torch.zeros(*key.shape[:2], length - sum(block.shape[-1] for block in nearest), dtype=torch.int32)
    key_assignment = torch.cat([*nearest, unseen.to(key.device)], dim=-1)

    of_generations, spreads = [], []
    for generation in range(generations.number):
        past = min(length, generations.past(generation) * config.block_size)
        of_generations.append(find_centroids(scaled_query[..., :past, :], config.query_clusters, config))
        seen = blocks_of_keys[: generations.past(generation)]
        spreads.append(_key_spread(seen, key_centroids, key_assignment, key))
    query_assignment = [
        assign(block, of_generations[generations.of_block(number)], None, config)
        for number, block in enumerate(scaled_query.split(config.block_size, dim=-2))
    ]
    if is_causal:
        query_assignment[0].zero_()  # it sees nothing
    return Clusters(
        torch.stack(of_generations, 2),
        torch.cat(query_assignment, dim=-1),
        key_centroids,
        key_assignment,
        torch.stack(spreads, 2),
    )


def _key_spread(blocks: tuple[Tensor, ...], key_centroids: Tensor, key_assignment: Tensor, key: Tensor) -> Tensor:
    """(batch, key heads, D): variance of the keys of these blocks about their centroids in each dimension, scaled to a
    mean of 1."""
    residuals, begin = [], 0
    for number, block in enumerate(blocks):
        assignment = key_assignment[..., begin : begin + block.shape[-2]].long()
        finite = torch.nan_to_num(block, nan=0.0, posinf=0.0, neginf=0.0)
        residuals.append(finite - take_rows(key_centroids[:, :, number], assignment))
        begin += block.shape[-2]
    if not residuals:
        return torch.ones_like(key[..., 0, :])
    residual = torch.cat(residuals, dim=-2)
    variance = (residual / residual.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30)).square().mean(-2)
    mean = variance.mean(-1, keepdim=True)
    return torch.where(mean > 0, variance / mean.clamp(min=1e-30), 1)


# --- 2. Summaries ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """How far apart the keys of each bucket are, and their number."""

    tilted: Tensor
    """(batch, heads, s i, buckets): `E |k - kbar|^2 / D` under the weights of a summary"""
    plain: Tensor
    """(batch, heads, buckets): the same with equal weights"""
    size: Tensor
    """(batch, heads, buckets)"""


def _summarise(k: Tensor, v: Tensor, centroids: Tensor, member: Tensor, config: MuSeConfig) -> tuple[Summaries, Tensor]:
    """`mu = log sum exp(c_i . k)`, `kbar`, `vbar` = means weighted by `exp(c_i . k)`, over each bucket.

    Also the weights, (batch, heads, s i, buckets, m).
    """
    tilt = (centroids @ k.mT)[:, :, :, None]  # (batch, heads, s i, 1, m)
    mu = masked_logsumexp(tilt, member[:, :, None])
    weights = masked_softmax(tilt, mu, member[:, :, None])
    if not config.differentiable_aggregation:
        weights = weights.detach()
    return Summaries(mu, weights @ k[:, :, None], weights @ v[:, :, None]), weights


def _slopes(
    k: Tensor, v: Tensor, centroids: Tensor, bucket: Tensor, generations: Generations, config: MuSeConfig
) -> tuple[Tensor, Tensor]:
    """(batch, heads, nb, D, Dv): how the values of the summaries that a block sees change with a query's residual, on
    average; and (batch, heads, nb): how far their keys are apart.

    For each bucket that is the covariance of its keys and values. All that a block sees are added with the weights that
    half of the mean centroid gives their keys: less than a query's, because what a query weighs most is retrieved. All
    of it is constant for the gradient: what would flow through it takes the gradients of keys and values further from
    those of exact attention.
    """
    heads, blocks, block_of_key = k.shape[:2], generations.blocks, torch.arange(k.shape[2]) // config.block_size
    slopes, spreads = k.new_zeros(*heads, blocks, k.shape[-1], v.shape[-1]), k.new_zeros(*heads, blocks)
    for block in range(1 if generations.is_causal else 0, blocks):
        seen = (block_of_key < block if generations.is_causal else block_of_key != block).to(k.device)
        keys, values = (torch.where(seen[:, None], x, 0) for x in (k, v))
        centre = TILT_OF_SLOPE * centroids[:, :, generations.of_block(block)].mean(2)  # (batch, heads, D)
        logits = torch.einsum("xhmd,xhd->xhm", keys, centre)
        weights = masked_softmax(logits, masked_logsumexp(logits, seen), seen)
        off = keys - _mean_of_bucket(keys, weights, bucket)
        slopes[:, :, block] = torch.einsum("xhm,xhmd,xhme->xhde", weights, off, values)
        spreads[:, :, block] = torch.einsum("xhm,xhmd->xh", weights, off.square()) / k.shape[-1]
    # NaN and inf must reach what attends to them, not every output that has a slope.
    return torch.where(slopes.isfinite(), slopes, 0), torch.where(spreads.isfinite(), spreads, 0)


def _mean_of_bucket(x: Tensor, weights: Tensor, bucket: Tensor) -> Tensor:
    """The weighted mean of each row's bucket."""
    buckets = int(bucket.max()) + 1
    mass = weights.new_zeros(*weights.shape[:2], buckets).scatter_add(2, bucket, weights)
    sums = x.new_zeros(*x.shape[:2], buckets, x.shape[-1])
    sums = sums.scatter_add(2, bucket[..., None].expand_as(x), weights[..., None] * x)
    return take_rows(sums / torch.where(mass > 0, mass, 1)[..., None], bucket)


def _spread(k: Tensor, summaries: Summaries, weights: Tensor, member: Tensor) -> Spread:
    """The spread of each bucket. Keys are taken relative to the mean of their bucket, so that little cancels."""
    share = member.to(k.dtype)
    size = share.sum(-1)
    share = share / size.clamp(min=1)[..., None]
    finite = torch.nan_to_num(k, nan=0.0, posinf=0.0, neginf=0.0)
    mean = share @ finite  # (batch, heads, buckets, D)
    bucket = member.int().argmax(-2)  # (batch, heads, m)
    squared = (k - take_rows(mean, bucket)).square().sum(-1)  # (batch, heads, m)
    offset = (summaries.key_mean - mean[:, :, None]).square().sum(-1)
    tilted = torch.einsum("xhitm,xhm->xhit", weights, squared) - offset
    plain = torch.einsum("xhtm,xhm->xht", share, squared)
    several, dim = size > 1, k.shape[-1]
    return Spread(
        torch.where(several[:, :, None], tilted.clamp(min=0) / dim, 0), torch.where(several, plain / dim, 0), size
    )


# --- 3. and 4. Second order, and retrieval by tolerance --------------------------------------------------------------


def _mass_off_centroid(sigma: Tensor, size: Tensor) -> Tensor:
    """`log E exp(r . (k - kbar))`: `sigma^2 / 2`, or the most that `size` keys can have if that is less."""
    log_size = size.clamp(min=1).log()
    limit = (2 * log_size).sqrt()
    return torch.where(sigma > limit, sigma * limit - log_size, sigma * sigma / 2)


def _expected_error(log_weight: Tensor, sigma: Tensor, size: Tensor, config: MuSeConfig) -> Tensor:
    """The gain of a summary's weight in the softmax for each deviation, if its logit is `caution` deviations `sigma`
    above its estimate. It counts less for a large bucket, whose keys cost more.

    A few keys along the query's residual can reach it. For small `sigma` it is the weight times `sigma`.
    """
    gain = sigma
    if config.caution > 0:
        gain = torch.expm1((config.caution * sigma).clamp(max=LARGEST_GROWTH)) / config.caution
    return log_weight.exp() * gain / (size.clamp(min=1) / config.mean_bucket).sqrt()


def _largest_logit(token_logits: Tensor, of_key: Tensor, buckets: int) -> Tensor:
    """(batch, heads, n, buckets): the largest logit of a bucket's keys."""
    largest = token_logits.new_full((*token_logits.shape[:-1], buckets), -math.inf)
    return largest.scatter_reduce(-1, of_key, token_logits, "amax")


def _select(wanted: Tensor, query_assignment: Tensor, generations: Generations, config: MuSeConfig) -> Selection:
    """The first row of each tile that wants each bucket."""
    tile, row = place_in_tiles(query_assignment, config)  # (batch, heads, n)
    tiles, length = tiles_of_block(config), wanted.shape[2]
    tile = tile + torch.arange(length, device=tile.device) // config.block_size * tiles
    seen = wanted[..., : generations.seen_blocks * config.key_clusters]
    candidate = torch.where(seen, row[..., None], NO_ROW)
    table = candidate.new_full((*candidate.shape[:2], generations.blocks * tiles, candidate.shape[-1]), NO_ROW)
    table.scatter_reduce_(2, tile[..., None].expand_as(candidate), candidate, "amin")
    return Selection(wanted.new_empty(*wanted.shape[:2], 0, dtype=torch.uint8), table.unflatten(2, (-1, tiles)).byte())


def _retrieved(selection: Selection, query_assignment: Tensor, generations: Generations, config: MuSeConfig) -> Tensor:
    """(batch, heads, n, buckets) bool"""
    tile, row = place_in_tiles(query_assignment, config)
    tile = tile + torch.arange(tile.shape[-1], device=tile.device) // config.block_size * tiles_of_block(config)
    first = take_rows(selection.retrieved.flatten(2, 3), tile)
    unseen = (generations.blocks - generations.seen_blocks) * config.key_clusters
    return torch.nn.functional.pad(first, (0, unseen), value=NO_ROW) <= row[..., None]
