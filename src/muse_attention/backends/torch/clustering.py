"""Stage 1: centroids over the whole sequence, then capped assignment inside each block."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from muse_attention.backends.torch.grouping import group_rows, head_groups, transposed
from muse_attention.config import MuSeConfig
from muse_attention.core.precision import compute_dtype
from muse_attention.core.shuffle import seeded_shuffle
from muse_attention.core.sides import join_sides, sides_to_cluster
from muse_attention.core.structures import Clusters, Side

MINIBATCH = 64
DECAY = 0.9


def find_clusters(query: Tensor, key: Tensor, config: MuSeConfig, *, scale: float) -> Clusters:
    """Cluster the scaled queries and the keys of each head, a few heads at a time."""
    sides = sides_to_cluster(query, key, config, scale=scale)
    return join_sides(query, *(table for side in sides for table in _cluster(side, config)))


def _cluster(side: Side, config: MuSeConfig) -> tuple[Tensor, Tensor]:
    """Centroids (batch, heads, clusters, D) and assignment (batch, heads, N) int32."""
    length, head_dim = side.vectors.shape[2:]
    heads = side.vectors.flatten(0, 1)
    dtype = compute_dtype(heads.dtype)
    parts = []
    for group in head_groups(heads.shape[0], 2 * length * (side.clusters + head_dim)):
        vectors = finite(heads[group].to(dtype) * side.factor)
        centroids = find_centroids(vectors, side.clusters, config)
        parts.append((centroids, assign(vectors, centroids, side.cap, config)))
    centroids, assignment = (torch.cat(part) for part in zip(*parts, strict=True))
    return centroids.unflatten(0, side.vectors.shape[:2]), assignment.unflatten(0, side.vectors.shape[:2])


def finite(vectors: Tensor) -> Tensor:
    """Replace NaN and inf by 0: they must reach what attends to them, not the clustering of everything else."""
    return torch.nan_to_num(vectors, nan=0.0, posinf=0.0, neginf=0.0)


def find_centroids(vectors: Tensor, clusters: int, config: MuSeConfig) -> Tensor:
    """(heads, clusters, D), of (heads, N, D) vectors."""
    length = vectors.shape[1]
    order = seeded_shuffle(length, config.seed, vectors.device)
    start = order[(torch.arange(clusters, device=order.device) * max(1, length // clusters)) % length]
    if config.clustering == "lloyd":
        sample = vectors[:, :: config.lloyd_stride(length, clusters)]
        return _lloyd(sample, vectors[:, start], config.lloyd_iterations)
    return _streaming(vectors[:, order], vectors[:, start])


def nearest(vectors: Tensor, centroids: Tensor) -> Tensor:
    """(heads, N) int32: the nearest centroid of each of (heads, N, D) vectors."""
    return _nearest(_affinity(vectors, centroids).nan_to_num_()).int()


def _lloyd(vectors: Tensor, centroids: Tensor, iterations: int) -> Tensor:
    for _ in range(iterations):
        number = torch.arange(centroids.shape[1], device=vectors.device)
        members = (_nearest(_affinity(vectors, centroids))[..., None] == number).to(vectors.dtype)
        sizes = members.sum(1)[..., None]
        centroids = torch.where(sizes > 0, members.mT @ vectors / sizes.clamp(min=1), centroids)
    return centroids


def _streaming(shuffled: Tensor, centroids: Tensor) -> Tensor:
    """One pass in minibatches. A centroid that receives `x_1 .. x_m` in a minibatch ends it with the total
    `DECAY^m t + sum_r DECAY^(m-r) x_r`: the closed form of updating it with one vector after another."""
    heads, clusters, _ = centroids.shape
    powers = DECAY ** torch.arange(MINIBATCH, device=shuffled.device, dtype=shuffled.dtype)
    after = torch.ones(MINIBATCH, MINIBATCH, dtype=torch.bool, device=shuffled.device).triu(1)
    members = shuffled.new_empty(heads, MINIBATCH, clusters)
    # A column of ones makes the count one more total.
    shuffled = torch.cat([shuffled, torch.ones_like(shuffled[..., :1])], dim=-1)
    totals = torch.cat([centroids, torch.ones_like(centroids[..., :1])], dim=-1)
    for minibatch in shuffled.split(MINIBATCH, dim=1):
        size = minibatch.shape[1]
        nearest = _nearest(_affinity(minibatch[..., :-1], centroids))
        followers = ((nearest[..., None] == nearest[:, None]) & after[:size, :size]).sum(-1)
        member = members[:, :size].zero_().scatter_(2, nearest[..., None], 1)
        received = torch.bmm(member.mT, minibatch * powers[followers][..., None])
        # The last column is now 1 + DECAY + .. + DECAY^(m-1), which tells DECAY^m.
        totals = torch.addcmul(received, totals, 1 - (1 - DECAY) * received[..., -1:])
        centroids = totals[..., :-1] / totals[..., -1:]
    return centroids


def assign(vectors: Tensor, centroids: Tensor, cap: int | None, config: MuSeConfig) -> Tensor:
    """Nearest centroid, at most `cap` vectors of a block each. It proceeds in rounds.

    In each round every unassigned vector proposes to the nearest centroid that has room, and each centroid accepts
    proposals, lowest position first, until it is full.
    """
    heads, length, _ = vectors.shape
    clusters = centroids.shape[1]
    affinity = _affinity(vectors, centroids).nan_to_num_()
    assignment = _nearest(affinity).flatten()  # (heads * N,)
    if cap is None:
        return assignment.view(heads, length).int()

    affinity = affinity.flatten(0, 1)
    position = torch.arange(length, device=vectors.device)
    blocks = config.number_of_blocks(length)
    head = torch.arange(heads, device=vectors.device)[:, None]
    block = (head * blocks + position // config.block_size).flatten()  # (heads * N,)
    room = torch.full((heads * blocks * clusters,), cap, device=vectors.device)
    waiting = torch.arange(heads * length, device=vectors.device)
    while waiting.numel():
        if waiting.numel() < assignment.numel():
            full = (room == 0).view(-1, clusters)[block[waiting]]
            assignment[waiting] = _nearest(affinity[waiting].masked_fill(full, -math.inf))
        proposals = group_rows(block[waiting] * clusters + assignment[waiting], room.shape[0])
        limit = torch.repeat_interleave(proposals.starts + room, proposals.sizes)
        rejected = torch.arange(waiting.numel(), device=waiting.device) >= limit
        room = (room - proposals.sizes).clamp(min=0)
        waiting = waiting[proposals.order[rejected].sort().values]
    return assignment.view(heads, length).int()


def _affinity(vectors: Tensor, centroids: Tensor) -> Tensor:
    """Larger is nearer: `-|x - c|^2 / 2` without the `|x|^2` that all centroids share."""
    norms = (centroids * centroids).sum(-1)[:, None]
    return torch.baddbmm(norms, vectors, transposed(centroids), beta=-0.5)


def _nearest(affinity: Tensor) -> Tensor:
    """The first index of the largest affinity: `argmax`, by the operator that is faster for it."""
    return affinity.max(-1).indices
