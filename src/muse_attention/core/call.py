"""The arguments of a call of attention, and what its forward pass leaves to the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from muse_attention.config import MuSeConfig
from muse_attention.core.generations import Generations
from muse_attention.core.selection_shapes import SelectionShapes
from muse_attention.core.structures import Clusters, Partial, Selection


@dataclass(frozen=True)
class Call:
    """Checked arguments, with a clustering."""

    query: Tensor
    """(batch, query heads, N, D)"""
    key: Tensor
    """(batch, key heads, N, D)"""
    value: Tensor
    """(batch, key heads, N, Dv)"""
    clusters: Clusters
    config: MuSeConfig
    is_causal: bool
    scale: float
    """factor of the logits, above 0"""
    first_block: int = 0
    """With a tolerance: queries of earlier blocks are not computed. Their rows of the output and the lse are undefined,
    and they get no gradient."""

    @property
    def first_row(self) -> int:
        """The first query that is computed."""
        return self.first_block * self.config.block_size

    @property
    def has_far_field(self) -> bool:
        """Whether anything beyond a query's own block is attended to."""
        config = self.config
        return self.query.shape[2] > config.block_size and (config.monopole or config.retrieved_clusters > 0)

    @property
    def generations(self) -> Generations:
        """With a tolerance: which query centroids serve which blocks, and what they see."""
        return Generations(self.config.number_of_blocks(self.query.shape[2]), self.is_causal)


class Attended(NamedTuple):
    """The result of a forward pass."""

    merged: Partial
    """(batch, query heads, N, Dv), and the lse, (batch, query heads, N)"""
    selection: Selection
    memory: Tensor
    """int32 tables that the backend's backward pass reads instead of computing them again"""


def without_far_field(call: Call, own: Partial, chosen: Selection | None) -> Attended:
    """The result of a call that attends to the own blocks alone."""
    shapes = SelectionShapes.of(call.config, call.query.shape[2], is_causal=call.is_causal)
    memory = call.query.new_empty(0, dtype=torch.int32)
    return Attended(own, chosen or shapes.none(call.query), memory)
