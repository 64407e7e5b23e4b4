"""What a selection retrieved: which buckets."""

from __future__ import annotations

import torch
from torch import Tensor

from muse_attention.bits import unpack_bits
from muse_attention.config import MuSeConfig
from muse_attention.structures import Selection


def retrieved_buckets(selection: Selection, config: MuSeConfig, length: int) -> Tensor:
    """(batch, query heads, queries, blocks, key clusters) bool: the buckets that each query of a selection retrieves.

    The selection may be of some queries of the `length` alone. This is large: take a few queries at a time.
    """
    if config.tolerance is not None:
        return unpack_bits(selection.retrieved, config.key_clusters)
    blocks = config.number_of_blocks(length)
    nothing = blocks * config.key_clusters
    bucket = selection.retrieved.long() * config.key_clusters + selection.opened[..., None]
    place = torch.where(selection.retrieved < 0, nothing, bucket).flatten(3)
    found = torch.zeros(*place.shape[:3], nothing + 1, dtype=torch.bool, device=place.device)
    return found.scatter_(3, place, True)[..., :nothing].unflatten(3, (blocks, config.key_clusters))
