"""Attentions to compare with, with the same signature: exact, block-diagonal, and mixture of block attention."""

from muse_attention.baselines.block_diagonal import block_diagonal_attention
from muse_attention.baselines.exact import exact_attention
from muse_attention.baselines.moba import moba_attention

__all__ = ["block_diagonal_attention", "exact_attention", "moba_attention"]
