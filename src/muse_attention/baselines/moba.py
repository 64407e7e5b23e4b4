"""Mixture of block attention (Lu et al., 2025): the own block, and the past blocks whose mean key fits the query best.

The size of the own, exactly attended block and the size of the blocks that are retrieved are separate settings. A
retrieved block takes the place of a bucket of MuSe, and all that follows the choice of blocks is MuSe without its
summaries.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from muse_attention import ops
from muse_attention.backends.choice import resolve_backend
from muse_attention.config import MuSeConfig
from muse_attention.core.arguments import check_arguments
from muse_attention.core.call import Call
from muse_attention.core.precision import compute_dtype
from muse_attention.core.sides import single_cluster
from muse_attention.core.structures import Selection

_QUERY_CHUNK = 4096
"""Queries scored at a time."""


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

    Candidates are the retrieval blocks outside the query's own block, and before it if `is_causal`. Those are retrieved
    whose mean key has the largest logit.
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
    query, key, value = ops.cast_for_autocast(query, key, value)
    with torch.autocast(query.device.type, enabled=False):
        chosen = _choose_blocks(query.detach(), key.detach(), config, is_causal=is_causal)
    selection = Selection(
        opened=torch.where(chosen < 0, -1, chosen % blocks_per_local).int(),
        retrieved=torch.where(chosen < 0, -1, chosen // blocks_per_local).int()[..., None],
    )
    position = torch.arange(key.shape[2], device=key.device)
    place = (position % local_block_size // retrieval_block_size).int()
    clusters = replace(single_cluster(query, key), key_assignment=place.expand(key.shape[:3]))
    call = Call(query, key, value, clusters, config, is_causal, factor)
    merged, _ = ops.attend(call, resolve_backend(backend, query, value, config), selection)
    return (merged.out, merged.lse) if return_lse else merged.out


def _choose_blocks(query: Tensor, key: Tensor, config: MuSeConfig, *, is_causal: bool) -> Tensor:
    """(batch, heads, N, retrieved blocks): numbers of those each query retrieves; -1 where there are fewer."""
    length, local_size = key.shape[2], config.block_size
    block_size = local_size // config.key_clusters
    blocks = -(-length // block_size)
    padded = pad(key.to(compute_dtype(key.dtype)), (0, 0, 0, blocks * block_size - length)).unflatten(
        2, (blocks, block_size)
    )
    number = torch.arange(blocks, device=key.device)
    sizes = (length - number * block_size).clamp(max=block_size)
    means = padded.sum(3) / sizes[:, None]
    means = means.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    count = min(config.retrieved_clusters, blocks)
    local_of_block = number // config.key_clusters
    chosen = []
    for begin in range(0, length, _QUERY_CHUNK):
        queries = query[:, :, begin : begin + _QUERY_CHUNK].to(means.dtype)
        own = torch.arange(begin, begin + queries.shape[2], device=key.device)[:, None] // local_size
        candidate = local_of_block < own if is_causal else local_of_block != own
        scores = (queries @ means.mT).masked_fill(~candidate, -torch.inf)
        top = scores.topk(count, dim=-1)
        chosen.append(torch.where(top.values == -torch.inf, -1, top.indices))
    return torch.cat(chosen, dim=2)
