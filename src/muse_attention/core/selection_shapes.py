"""How much room the selection of a query takes."""

from __future__ import annotations

from typing import NamedTuple

from muse_attention.config import MuSeConfig
from muse_attention.core.bits import number_of_words


class SelectionShapes(NamedTuple):
    """The shapes that a selection has for each query, and what it has where nothing is selected."""

    opened: tuple[int, ...]
    retrieved: tuple[int, ...]
    none: int

    @property
    def both(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.opened, self.retrieved

    @classmethod
    def of(cls, config: MuSeConfig, length: int) -> SelectionShapes:
        """Room for the clusters of the paper's rule and blocks of each, or for the bits of all that a query may see."""
        blocks = config.number_of_blocks(length)
        if config.tolerance is not None:
            words = number_of_words(config.key_clusters)
            return cls((words,), (blocks, words), 0)
        clusters = min(config.retrieved_clusters, config.key_clusters)
        return cls((clusters,), (clusters, min(config.retrieved_blocks, blocks)), -1)
