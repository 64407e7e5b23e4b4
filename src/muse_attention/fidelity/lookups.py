"""Whether a query that must look something up finds it: how much of exact attention's weight on it is attended to
token by token, in the query's own block or in a bucket that it retrieves. The rest stays in a summary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muse_attention.core.recording import RecordedCall, recorded_calls
from muse_attention.fidelity.single_keys import SingleKeys


@dataclass(frozen=True)
class Lookup:
    """How much of a needle one query in each head finds, (batch, query heads)."""

    weight: Tensor
    """exact attention's weight on the needle's tokens, float64"""
    found: Tensor
    """the part of it that lies in the query's own block or in a bucket that it retrieves, float64"""
    exact: Tensor
    """the part of it that is attended to exactly: what is found, and keys that are the only one of their summary,
    float64"""
    pairs: Tensor
    """buckets that the query retrieves, int64"""


def found_weight(call: RecordedCall, position: int, needle_positions: Sequence[int] | Tensor) -> Lookup:
    """How much of a needle, the tokens at `needle_positions`, the query at `position` of a recorded call finds."""
    batch, heads, length, _ = call.query.shape
    key_heads, config = call.key.shape[1], call.config
    needle = torch.as_tensor(needle_positions, device=call.key.device).long()
    seen = position + 1 if call.is_causal else length
    if not 0 <= position < length or not len(needle) or not 0 <= int(needle.min()) <= int(needle.max()) < seen:
        raise ValueError(
            f"the query at {position} cannot look up tokens {needle.tolist()} of {length}; choose tokens that it sees"
        )
    queries = call.query[:, :, position].double().unflatten(1, (key_heads, -1))  # (batch, key heads, group, D)
    logits = call.scale * queries @ call.key[:, :, :seen].double().mT
    weights = logits.softmax(-1)[..., needle].flatten(1, 2)  # (batch, heads, needle)

    is_own = needle // config.block_size == position // config.block_size
    is_found = is_own.repeat(batch, heads, 1)
    is_exact = is_found.clone()
    keys = SingleKeys(call)
    pair = torch.meshgrid(
        torch.arange(batch, device=needle.device),
        torch.arange(heads, device=needle.device),
        torch.tensor([position], device=needle.device),
        needle[~is_own],
        indexing="ij",
    )
    is_found[..., ~is_own] = keys.is_retrieved(*pair)[:, :, 0]
    is_exact[..., ~is_own] = (keys.is_retrieved(*pair) | keys.is_alone(*pair))[:, :, 0]
    return Lookup(
        weight=weights.sum(-1),
        found=(weights * is_found).sum(-1),
        exact=(weights * is_exact).sum(-1),
        pairs=keys.pairs(position),
    )


def look_up(
    attention: Callable[..., object],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Iterable[tuple[int, Sequence[int]]],
    **arguments: Any,
) -> list[Lookup]:
    """Call a causal attention of this library, and measure what it finds at `places`: each a query and its needle."""
    with recorded_calls() as calls, torch.no_grad():
        attention(query, key, value, is_causal=True, **arguments)
    (call,) = calls
    return [found_weight(call, position, needle) for position, needle in places]
