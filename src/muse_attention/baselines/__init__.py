"""Attentions to compare with, with the same signature: exact, block-diagonal, mixture of block attention, and those of
other libraries: sparse `flex_attention`, native sparse attention and flash-sparse-attn."""

from muse_attention.baselines.block_diagonal import block_diagonal_attention
from muse_attention.baselines.exact import exact_attention
from muse_attention.baselines.flash_sparse import flash_sparse_attention
from muse_attention.baselines.flex import sparse_flex_attention
from muse_attention.baselines.moba import moba_attention
from muse_attention.baselines.nsa import nsa_attention

__all__ = [
    "block_diagonal_attention",
    "exact_attention",
    "flash_sparse_attention",
    "moba_attention",
    "nsa_attention",
    "sparse_flex_attention",
]
