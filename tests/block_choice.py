"""The choice of blocks by their mean keys, held against the logits of all blocks in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from muse_attention import MuSeConfig, ops
from muse_attention.baselines.moba import _block_means
from muse_attention.core.structures import Selection

SIZES = [(32, 8, 3), (48, 48, 1), (50, 2, 2), (64, 16, 50), (200, 8, 3)]
"""Local block, retrieval block and number of retrieved blocks, for lengths of 150: the third has more blocks than a
kernel takes at a time, the fourth more retrieved blocks than there are, the last nothing to retrieve."""


def choose(query: Tensor, key: Tensor, sizes: tuple[int, int, int], backend: str, *, is_causal: bool) -> Selection:
    local, block, count = sizes
    config = MuSeConfig(
        query_clusters=1, key_clusters=local // block, retrieved_clusters=count, block_size=local, monopole=False
    )
    return ops.choose_blocks(query, _block_means(key, block), config, is_causal=is_causal, backend=backend)


def assert_best_blocks(
    selection: Selection, query: Tensor, key: Tensor, sizes: tuple[int, int, int], *, is_causal: bool
) -> None:
    """Their scores are the largest, the best first. (Which of nearly equal ones is chosen is left to rounding.)"""
    local, block, count = sizes
    means = _block_means(key, block).double().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    length, blocks = query.shape[2], means.shape[2]
    own = torch.arange(length, device=query.device)[:, None] // local
    owner = torch.arange(blocks, device=query.device) // (local // block)
    candidate = owner < own if is_causal else owner != own
    scores = (query.double() @ means.mT).masked_fill(~candidate, -torch.inf)
    opened, retrieved = selection.opened.long(), selection.retrieved[..., 0].long()
    assert selection.opened.dtype == selection.retrieved.dtype == torch.int32
    assert torch.equal(opened < 0, retrieved < 0)
    assert int(opened.max()) < local // block
    chosen = torch.where(opened < 0, -1, retrieved * (local // block) + opened)
    # Column `blocks` counts what is not there.
    times = torch.zeros(*scores.shape[:3], blocks + 1, dtype=torch.int64, device=query.device)
    times.scatter_add_(-1, chosen % (blocks + 1), torch.ones_like(chosen))
    assert int(times[..., :blocks].max()) <= 1
    expected = scores.topk(min(count, blocks), dim=-1).values
    of_chosen = scores.gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, -torch.inf)
    torch.testing.assert_close(of_chosen, expected, rtol=1e-4, atol=1e-4)
