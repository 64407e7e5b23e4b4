"""The blocks of keys whose means have the largest logits for each query, without a table of all logits."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from muse_attention.backends.triton.device_functions import dot, load_rows
from muse_attention.backends.triton.numbers import accumulator, cdiv, fitting
from muse_attention.backends.triton.runtime.launching import kernel
from muse_attention.config import MuSeConfig

CHOOSE_BLOCKS = {
    256: {"ROWS": 64, "BLOCKS": 64, "num_warps": 4, "num_stages": 2},
    1024: {"ROWS": 32, "BLOCKS": 32, "num_warps": 4, "num_stages": 1},
}
"""By the largest number of bytes in a row. Not tuned."""


def choose_blocks(query: Tensor, means: Tensor, config: MuSeConfig, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The tensors of a `Selection`, by the rule of `Backend.choose_blocks`."""
    batch, heads, length, head_dim = query.shape
    blocks = means.shape[2]
    count = min(config.retrieved_clusters, blocks)
    opened = query.new_empty(batch, heads, length, count, dtype=torch.int32)
    retrieved = query.new_empty(batch, heads, length, count, 1, dtype=torch.int32)
    launch = fitting(CHOOSE_BLOCKS, head_dim, head_dim, query.dtype)
    _choose_blocks[(cdiv(length, launch["ROWS"]), batch * heads)](
        queries_ptr=query, means_ptr=means, opened_ptr=opened, retrieved_ptr=retrieved, count=count, length=length,
        blocks=blocks, own_size=config.block_size, blocks_of_own=config.key_clusters,
        shared_by=heads // means.shape[1], IS_CAUSAL=is_causal, D=head_dim,
        ACC=accumulator(query.dtype), **launch,
    )  # fmt: skip
    return opened, retrieved


@kernel(stage="selection", do_not_specialize=["count", "length", "blocks", "own_size", "blocks_of_own", "shared_by"])
def _choose_blocks(
    queries_ptr, means_ptr, opened_ptr, retrieved_ptr, count, length, blocks, own_size, blocks_of_own, shared_by,
    IS_CAUSAL: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The best blocks of each query of a tile, one by one. Logits are computed anew for each choice and never stored,
    so any number of blocks can be chosen.

    Grid: (N / ROWS, H). `queries_ptr`: (H, N, D); `means_ptr`: (G, blocks, D), in the precision of the queries;
    `opened_ptr`, `retrieved_ptr`: (H, N, count) int32.
    """
    head = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * ROWS
    offs_row = begin + tl.arange(0, ROWS)  # [ROWS]
    mask_row = offs_row < length  # [ROWS]
    queries = load_rows(queries_ptr, head * length, offs_row, mask_row, D)  # [ROWS, D]
    own = offs_row // own_size  # [ROWS]
    first_mean = head // shared_by * blocks
    seen = blocks
    if IS_CAUSAL:
        seen = (tl.minimum(begin + ROWS, length) - 1) // own_size * blocks_of_own
    last_score = tl.full([ROWS], float("inf"), ACC)
    last_block = tl.full([ROWS], -1, tl.int32)
    for number in range(count):
        best = tl.full([ROWS], float("-inf"), ACC)
        chosen = tl.full([ROWS], -1, tl.int32)
        for first in range(0, seen, BLOCKS):
            offs_block = first + tl.arange(0, BLOCKS)  # [BLOCKS]
            means = load_rows(means_ptr, first_mean, offs_block, offs_block < seen, D)  # [BLOCKS, D]
            logits = dot(queries, tl.trans(means), ACC)  # [ROWS, BLOCKS]
            # NaN counts as the largest, as in PyTorch, and so reaches the output.
            logits = tl.where(logits == logits, logits, float("inf"))
            owner = offs_block // blocks_of_own  # [BLOCKS]
            # [ROWS, BLOCKS]
            candidate = owner[None, :] < own[:, None] if IS_CAUSAL else owner[None, :] != own[:, None]
            # Only what ranks after the last choice: a lower score, or an equal one further on.
            candidate &= (logits < last_score[:, None]) | (
                (logits == last_score[:, None]) & (offs_block[None, :] > last_block[:, None])
            )
            candidate &= (offs_block < seen)[None, :]
            score, column = tl.max(tl.where(candidate, logits, float("-inf")), 1, return_indices=True)  # [ROWS], [ROWS]
            chosen = tl.where(score > best, first + column, chosen)
            best = tl.maximum(best, score)
        offs = (head * length + offs_row) * count + number  # [ROWS]
        tl.store(opened_ptr + offs, tl.where(chosen < 0, -1, chosen % blocks_of_own), mask=mask_row)
        tl.store(retrieved_ptr + offs, tl.where(chosen < 0, -1, chosen // blocks_of_own), mask=mask_row)
        last_score, last_block = best, chosen
