"""Synthetic queries, keys and values with the structure MuSe relies on: clustered, with skewed cluster sizes.

Attention of a trained model is neither uniform nor one-hot. Here keys scatter around topic centres of very unequal
popularity, queries look for topics and share a common direction, topics drift along the sequence, and values follow the
topic of their key. On request some queries are lookups: each needs one earlier key, unlike all others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def clustered_qkv(
    batch: int,
    heads: int,
    length: int,
    head_dim: int,
    *,
    key_heads: int | None = None,
    value_dim: int | None = None,
    topics: int = 200,
    spread: float = 0.5,
    sharpness: float = 1.0,
    lookups: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Query (batch, heads, length, head_dim), key and value.

    `spread` is the distance of tokens from their topic's centre, relative to the distance between centres. `sharpness`
    scales the queries, and so the contrast of the logits. `lookups` is the share of queries that look up one key each:
    a key of no topic, from which they take almost all of their softmax, with `1 / sqrt(head_dim)` as the scale. No two
    share a key, and all of these keys come before all of these queries. Positions are the same in every head.
    """
    if not 0 <= lookups <= 0.5:
        raise ValueError(f"lookups={lookups} must be between 0 and 0.5: each lookup needs an earlier key of its own")
    key_heads = heads if key_heads is None else key_heads
    value_dim = head_dim if value_dim is None else value_dim
    generator = torch.Generator("cpu").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu")

    centres = normal(batch, key_heads, topics, head_dim)
    topic_values = normal(batch, key_heads, topics, value_dim)
    # Zipf's law: a few topics hold most of the tokens.
    popularity = torch.arange(1, topics + 1, device="cpu").float().reciprocal()

    def topic_of_tokens(number_of_heads: int) -> Tensor:
        # Each stretch of the sequence favours its own few topics on top of the global popularity.
        stretches = -(-length // 1024)
        favour = torch.exp(normal(batch, number_of_heads, stretches, topics))
        chance = (popularity * favour).flatten(0, 2)
        drawn = torch.multinomial(chance, 1024, replacement=True, generator=generator)
        return drawn.view(batch, number_of_heads, -1)[..., :length]

    def rows(table: Tensor, index: Tensor) -> Tensor:
        return table.gather(2, index[..., None].expand(*index.shape, table.shape[-1]))

    key_topic, query_topic = topic_of_tokens(key_heads), topic_of_tokens(heads)
    shared_centres = centres.repeat_interleave(heads // key_heads, dim=1)
    key = rows(centres, key_topic) + spread * normal(batch, key_heads, length, head_dim)
    sought = rows(shared_centres, query_topic) / 2 + normal(batch, heads, 1, head_dim)
    query = sharpness * (sought + spread / 2 * normal(batch, heads, length, head_dim))
    value = rows(topic_values, key_topic) + spread * normal(batch, key_heads, length, value_dim)
    if lookups:
        places = torch.randperm(length, generator=generator, device="cpu")[: 2 * round(lookups * length)]
        targets, seekers = places.sort().values.chunk(2)
        key[:, :, targets] = normal(batch, key_heads, len(targets), head_dim)
        value[:, :, targets] = normal(batch, key_heads, len(targets), value_dim)
        shuffled = targets[torch.randperm(len(targets), generator=generator, device="cpu")]
        sought = key[:, :, shuffled].repeat_interleave(heads // key_heads, dim=1)
        # A logit of 2 log(length): length other keys with logits around 0 have little weight beside it.
        query[:, :, seekers] = sought * (
            2 * math.log(length) * math.sqrt(head_dim) / sought.square().sum(-1, keepdim=True)
        )
    return query.to(device, dtype), key.to(device, dtype), value.to(device, dtype)
