"""Centroids of vectors, and the centroid of each vector: shared by both methods."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from muse_attention.config import MuSeConfig
from muse_attention.core.shuffle import seeded_shuffle

STREAMING_MINIBATCH = 64
STREAMING_DECAY = 0.9


def find_centroids(vectors: Tensor, clusters: int, config: MuSeConfig) -> Tensor:
    vectors = torch.nan_to_num(vectors, nan=0.0, posinf=0.0, neginf=0.0)
    length = vectors.shape[-2]
    shuffled = vectors[..., seeded_shuffle(length, config.seed, vectors.device), :]
    start = (torch.arange(clusters, device=vectors.device) * max(1, length // clusters)) % length
    centroids = shuffled[..., start, :].clone()

    if config.clustering == "lloyd":
        sample = vectors[..., :: config.lloyd_stride(length, clusters), :]
        for _ in range(config.lloyd_iterations):
            member = torch.nn.functional.one_hot(affinity(sample, centroids).argmax(-1), clusters).to(vectors.dtype)
            size = member.sum(-2)[..., None]
            centroids = torch.where(size > 0, member.mT @ sample / size.clamp(min=1), centroids)
        return centroids

    total, count = centroids.clone(), torch.ones_like(centroids[..., :1])
    for minibatch in shuffled.split(STREAMING_MINIBATCH, dim=-2):
        nearest = affinity(minibatch, total / count).argmax(-1)
        for position in range(minibatch.shape[-2]):
            x = minibatch[..., position, None, :]
            hit = nearest[..., position, None, None] == torch.arange(clusters, device=x.device)[:, None]
            total = torch.where(hit, STREAMING_DECAY * total + x, total)
            count = torch.where(hit, STREAMING_DECAY * count + 1, count)
    return total / count


def affinity(vectors: Tensor, centroids: Tensor) -> Tensor:
    """Larger is nearer: `-|x - c|^2 / 2` without the `|x|^2` that all centroids share."""
    return torch.nan_to_num(vectors @ centroids.mT - (centroids * centroids).sum(-1)[..., None, :] / 2)


def assign(vectors: Tensor, centroids: Tensor, cap: int | None, config: MuSeConfig) -> Tensor:
    """Nearest centroid, at most `cap` vectors of a block each. It proceeds in rounds.

    In each round every unassigned vector proposes to the nearest centroid that has room, and each centroid accepts
    proposals, lowest position first, until it is full.
    """
    vectors = torch.nan_to_num(vectors, nan=0.0, posinf=0.0, neginf=0.0)
    clusters = centroids.shape[-2]
    near = affinity(vectors, centroids)
    if cap is None:
        return near.argmax(-1).int()
    assignment = []
    for block in near.split(config.block_size, dim=-2):
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
