"""`ulysses`: attention to sequences that are sharded over the ranks of a mesh, by an exchange of sequence for heads.

Attention sees whole sequences, so clusters, summaries and selections are those of one process.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from muse_attention.distributed.agreement import check_agreement
from muse_attention.distributed.all_to_all import check_heads, heads_to_sequence, mesh_ranks, sequence_to_heads
from muse_attention.registry import Attention, get_attention


def ulysses(
    attention: Attention | Any, query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh, **arguments: Any
) -> Any:
    """Attention to whole sequences, each rank with some of the heads. Collective: every rank of the mesh must call it.

        out = ulysses("muse", query, key, value, mesh["sequence"], is_causal=True, enable_gqa=True)

    Rank `r` of `R` holds the `r`-th of `R` equal parts of every sequence. `R` must divide the query heads. Where `R`
    does not divide the key heads, each is sent to all ranks that need it: `copies = R / gcd(R, key heads)`.

    A rank sends, and receives, in the forward pass

        batch * length / R * (R - 1) / R * (heads + copies * key heads) * (head_dim + value_dim)

    numbers, and as many in the backward pass; `ulysses_bytes` computes it. Beside the queries, keys, values and outputs
    of its heads it needs memory for at most two tensors of their size: what is sent, and what is received. One rank
    calls `attention` with the tensors as they are: nothing is copied.

    The first call on a process group also compares the shapes and dtypes of all ranks, and raises ValueError on each of
    them if one differs. Later calls do not compare, and compiled ones never do: the host would wait in each
    (`agreement.py`).

    Args:
        attention: a name for `get_attention`, or any function of (batch, heads, length, head_dim) queries, keys and
            values. It gets whole sequences, so boundaries of packed documents that it knows count over the whole row
        query: (batch, heads, length / R, head_dim)
        key: (batch, key heads, length / R, head_dim); the key heads divide the heads
        value: (batch, key heads, length / R, value_dim)
        mesh: of one dimension, as `mesh["sequence"]`
        arguments: passed to `attention`: `is_causal`, `scale`, `enable_gqa`, `return_lse`, ...

    Returns:
        What `attention` returns, a tensor or a tuple of tensors (batch, heads, length, ...), each with this rank's part
        of the length.
    """
    attend = get_attention(attention) if isinstance(attention, str) else attention
    ranks = mesh_ranks(mesh)
    if ranks == 1:
        return attend(query, key, value, **arguments)
    check_agreement(mesh, query=query, key=key, value=value)
    _check_shards(query, key, value, ranks)
    copies = _key_copies(key.shape[1], ranks)
    result = attend(
        sequence_to_heads(query, mesh),
        sequence_to_heads(key, mesh, copies),
        sequence_to_heads(value, mesh, copies),
        **arguments,
    )
    if isinstance(result, tuple):
        return tuple(heads_to_sequence(part, mesh) for part in result)
    return heads_to_sequence(result, mesh)


def ulysses_bytes(
    *,
    length: int,
    heads: int,
    key_heads: int,
    head_dim: int,
    ranks: int,
    value_dim: int | None = None,
    batch: int = 1,
    element_size: int = 2,
) -> int:
    """Bytes that a rank sends to others in the forward pass of `ulysses`; as many again in the backward pass.

    `length` is that of whole sequences. `value_dim` is `head_dim` by default, `element_size` that of half precision.
    """
    check_heads("query", heads, ranks)
    if length % ranks:
        raise ValueError(f"the {ranks} ranks do not divide the length {length}; pad the sequences")
    sent_heads = (heads + _key_copies(key_heads, ranks) * key_heads) // ranks * (ranks - 1)
    width = head_dim + (head_dim if value_dim is None else value_dim)
    return batch * (length // ranks) * sent_heads * width * element_size


def _key_copies(key_heads: int, ranks: int) -> int:
    """How often a key head is sent, so that each rank has the key heads of its query heads."""
    return ranks // math.gcd(ranks, key_heads)


def _check_shards(query: Tensor, key: Tensor, value: Tensor, ranks: int) -> None:
    """Check what attention cannot check after the exchange."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            actual = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"type {type(tensor).__name__}"
            raise ValueError(
                f"{name} has {actual}; it must be a tensor with four axes: (batch, heads, length, head_dim)"
            )
        if tensor.shape[2] != query.shape[2]:
            raise ValueError(f"{name} has length {tensor.shape[2]}, query {query.shape[2]}; a rank holds equal parts")
    if key.shape[1] != value.shape[1]:
        raise ValueError(f"key has {key.shape[1]} heads, value {value.shape[1]}; they must be equal")
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"query has {query.shape[1]} heads, not a multiple of the {key.shape[1]} heads of key")
    check_heads("query", query.shape[1], ranks)
