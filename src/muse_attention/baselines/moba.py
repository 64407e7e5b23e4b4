"""Mixture of block attention (Lu et al., 2025): the own block, and the past blocks whose mean key fits the query best.

The size of the own, exactly attended block and the size of the blocks that are retrieved are separate settings. A
retrieved block takes the place of a bucket of MuSe, and all that follows the choice of blocks is MuSe without its
summaries.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from muse_attention import ops
from muse_attention.backends.choice import resolve_backend
from muse_attention.config import MuSeConfig
from muse_attention.core.arguments import check_arguments
from muse_attention.core.call import Call
from muse_attention.core.precision import compute_dtype
from muse_attention.core.sides import single_cluster


def moba_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    local_block_size: int = 512,
    retrieval_block_size: int = 512,
    retrieved_blocks: int = 8,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to the own block of `local_block_size`, and to `retrieved_blocks` blocks of `retrieval_block_size`.

    Candidates are the retrieval blocks outside the query's own block, and before it if `is_causal`. Those whose
    mean key has the largest logit are retrieved. As in MoBA's own code, means are rounded to the precision of the keys,
    and logits are summed in float32: where two means round to the same, which one is retrieved is left open.
    """
    query, factor = check_arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    for name, size in (
        ("local_block_size", local_block_size),
        ("retrieval_block_size", retrieval_block_size),
        ("retrieved_blocks", retrieved_blocks),
    ):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r} must be an integer of at least 1")
    if local_block_size % retrieval_block_size:
        raise ValueError(
            f"local_block_size={local_block_size} must be a multiple of retrieval_block_size={retrieval_block_size}, "
            "so that no retrieved block overlaps the own block"
        )
    blocks_per_local = local_block_size // retrieval_block_size
    config = MuSeConfig(
        query_clusters=1,
        key_clusters=blocks_per_local,
        retrieved_clusters=retrieved_blocks,
        block_size=local_block_size,
        monopole=False,
    )
    query, key, value = ops.as_contiguous(*ops.cast_for_autocast(query, key, value))
    backend = resolve_backend(backend, query, value, config)
    means = _block_means(key.detach(), retrieval_block_size)
    selection = ops.choose_blocks(query, means, config, is_causal=is_causal, backend=backend)
    position = torch.arange(key.shape[2], device=key.device)
    place = (position % local_block_size // retrieval_block_size).int()
    clusters = replace(single_cluster(query, key), key_assignment=place.expand(key.shape[:3]))
    call = Call(query, key, value, clusters, config, is_causal, factor)
    merged, _ = ops.attend(call, backend, selection)
    return (merged.out, merged.lse) if return_lse else merged.out


def _block_means(key: Tensor, block_size: int) -> Tensor:
    """(batch, key heads, blocks, D): the mean key of each block, of which the last may be shorter."""
    blocks, rest = divmod(key.shape[2], block_size)
    wide = compute_dtype(key.dtype)
    means = key[:, :, : blocks * block_size].unflatten(2, (blocks, block_size)).mean(3, dtype=wide)
    if rest:
        means = torch.cat([means, key[:, :, -rest:].mean(2, keepdim=True, dtype=wide)], 2)
    return means.to(key.dtype)
