"""Attention of a shard of queries to keys that another rank holds, and the merge of such results into one softmax.

A causal ring: each rank attends to its own keys causally, to each shard before it with `remote_attention`, and merges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from muse_attention.core.merging import merge
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Partial
from muse_attention.registry import Attention, get_attention


def merge_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs of the same queries over disjoint sets of keys, merged as one softmax over all keys; differentiable.

    Args:
        outs: (..., value_dim) each
        lses: (...,) each, the logsumexp of each query's logits; -inf for a query that saw no key, whose output is 0

    Returns:
        The output over all keys, in the dtype of the first, and its lse.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"{len(outs)} outputs and {len(lses)} lses; pass one lse with each output, and at least one")
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != outs[0].shape or lse.shape != outs[0].shape[:-1]:
            raise ValueError(
                f"output {index} has shape {tuple(out.shape)} and its lse {tuple(lse.shape)}; with a first output of "
                f"shape {tuple(outs[0].shape)} they must have that and {tuple(outs[0].shape[:-1])}"
            )
    dtype = outs[0].dtype
    saw_nothing = torch.stack([lse == -torch.inf for lse in lses]).all(0)
    # (The gradient of a logsumexp of nothing but -inf is NaN.)
    partials = [Partial(out, lse.masked_fill(saw_nothing, 0)) for out, lse in zip(outs, lses, strict=True)]
    merged = merge(partials, compute_dtype(dtype))
    return merged.out.to(dtype), merged.lse.masked_fill(saw_nothing, -torch.inf)


def remote_attention(
    attention: Attention | str, query: Tensor, key: Tensor, value: Tensor, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """Attention of queries to all of some other keys; their lengths may differ.

    Attentions of this library have as many queries as keys. So the queries are cut into pieces as long as the keys,
    which become additional heads. Queries repeated from the start fill up the last piece, and their output is dropped.
    The cost is that of attention to `ceil(queries / keys)` sequences of the length of the keys: least if the lengths
    are equal, or if that of the keys divides that of the queries.

    In MuSe a query attends exactly to the block of keys with the number of its own block, as in any call.

    Args:
        attention: a name for `get_attention`, or a function that it returns
        query: (batch, heads, queries, head_dim)
        key: (batch, key heads, keys, head_dim); the key heads divide the heads
        value: (batch, key heads, keys, value_dim)
        arguments: passed to `attention`, as `scale`

    Returns:
        (batch, heads, queries, value_dim), and the lse, (batch, heads, queries), for `merge_partials`.
    """
    for name in ("is_causal", "return_lse"):
        if name in arguments:
            raise ValueError(f"{name} is set already: remote keys are all seen, and the lse is returned; leave it out")
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dim() != 4 or 0 in tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must have four axes of at least 1: (batch, heads, length, "
                "head_dim)"
            )
    attend = get_attention(attention) if isinstance(attention, str) else attention
    queries, keys = query.shape[2], key.shape[2]
    pieces = -(-queries // keys)
    filled = pieces * keys
    if queries < filled:
        query = query.repeat(1, 1, -(-filled // queries), 1)[:, :, :filled]
    cut = query.unflatten(2, (pieces, keys)).flatten(1, 2)
    arguments = {"enable_gqa": True} | arguments
    out, lse = attend(cut, key, value, is_causal=False, return_lse=True, **arguments)
    return tuple(result.unflatten(1, (-1, pieces)).flatten(2, 3)[:, :, :queries] for result in (out, lse))
