"""Tiles of queries: up to `config.tile` queries of one block and query cluster, in order of position.

With a tolerance the queries of a tile retrieve together. A selection holds, for each tile and bucket, the first row of
the tile that wants the keys of the bucket: that row and all after it attend to the keys, those before it to the
summary. So no query decides for an earlier one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muse_attention.config import MuSeConfig

NO_ROW = 255
"""In a selection: no row of the tile wants the bucket."""


def tiles_of_block(config: MuSeConfig) -> int:
    """The most tiles that the queries of a block can have."""
    return config.block_size // config.tile + min(config.query_clusters, config.block_size)


def place_in_tiles(query_assignment: Tensor, config: MuSeConfig) -> tuple[Tensor, Tensor]:
    """The tile of each query in its block, and its row there, (..., N) int64 each, of a (..., N) assignment.

    Tiles are counted cluster after cluster.
    """
    *heads, length = query_assignment.shape
    block_size, tile, query_clusters = config.block_size, config.tile, config.query_clusters
    padding = -length % block_size
    # (Padded places have a cluster of their own, after all others.)
    assignment = torch.nn.functional.pad(query_assignment.long(), (0, padding), value=query_clusters)
    assignment = assignment.view(*heads, -1, block_size)
    order = assignment.sort(dim=-1, stable=True).indices
    sizes = torch.zeros(*assignment.shape[:-1], query_clusters + 1, dtype=torch.int64, device=assignment.device)
    sizes.scatter_add_(-1, assignment, torch.ones_like(assignment))
    first = (sizes.cumsum(-1) - sizes).gather(-1, assignment)
    place = torch.empty_like(order)
    place.scatter_(-1, order, torch.arange(block_size, device=order.device).expand_as(order))
    rank = place - first
    tiles = -(-sizes // tile)
    number = (tiles.cumsum(-1) - tiles).gather(-1, assignment) + rank // tile
    return number.flatten(-2)[..., :length], (rank % tile).flatten(-2)[..., :length]
