"""MuSe attention line by line: the definition, and the oracle every backend is tested against.

Everything is dense, in the dtype of the inputs, through plain autograd. It is slow and takes memory quadratic in the
length on purpose. Read it from top to bottom:

1. cluster the queries and the keys separately (`find_clusters`);
2. summarise every bucket, the keys of one cluster in one block, as each query cluster sees it (`_summarise`);
3. accumulate the summaries over the blocks a query can see (`_accumulate`);
4. select, for each query, the clusters to open and the blocks to retrieve (`_select`, or `_select_by_tolerance`);
5. attend: ONE softmax over the query's own block, the retrieved keys, and the summaries of all the rest.

Symbols follow the paper: `q = c + r` is a query, its centroid and its residual; `mu`, `kbar`, `vbar` are a summary's
log-mass and tilted means; `i` is a query cluster, `j` a key cluster, `b` a block, `n` a query, `m` a key. Beyond the
paper, a summary of second order also has the variance of its keys (`Spread`), which corrects its mass for queries off
their centroid and tells how wrong it may be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from muse_attention.config import MuSeConfig
from muse_attention.core.bits import pack_bits, unpack_bits
from muse_attention.core.budget import ERROR_BINS, LARGEST_GROWTH, error_bins, lowest_affordable_bin
from muse_attention.core.shuffle import seeded_shuffle
from muse_attention.core.structures import Clusters, Selection, Summaries

STREAMING_MINIBATCH = 64
STREAMING_DECAY = 0.9


@dataclass(frozen=True)
class Reference:
    """The output of the reference and everything that explains it. `terms` = N + N + K + nb K columns."""

    out: Tensor
    """(batch, heads, N, Dv)"""
    lse: Tensor
    """(batch, heads, N)"""
    clusters: Clusters
    selection: Selection
    weights: Tensor
    """(batch, heads, N, terms): the softmax. Own block by key | retrieved by key | clusters | blocks of clusters"""
    stands_for: Tensor
    """(batch, heads, N, N) int: in how many of query n's terms key m is contained"""


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
    length, head_dim = query.shape[-2:]
    number_of_blocks = config.number_of_blocks(length)
    q = query * (1 / math.sqrt(head_dim) if scale is None else scale)
    if clusters is None:
        clusters = find_clusters(q.detach(), key.detach(), config)

    centroids = clusters.query_centroids.to(q.dtype)

    # Query heads that share a key head share its clustering too.
    group = query.shape[1] // key.shape[1]
    k = key.repeat_interleave(group, dim=1)
    v = value.repeat_interleave(group, dim=1)
    query_cluster = clusters.query_assignment.long()  # (batch, heads, n)
    key_cluster = clusters.key_assignment.long().repeat_interleave(group, dim=1)  # (batch, heads, m)
    block = torch.arange(length, device=q.device) // config.block_size  # (n,)

    # Which blocks a block sees from afar. Its own is attended to exactly, and is never among them.
    blocks = torch.arange(number_of_blocks, device=q.device)
    sees = blocks[:, None] > blocks if is_causal else blocks[:, None] != blocks  # (b, b')

    summaries, weights = _summarise(k, v, centroids, key_cluster, block, config)
    accumulated, shares = _accumulate(summaries, sees)

    # What each query reads: the summaries of its own query cluster, accumulated up to its own block.
    c = _take_rows(centroids, query_cluster)  # (batch, heads, n, D)
    r = q - c
    mu = _take_rows(summaries.log_mass, query_cluster)  # (batch, heads, n, b, j)
    kbar = _take_rows(summaries.key_mean, query_cluster)
    vbar = _take_rows(summaries.value_mean, query_cluster)
    at = torch.arange(length, device=q.device)
    mu_all = _take_rows(accumulated.log_mass, query_cluster)[:, :, at, block]  # (batch, heads, n, j)
    kbar_all = _take_rows(accumulated.key_mean, query_cluster)[:, :, at, block]
    vbar_all = _take_rows(accumulated.value_mean, query_cluster)[:, :, at, block]

    cluster_logits = torch.einsum("xhnd,xhnjd->xhnj", r, kbar_all) + mu_all
    block_logits = torch.einsum("xhnd,xhnbjd->xhnbj", r, kbar) + mu
    cluster_exists = mu_all != -math.inf
    block_exists = (mu != -math.inf) & sees[block][:, :, None]

    # The four groups of terms. Together they contain every visible key exactly once.
    token_logits = q @ k.mT
    own = block[:, None] == block
    if is_causal:
        own = own & (at[:, None] >= at)
    own = own.expand(*q.shape[:2], length, length)

    if config.needs_spread:
        # Constants for the gradient, all of it: letting one flow through it changes nothing that can be measured.
        with torch.no_grad():
            of_blocks = _spread(k, summaries, weights, clusters, key_cluster, block, config)
            of_clusters = _accumulate_spread(of_blocks, summaries, accumulated, shares, sees)
            assert clusters.key_spread is not None
            metric = clusters.key_spread.to(q.dtype).repeat_interleave(group, dim=1)[:, :, None]
            width = (metric * r * r).sum(-1)  # (batch, heads, n)
            cluster_sigma = _sigma(_take_rows(of_clusters.variance, query_cluster)[:, :, at, block], width)
            block_sigma = _sigma(_take_rows(of_blocks.variance, query_cluster), width)
            cluster_size, block_size = of_clusters.size[:, :, block], of_blocks.size[:, :, None]
            cluster_gain = _mass_off_centroid(cluster_sigma, cluster_size)
            block_gain = _mass_off_centroid(block_sigma, block_size)
        if config.uses_second_order:
            cluster_logits, block_logits = cluster_logits + cluster_gain, block_logits + block_gain

    if selection is None and config.tolerance is None:
        selection = _select(cluster_logits, cluster_exists, block_logits, block_exists, config)
    elif selection is None:
        own_lse, far_lse = _masked_logsumexp(token_logits, own), _masked_logsumexp(cluster_logits, cluster_exists)
        lse = torch.logaddexp(own_lse, far_lse).detach()
        selection = _select_by_tolerance(
            _expected_error(cluster_logits, lse[..., None], cluster_sigma, cluster_exists, config),
            _expected_error(block_logits, lse[..., None, None], block_sigma, block_exists, config)
            / (block_size / config.mean_bucket).clamp(min=1 / config.mean_bucket).sqrt(),
            config,
        )
    opened, retrieved = _selection_masks(selection, config, number_of_blocks)

    key_retrieved = retrieved[..., block, :].gather(-1, key_cluster[:, :, None, :, None].expand(-1, -1, length, -1, 1))[
        ..., 0
    ]
    cluster_stays = cluster_exists & ~opened
    block_stays = block_exists & opened[..., None, :] & ~retrieved
    if not config.monopole:
        cluster_stays, block_stays = torch.zeros_like(cluster_stays), torch.zeros_like(block_stays)

    logits = torch.cat([token_logits, token_logits, cluster_logits, block_logits.flatten(-2)], dim=-1)
    present = torch.cat([own, key_retrieved, cluster_stays, block_stays.flatten(-2)], dim=-1)
    lse = _masked_logsumexp(logits, present)
    weights = _masked_softmax(logits, lse, present)
    own_weights, key_weights, cluster_weights, block_weights = weights.split(
        [length, length, config.key_clusters, number_of_blocks * config.key_clusters], dim=-1
    )
    out = (own_weights + key_weights) @ v
    out = out + torch.einsum("xhnj,xhnjd->xhnd", cluster_weights, vbar_all)
    out = out + torch.einsum("xhnt,xhntd->xhnd", block_weights, vbar.flatten(-3, -2))
    if config.dipole != "none":
        correction = _dipole(k, v, clusters, accumulated, key_cluster, block, sees, config)
        correction = _take_rows(correction, query_cluster)[:, :, at, block]  # (batch, heads, n, Dv, D)
        out = out + cluster_weights.sum(-1, keepdim=True) * torch.einsum("xhnvd,xhnd->xhnv", correction, r)

    key_block_visible = sees[block][:, block]
    stands_for = (
        own.int()
        + key_retrieved.int()
        + (cluster_stays.gather(-1, key_cluster[:, :, None].expand(-1, -1, length, -1)) & key_block_visible).int()
        + block_stays[..., block, :].gather(-1, key_cluster[:, :, None, :, None].expand(-1, -1, length, -1, 1))[..., 0]
    )
    return Reference(out, lse, clusters, selection, weights, stands_for)


