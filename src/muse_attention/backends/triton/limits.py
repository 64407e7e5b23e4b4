"""The limits of the kernels. Triton need not be installed to import this."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from muse_attention.config import MuSeConfig

HAS_TRITON = importlib.util.find_spec("triton") is not None
WIDEST_HEAD = 256
MOST_PROGRAMS = 65_535
"""CUDA's limit on all but the first axis of a grid."""
_ROWS_AT_ONCE = 64
"""Query clusters whose summaries a kernel addresses with 32 bits at a time."""
_MOST_CENTROID_NUMBERS = 1 << 15
"""Size of the centroids of a block, which a kernel holds on chip."""
_LONGEST_BLOCK = 32 * 1024
"""Pieces of a bucket are counted in half precision, which is exact up to 2048."""
_LONGEST_BLOCKWISE = 1 << 24
"""Lists of queries with a tolerance hold a place in 24 bits."""
MOST_CLUSTERS = 2048
"""A kernel holds a number for each cluster and each of some rows on chip."""


def why_not(query: Tensor, value: Tensor, config: MuSeConfig) -> str | None:
    """Why the kernels cannot serve these tensors, and what to do about it; None if they can."""
    if query.device.type != "cuda" and not _interpreted():
        return f"needs tensors on a CUDA device, these are on {query.device}: move them there"
    if not HAS_TRITON:
        return "needs the package triton: install it"
    if query.dtype == torch.float64 and not _interpreted():
        return "computes in float16, bfloat16 or float32, these tensors are float64: convert them"
    widest = max(query.shape[-1], value.shape[-1])
    if widest > WIDEST_HEAD:
        return f"has head dimensions of at most {WIDEST_HEAD}, these tensors have {widest}: use smaller ones"
    rows = query.shape[1] // value.shape[1] * query.shape[2]
    if rows * widest >= 1 << 31:
        return (
            f"has fewer than 2^31 numbers in the queries of a key head, these have {rows * widest}: split the sequence"
        )
    heads = query.shape[0] * (query.shape[1] + value.shape[1])
    if heads > MOST_PROGRAMS:
        return f"has at most {MOST_PROGRAMS} heads of queries and keys in a batch, these are {heads}: split the batch"
    blocks = -(-query.shape[2] // config.block_size)  # (The compiler cannot ask a constant for a method.)
    if blocks > MOST_PROGRAMS:
        return f"has at most {MOST_PROGRAMS} blocks, these are {blocks}: use a larger block_size"
    if config.tolerance is not None:
        return _why_not_blockwise(widest, blocks, config)
    at_once = min(_ROWS_AT_ONCE, query.shape[1] // value.shape[1] * config.query_clusters)
    if at_once * blocks * config.key_clusters * widest >= 1 << 31:
        limit = (1 << 31) // (at_once * config.key_clusters * widest)
        return (
            f"has fewer than {limit} blocks with these clusters and heads, these are {blocks}: use a larger block_size"
        )
    picks = config.retrieved_clusters * min(config.retrieved_blocks, blocks)
    if rows * picks >= 1 << 31:
        return (
            f"has fewer than 2^31 retrieved buckets of all queries of a key head, these are {rows * picks}: "
            "use fewer retrieved_clusters"
        )
    if config.dipole != "none":
        return f"has no kernels for dipoles, the config has dipole={config.dipole!r}: use dipole='none'"
    clusters = max(config.query_clusters, config.key_clusters)
    if clusters > MOST_CLUSTERS:
        return f"has at most {MOST_CLUSTERS} clusters, the config has {clusters}: use fewer"
    return None


def _why_not_blockwise(widest: int, blocks: int, config: MuSeConfig) -> str | None:
    clusters = max(config.query_clusters, config.key_clusters)
    limit = _MOST_CENTROID_NUMBERS // (1 << (max(16, widest) - 1).bit_length())
    if clusters > limit:
        return f"has at most {limit} clusters with a tolerance and such heads, the config has {clusters}: use fewer"
    if config.block_size > _LONGEST_BLOCK:
        return (
            f"has blocks of at most {_LONGEST_BLOCK} with a tolerance, the config has {config.block_size}: "
            "use a smaller block_size"
        )
    if blocks * config.block_size > _LONGEST_BLOCKWISE:
        return (
            f"has sequences of at most {_LONGEST_BLOCKWISE} tokens with a tolerance, in whole blocks these are "
            f"{blocks * config.block_size}: split the sequence"
        )
    limit = (1 << 31) // (2 * config.query_clusters * config.key_clusters * widest)
    # (Lists of each bucket's queries: about half as many pairs of a bucket and a block that sees it.)
    limit = min(limit, int(((1 << 31) // config.key_clusters) ** 0.5))
    if blocks >= limit:
        return f"has fewer than {limit} blocks with these clusters, these are {blocks}: use a larger block_size"
    return None


def _interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


_interpreted._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in config.py
