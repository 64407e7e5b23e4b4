"""Block-diagonal attention: each query attends to its own block, exactly, and to nothing else."""

from __future__ import annotations

from torch import Tensor

from muse_attention import ops
from muse_attention.config import MuSeConfig
from muse_attention.core.arguments import check_arguments
from muse_attention.core.call import Call
from muse_attention.core.sides import single_cluster


def block_diagonal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    block_size: int,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """MuSe attention with neither summaries nor retrieval is block-diagonal attention."""
    query, factor = check_arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    config = MuSeConfig(query_clusters=1, key_clusters=1, retrieved_clusters=0, monopole=False, block_size=block_size)
    call = Call(query, key, value, single_cluster(query, key), config, is_causal, factor)
    merged, _ = ops.attend(call, "torch")
    return (merged.out, merged.lse) if return_lse else merged.out