# --- 1. Clustering ---------------------------------------------------------------------------------------------------


def find_clusters(scaled_query: Tensor, key: Tensor, config: MuSeConfig) -> Clusters:
    """Centroids of queries and of keys over the whole sequence; assignment inside each block, capped if asked for."""
    if config.tilt:
        query_centroids = _centroids(scaled_query, config.query_clusters, config)
        query_assignment = _assign(scaled_query, query_centroids, config.largest_query_cluster, config)
    else:
        # Without a tilt every query cluster would see the same summaries, so one with centroid 0 stands for all.
        query_centroids = torch.zeros_like(scaled_query[..., :1, :])
        query_assignment = torch.zeros(scaled_query.shape[:-1], dtype=torch.int32, device=key.device)
    key_centroids = _centroids(key, config.key_clusters, config)
    key_assignment = _assign(key, key_centroids, config.largest_key_cluster, config)
    spread = find_key_spread(key, key_centroids, key_assignment) if config.needs_spread else None
    return Clusters(query_centroids, query_assignment, key_centroids, key_assignment, spread)


def find_key_spread(key: Tensor, centroids: Tensor, assignment: Tensor) -> Tensor:
    """(batch, key heads, D): variance of the keys about their centroids in each dimension, scaled to a mean of 1."""
    key = torch.nan_to_num(key, nan=0.0, posinf=0.0, neginf=0.0)
    residual = key - _take_rows(centroids, assignment.long())
    variance = (residual / residual.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30)).square().mean(-2)
    mean = variance.mean(-1, keepdim=True)
    return torch.where(mean > 0, variance / mean.clamp(min=1e-30), 1)


