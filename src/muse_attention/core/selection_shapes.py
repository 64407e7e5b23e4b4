"""Shapes of the selection of a head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muse_attention.config import MuSeConfig
from muse_attention.core.generations import Generations
from muse_attention.core.query_tiles import NO_ROW, tiles_of_block
from muse_attention.core.structures import Selection


class SelectionShapes(NamedTuple):
    """The shapes that a selection has for each head, its dtype, and the number that stands for no selection."""

    opened: tuple[int, ...]
    retrieved: tuple[int, ...]
    dtype: torch.dtype
    nothing: int

    @classmethod
    def of(cls, config: MuSeConfig, length: int, *, is_causal: bool) -> SelectionShapes:
        """Clusters and blocks of each in the paper's method; with a tolerance, a row for each tile and bucket."""
        blocks = config.number_of_blocks(length)
        if config.tolerance is not None:
            buckets = Generations(blocks, is_causal).seen_blocks * config.key_clusters
            table = (blocks, tiles_of_block(config), buckets)
            return cls((0,), table, torch.uint8, NO_ROW)
        clusters = min(config.retrieved_clusters, config.key_clusters)
        picks = (length, clusters, min(config.retrieved_blocks, blocks))
        return cls((length, clusters), picks, torch.int32, -1)

    def new(self, query: Tensor) -> Selection:
        """An empty selection for (batch, heads, N, D) queries."""
        of_heads = query.shape[:2]
        return Selection(*(query.new_empty(*of_heads, *shape, dtype=self.dtype) for shape in self[:2]))

    def none(self, query: Tensor) -> Selection:
        """A selection that selects nothing."""
        selection = self.new(query)
        return Selection(selection.opened.fill_(self.nothing), selection.retrieved.fill_(self.nothing))
