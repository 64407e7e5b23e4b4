"""The paper's method.

1. cluster the queries and the keys separately (`find_clusters`);
2. summarise every bucket, the keys of one cluster in one block, as each query cluster sees it (`_summarise`);
3. accumulate the summaries over the blocks a query can see (`_accumulate`);
4. select, for each query, the clusters to open and the blocks to retrieve (`_select`);
5. attend: ONE softmax over the query's own block, the retrieved keys, and the summaries of all the rest.

Symbols follow the paper: `q = c + r` is a query, its centroid and its residual; `mu`, `kbar`, `vbar` are a summary's
log-mass and tilted means; `i` is a query cluster, `j` a key cluster, `b` a block, `n` a query, `m` a key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from muse_attention.backends.reference.clustering import assign, find_centroids
from muse_attention.backends.reference.masked import masked_logsumexp, masked_softmax, take_rows
from muse_attention.backends.reference.result import Reference
from muse_attention.config import MuSeConfig
from muse_attention.core.call import Call
from muse_attention.core.structures import Clusters, Selection, Summaries


def attend(call: Call, selection: Selection | None) -> Reference:
    """Attention of scaled queries."""
    q, key, value, clusters, config = call.query, call.key, call.value, call.clusters, call.config
    is_causal, length = call.is_causal, q.shape[-2]
    number_of_blocks = config.number_of_blocks(length)
    centroids = clusters.query_centroids.to(q.dtype)

    # Query heads that share a key head share its clustering too.
    group = q.shape[1] // key.shape[1]
    k, v = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    query_cluster = clusters.query_assignment.long()  # (batch, heads, n)
    key_cluster = clusters.key_assignment.long().repeat_interleave(group, dim=1)  # (batch, heads, m)
    of_key = key_cluster[:, :, None].expand(-1, -1, length, -1)  # (batch, heads, n, m)
    block = torch.arange(length, device=q.device) // config.block_size  # (n,)

    # Which blocks a block sees from afar. Its own is attended to exactly, and is never among them.
    blocks = torch.arange(number_of_blocks, device=q.device)
    sees = blocks[:, None] > blocks if is_causal else blocks[:, None] != blocks  # (b, b')

    summaries = _summarise(k, v, centroids, key_cluster, block, config)
    accumulated = _accumulate(summaries, sees)

    # What each query reads: the summaries of its own query cluster, accumulated up to its own block.
    r = q - take_rows(centroids, query_cluster)  # (batch, heads, n, D)
    mu, kbar, vbar = (take_rows(table, query_cluster) for table in summaries.parts())  # (batch, heads, n, b, j, ..)
    at = torch.arange(length, device=q.device)
    mu_all, kbar_all, vbar_all = (  # (batch, heads, n, j, ..)
        take_rows(table, query_cluster)[:, :, at, block] for table in accumulated.parts()
    )

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

    if selection is None:
        selection = _select(cluster_logits, cluster_exists, block_logits, block_exists, config)
    opened, retrieved = _selection_masks(selection, config, number_of_blocks)

    key_retrieved = retrieved[..., block, :].gather(-1, of_key[..., None])[..., 0]
    cluster_stays = cluster_exists & ~opened
    block_stays = block_exists & opened[..., None, :] & ~retrieved
    if not config.monopole:
        cluster_stays, block_stays = torch.zeros_like(cluster_stays), torch.zeros_like(block_stays)

    logits = torch.cat([token_logits, token_logits, cluster_logits, block_logits.flatten(-2)], dim=-1)
    present = torch.cat([own, key_retrieved, cluster_stays, block_stays.flatten(-2)], dim=-1)
    lse = masked_logsumexp(logits, present)
    weights = masked_softmax(logits, lse, present)
    own_weights, key_weights, cluster_weights, block_weights = weights.split(
        [length, length, config.key_clusters, number_of_blocks * config.key_clusters], dim=-1
    )
    out = (own_weights + key_weights) @ v
    out = out + torch.einsum("xhnj,xhnjd->xhnd", cluster_weights, vbar_all)
    out = out + torch.einsum("xhnt,xhntd->xhnd", block_weights, vbar.flatten(-3, -2))
    if config.dipole != "none":
        correction = _dipole(k, v, clusters, accumulated, key_cluster, block, sees, config)
        correction = take_rows(correction, query_cluster)[:, :, at, block]  # (batch, heads, n, Dv, D)
        out = out + cluster_weights.sum(-1, keepdim=True) * torch.einsum("xhnvd,xhnd->xhnv", correction, r)

    key_block_visible = sees[block][:, block]
    stands_for = (
        own.int()
        + key_retrieved.int()
        + (cluster_stays.gather(-1, of_key) & key_block_visible).int()
        + block_stays[..., block, :].gather(-1, of_key[..., None])[..., 0]
    )
    return Reference(out, lse, clusters, selection, weights, stands_for)


# --- 1. Clustering ---------------------------------------------------------------------------------------------------


def find_clusters(scaled_query: Tensor, key: Tensor, config: MuSeConfig) -> Clusters:
    """Centroids of queries and of keys over the whole sequence; assignment inside each block, capped if configured."""
    if config.tilt:
        query_centroids = find_centroids(scaled_query, config.query_clusters, config)
        query_assignment = assign(scaled_query, query_centroids, config.largest_query_cluster, config)
    else:
        # Without a tilt every query cluster would see the same summaries, so one with centroid 0 stands for all.
        query_centroids = torch.zeros_like(scaled_query[..., :1, :])
        query_assignment = torch.zeros(scaled_query.shape[:-1], dtype=torch.int32, device=key.device)
    key_centroids = find_centroids(key, config.key_clusters, config)
    key_assignment = assign(key, key_centroids, config.largest_key_cluster, config)
    return Clusters(query_centroids, query_assignment, key_centroids, key_assignment)


# --- 2. and 3. Summaries ---------------------------------------------------------------------------------------------


def _summarise(
    k: Tensor, v: Tensor, centroids: Tensor, key_cluster: Tensor, block: Tensor, config: MuSeConfig
) -> Summaries:
    """`mu = log sum exp(c_i . k)`, `kbar`, `vbar` = means weighted by `exp(c_i . k)`, over each bucket (j, b)."""
    in_cluster = key_cluster[:, :, None] == torch.arange(config.key_clusters, device=block.device)[:, None]
    in_block = block == torch.arange(int(block[-1]) + 1, device=block.device)[:, None]
    member = (in_block[:, None] & in_cluster[:, :, None])[:, :, None]  # (batch, heads, 1, b, j, m)
    tilt = (centroids @ k.mT)[:, :, :, None, None]  # (batch, heads, i, 1, 1, m)
    mu = masked_logsumexp(tilt, member)
    weights = masked_softmax(tilt, mu, member)
    if not config.differentiable_aggregation:
        weights = weights.detach()
    return Summaries(
        log_mass=mu,
        key_mean=torch.einsum("xhibjm,xhmd->xhibjd", weights, k),
        value_mean=torch.einsum("xhibjm,xhmd->xhibjd", weights, v),
    )


def _accumulate(summaries: Summaries, sees: Tensor) -> Summaries:
    """For each block, one summary per key cluster of all the blocks it sees.

    Shares of blocks follow the log-masses, so they are differentiable with frozen aggregation too: the paper freezes
    the weights inside a bucket alone.
    """
    mu = summaries.log_mass[:, :, :, None]  # (batch, heads, i, 1, b', j)
    visible = sees[:, :, None] & (mu != -math.inf)  # (batch, heads, i, b, b', j)
    mu_all = masked_logsumexp(mu.mT, visible.mT)  # (batch, heads, i, b, j)
    shares = masked_softmax(mu.mT, mu_all, visible.mT).mT
    return Summaries(
        log_mass=mu_all,
        key_mean=torch.einsum("xhibcj,xhicjd->xhibjd", shares, summaries.key_mean),
        value_mean=torch.einsum("xhibcj,xhicjd->xhibjd", shares, summaries.value_mean),
    )


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
    weights = masked_softmax(tilt, masked_logsumexp(tilt, visible), visible)
    mu_all, exists = accumulated.log_mass, accumulated.log_mass != -math.inf
    merge = masked_softmax(mu_all, masked_logsumexp(mu_all, exists), exists)  # (batch, heads, i, b, j)
    if not config.differentiable_aggregation:
        weights, merge = weights.detach(), merge.detach()  # all weights that form the matrix
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


def _top(logits: Tensor, exists: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest logits among those that exist; -1 where there are fewer."""
    count = min(count, logits.shape[-1])
    top = torch.where(exists, logits, -math.inf).topk(count, dim=-1).indices
    return torch.where(exists.gather(-1, top), top, -1)


def _selection_masks(selection: Selection, config: MuSeConfig, number_of_blocks: int) -> tuple[Tensor, Tensor]:
    """`opened` (batch, heads, n, j) and `retrieved` (batch, heads, n, b, j), as booleans."""
    key_clusters = config.key_clusters
    opened_at = torch.nn.functional.one_hot(selection.opened.long() + 1, key_clusters + 1)[..., 1:]
    block_at = torch.nn.functional.one_hot(selection.retrieved.long() + 1, number_of_blocks + 1)[..., 1:].sum(-2)
    return opened_at.any(-2), torch.einsum("xhnpj,xhnpb->xhnbj", opened_at.float(), block_at.float()) > 0