def _centroids(vectors: Tensor, clusters: int, config: MuSeConfig) -> Tensor:
    vectors = torch.nan_to_num(vectors, nan=0.0, posinf=0.0, neginf=0.0)
    length = vectors.shape[-2]
    shuffled = vectors[..., seeded_shuffle(length, config.seed, vectors.device), :]
    start = (torch.arange(clusters, device=vectors.device) * max(1, length // clusters)) % length
    centroids = shuffled[..., start, :].clone()

    if config.clustering == "lloyd":
        sample = vectors[..., :: config.lloyd_stride(length, clusters), :]
        for _ in range(config.lloyd_iterations):
            member = torch.nn.functional.one_hot(_affinity(sample, centroids).argmax(-1), clusters).to(vectors.dtype)
            size = member.sum(-2)[..., None]
            centroids = torch.where(size > 0, member.mT @ sample / size.clamp(min=1), centroids)
        return centroids

    total, count = centroids.clone(), torch.ones_like(centroids[..., :1])
    for minibatch in shuffled.split(STREAMING_MINIBATCH, dim=-2):
        nearest = _affinity(minibatch, total / count).argmax(-1)
        for position in range(minibatch.shape[-2]):
            x = minibatch[..., position, None, :]
            hit = nearest[..., position, None, None] == torch.arange(clusters, device=x.device)[:, None]
            total = torch.where(hit, STREAMING_DECAY * total + x, total)
            count = torch.where(hit, STREAMING_DECAY * count + 1, count)
    return total / count


def _affinity(vectors: Tensor, centroids: Tensor) -> Tensor:
    """Larger is nearer: `-|x - c|^2 / 2` without the `|x|^2` that all centroids share."""
    return torch.nan_to_num(vectors @ centroids.mT - (centroids * centroids).sum(-1)[..., None, :] / 2)


def _assign(vectors: Tensor, centroids: Tensor, cap: int | None, config: MuSeConfig) -> Tensor:
    """Nearest centroid, at most `cap` vectors of a block each. It proceeds in rounds.

    In each round every unassigned vector proposes to the nearest centroid that has room, and each centroid accepts
    proposals, lowest position first, until it is full.
    """
    vectors = torch.nan_to_num(vectors, nan=0.0, posinf=0.0, neginf=0.0)
    clusters = centroids.shape[-2]
    affinity = _affinity(vectors, centroids)
    if cap is None:
        return affinity.argmax(-1).int()
    assignment = []
    for block in affinity.split(config.block_size, dim=-2):
        assigned = torch.full(block.shape[:-1], -1, dtype=torch.int64, device=block.device)
        room = torch.full((*block.shape[:-2], 1, clusters), cap, device=block.device)
        while (assigned < 0).any():
            proposal = block.masked_fill(room == 0, -math.inf).argmax(-1)
            proposes = torch.nn.functional.one_hot(proposal, clusters) * (assigned < 0)[..., None]
            accepted = (proposes > 0) & (proposes.cumsum(-2) <= room)
            assigned = torch.where(accepted.any(-1), proposal, assigned)
            room = room - accepted.sum(-2, keepdim=True)
        assignment.append(assigned)
    return torch.cat(assignment, dim=-1).int()


# --- 2. and 3. Summaries ---------------------------------------------------------------------------------------------


def _summarise(
    k: Tensor, v: Tensor, centroids: Tensor, key_cluster: Tensor, block: Tensor, config: MuSeConfig
) -> tuple[Summaries, Tensor]:
    """`mu = log sum exp(c_i . k)`, `kbar`, `vbar` = means weighted by `exp(c_i . k)`, over each bucket (j, b).

    Also the weights, (batch, heads, i, b, j, m).
    """
    member = _bucket_members(key_cluster, block, config)[:, :, None]  # (batch, heads, 1, b, j, m)
    tilt = (centroids @ k.mT)[:, :, :, None, None]  # (batch, heads, i, 1, 1, m)
    mu = _masked_logsumexp(tilt, member)
    weights = _masked_softmax(tilt, mu, member)
    if not config.differentiable_aggregation:
        weights = weights.detach()
    of_buckets = Summaries(
        log_mass=mu,
        key_mean=torch.einsum("xhibjm,xhmd->xhibjd", weights, k),
        value_mean=torch.einsum("xhibjm,xhmd->xhibjd", weights, v),
    )
    return of_buckets, weights


def _bucket_members(key_cluster: Tensor, block: Tensor, config: MuSeConfig) -> Tensor:
    in_cluster = key_cluster[:, :, None] == torch.arange(config.key_clusters, device=block.device)[:, None]
    in_block = block == torch.arange(int(block[-1]) + 1, device=block.device)[:, None]
    return in_block[:, None] & in_cluster[:, :, None]  # (batch, heads, b, j, m)


def _accumulate(summaries: Summaries, sees: Tensor) -> tuple[Summaries, Tensor]:
    """For each block, one summary per key cluster of all the blocks it sees.

    Also the share of each of these blocks in it, (batch, heads, i, b, b', j). Shares follow the log-masses, so they are
    differentiable with frozen aggregation too: the paper freezes the weights inside a bucket alone.
    """
    mu = summaries.log_mass[:, :, :, None]  # (batch, heads, i, 1, b', j)
    visible = sees[:, :, None] & (mu != -math.inf)  # (batch, heads, i, b, b', j)
    mu_all = _masked_logsumexp(mu.mT, visible.mT)  # (batch, heads, i, b, j)
    shares = _masked_softmax(mu.mT, mu_all, visible.mT).mT
    seen = Summaries(
        log_mass=mu_all,
        key_mean=torch.einsum("xhibcj,xhicjd->xhibjd", shares, summaries.key_mean),
        value_mean=torch.einsum("xhibcj,xhicjd->xhibjd", shares, summaries.value_mean),
    )
    return seen, shares


@dataclass(frozen=True)
class Spread:
    """How far the keys behind a summary are from their mean, and how many they are."""

    variance: Tensor
    """(batch, heads, i, b, j): `E |k - kbar|^2 / D` under the summary's weights"""
    size: Tensor
    """(batch, heads, b, j)"""


def _spread(
    k: Tensor,
    summaries: Summaries,
    weights: Tensor,
    clusters: Clusters,
    key_cluster: Tensor,
    block: Tensor,
    config: MuSeConfig,
) -> Spread:
    """Of each bucket. Keys are taken relative to their centroid, so that little cancels."""
    centroids = clusters.key_centroids.to(k.dtype).repeat_interleave(k.shape[1] // clusters.key_centroids.shape[1], 1)
    squared = (k - _take_rows(centroids, key_cluster)).square().sum(-1)  # (batch, heads, m)
    offset = (summaries.key_mean - centroids[:, :, None, None]).square().sum(-1)
    size = _bucket_members(key_cluster, block, config).sum(-1).to(k.dtype)
    variance = torch.einsum("xhibjm,xhm->xhibj", weights, squared) - offset
    return Spread(torch.where(size[:, :, None] > 1, variance.clamp(min=0) / k.shape[-1], 0), size)


def _accumulate_spread(
    of_blocks: Spread, summaries: Summaries, accumulated: Summaries, shares: Tensor, sees: Tensor
) -> Spread:
    """Of each cluster over all the blocks a block sees: the mean inside the blocks, and that of their means."""
    offset = (
        summaries.key_mean[:, :, :, None] - accumulated.key_mean[:, :, :, :, None]
    )  # (batch, heads, i, b, b', j, D)
    each = of_blocks.variance[:, :, :, None] + offset.square().mean(-1)
    size = torch.einsum("bc,xhcj->xhbj", sees.to(shares.dtype), of_blocks.size)
    return Spread((shares * each).sum(-2), size)


def _sigma(variance: Tensor, width: Tensor) -> Tensor:
    """Standard deviation of a query's logits over the keys behind each summary: `variance * width` is its square."""
    return (variance * width.reshape(*width.shape, *[1] * (variance.dim() - width.dim()))).sqrt()


def _mass_off_centroid(sigma: Tensor, size: Tensor) -> Tensor:
    """`log E exp(r . (k - kbar))`: `sigma^2 / 2`, and where so few keys cannot have as much, the most they can."""
    log_size = size.clamp(min=1).log()
    most = (2 * log_size).sqrt()
    return torch.where(sigma > most, sigma * most - log_size, sigma * sigma / 2)


def _dipole(
    k: Tensor,
    v: Tensor,
    clusters: Clusters,
    accumulated: Summaries,
    key_cluster: Tensor,
    block: Tensor,
    sees: Tensor,
    config: MuSeConfig,
) -> Tensor:
    """`C_ib = sum_j p_i(j) Cov_ij(v, k)`: the first-order response of the values, one matrix per query segment.

    The covariances are tilted by each query centroid (`tilted`), by none (`shared`), or by one for all, the mean of
    the query centroids weighted by how many queries they have (`centred`).
    """
    centroids = clusters.query_centroids.to(k.dtype)
    if config.dipole == "shared":
        tilt_points = torch.zeros_like(centroids[:, :, :1])
    elif config.dipole == "centred":
        share = torch.nn.functional.one_hot(clusters.query_assignment.long(), centroids.shape[-2]).to(k.dtype).mean(-2)
        tilt_points = (share[..., None] * centroids).sum(-2, keepdim=True)
    else:
        tilt_points = centroids
    seen = sees[:, block]  # (b, m)
    member = key_cluster[:, :, None] == torch.arange(config.key_clusters, device=k.device)[:, None]
    visible = seen[:, None] & member[:, :, None, None]  # (batch, heads, 1, b, j, m)
    tilt = (tilt_points @ k.mT)[:, :, :, None, None]
    weights = _masked_softmax(tilt, _masked_logsumexp(tilt, visible), visible)
    mu_all, exists = accumulated.log_mass, accumulated.log_mass != -math.inf
    merge = _masked_softmax(mu_all, _masked_logsumexp(mu_all, exists), exists)  # (batch, heads, i, b, j)
    if not config.differentiable_aggregation:
        weights, merge = weights.detach(), merge.detach()  # one matrix of all visible keys: all that forms it
    key_mean = torch.einsum("xhtbjm,xhmd->xhtbjd", weights, k)
    value_mean = torch.einsum("xhtbjm,xhmd->xhtbjd", weights, v)
    covariance = torch.einsum("xhtbjm,xhmv,xhmd->xhtbjvd", weights, v, k)
    covariance = covariance - value_mean[..., :, None] * key_mean[..., None, :]
    return (merge[..., None, None] * covariance).sum(-3)  # (batch, heads, i, b, Dv, D)


# --- 4. Selection ----------------------------------------------------------------------------------------------------


def _select(
    cluster_logits: Tensor, cluster_exists: Tensor, block_logits: Tensor, block_exists: Tensor, config: MuSeConfig
) -> Selection:
    """Open the `k1` clusters of largest logit; in each, retrieve the `k2` blocks of largest logit. Never empty ones."""
    opened = _top(cluster_logits, cluster_exists, config.retrieved_clusters)  # (batch, heads, n, k1)
    column = opened.clamp(min=0)[..., None, :].expand(*block_logits.shape[:-1], -1)  # (batch, heads, n, b, k1)
    exists = block_exists.gather(-1, column) & (opened >= 0)[..., None, :]
    retrieved = _top(block_logits.gather(-1, column).mT, exists.mT, config.retrieved_blocks)
    return Selection(opened.int(), retrieved.int())


def _expected_error(logits: Tensor, lse: Tensor, sigma: Tensor, exists: Tensor, config: MuSeConfig) -> Tensor:
    """What a summary's weight in the softmax gains for each deviation, if its logit is `caution` deviations `sigma`
    above its estimate; 0 where there is none.

    A few keys that lie along the query's residual can have that much. For small `sigma` it is the weight times `sigma`.
    """
    weight = torch.exp(torch.where(exists, logits - lse, -math.inf))
    gain = sigma
    if config.caution > 0:
        gain = (torch.exp((config.caution * sigma).clamp(max=LARGEST_GROWTH)) - 1) / config.caution
    return torch.where(exists, weight * gain, 0).detach()


def _select_by_tolerance(of_clusters: Tensor, of_blocks: Tensor, config: MuSeConfig) -> Selection:
    """Open every cluster, and retrieve every block of an opened one, whose expected error is above the tolerance.

    A head that would exceed its budget takes the pairs of largest error, as far as whole bins of `log2` of it go.
    """
    assert config.tolerance is not None
    opened = of_clusters > config.tolerance  # (batch, heads, n, j)
    wanted = (of_blocks > config.tolerance) & opened[..., None, :]  # (batch, heads, n, b, j)
    bins = error_bins(of_blocks)
    budget = config.retrieved_clusters * of_clusters.shape[2]
    counts = torch.stack([(wanted & (bins == bin_)).flatten(2).sum(-1) for bin_ in range(ERROR_BINS)], dim=-1)
    retrieved = wanted & (bins >= lowest_affordable_bin(counts, budget)[..., None, None, None])
    return Selection(pack_bits(opened), pack_bits(retrieved))


def _top(logits: Tensor, exists: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest logits among those that exist; -1 where there are fewer."""
    count = min(count, logits.shape[-1])
    top = torch.where(exists, logits, -math.inf).topk(count, dim=-1).indices
    return torch.where(exists.gather(-1, top), top, -1)


def _selection_masks(selection: Selection, config: MuSeConfig, number_of_blocks: int) -> tuple[Tensor, Tensor]:
    """`opened` (batch, heads, n, j) and `retrieved` (batch, heads, n, b, j), as booleans."""
    key_clusters = config.key_clusters
    if config.tolerance is not None:
        return unpack_bits(selection.opened, key_clusters), unpack_bits(selection.retrieved, key_clusters)
    opened_at = torch.nn.functional.one_hot(selection.opened.long() + 1, key_clusters + 1)[..., 1:]
    block_at = torch.nn.functional.one_hot(selection.retrieved.long() + 1, number_of_blocks + 1)[..., 1:].sum(-2)
    return opened_at.any(-2), torch.einsum("xhnpj,xhnpb->xhnbj", opened_at.float(), block_at.float()) > 0


# --- Small tools -----------------------------------------------------------------------------------------------------


def _take_rows(table: Tensor, rows: Tensor) -> Tensor:
    """`table[x, h, rows[x, h, n]]` for every n."""
    batch = torch.arange(table.shape[0], device=table.device)[:, None, None]
    head = torch.arange(table.shape[1], device=table.device)[:, None]
    return table[batch, head, rows]


def _masked_logsumexp(logits: Tensor, present: Tensor) -> Tensor:
    """logsumexp over the last axis of what is present; -inf, with zero gradient, where nothing is."""
    largest = torch.where(present, logits, -math.inf).amax(-1, keepdim=True).detach()
    largest = torch.where(largest == -math.inf, 0, largest)
    total = torch.exp(torch.where(present, logits - largest, -math.inf)).sum(-1)
    some = present.any(-1)
    return torch.where(some, torch.log(torch.where(some, total, 1)) + largest[..., 0], -math.inf)


def _masked_softmax(logits: Tensor, lse: Tensor, present: Tensor) -> Tensor:
    """`exp(logits - lse)` of what is present, `lse` being its logsumexp over the last axis; 0 elsewhere."""
    finite_lse = torch.where(lse == -math.inf, 0, lse)[..., None]
    return torch.exp(torch.where(present, logits - finite_lse, -math.inf))
