"""What a block sees with a tolerance, and which query centroids serve it.

Query centroids come from the past. Generation `s` serves the queries of blocks `2^s .. 2^(s+1) - 1`, and is found from
those of the `2^s` blocks before. So no output depends on a later token, and the summaries of all generations together
are fewer than three times those of the last one, and fewer than twice with a power of two of blocks. Without a causal
mask there is one generation, of all queries.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Generations:
    """The generations of a sequence of `blocks` blocks."""

    blocks: int
    is_causal: bool

    @property
    def number(self) -> int:
        """The number of generations, at least 1."""
        return max(1, (self.blocks - 1).bit_length()) if self.is_causal else 1

    @property
    def seen_blocks(self) -> int:
        """The number of blocks that any other block sees: no block sees the last one of a causal sequence."""
        return self.blocks - 1 if self.is_causal else self.blocks

    def of_block(self, block: int) -> int:
        """The generation that serves a block. The first block of a causal sequence sees nothing and needs none: 0."""
        return max(0, block.bit_length() - 1) if self.is_causal else 0

    def past(self, generation: int) -> int:
        """The number of blocks, from the first on, from whose queries and keys a generation is found."""
        return 1 << generation if self.is_causal else self.blocks

    def sees(self, generation: int) -> int:
        """The number of blocks, from the first on, that any block of a generation sees."""
        return min(2 << generation, self.blocks) - 1 if self.is_causal else self.blocks

    @property
    def summarised_blocks(self) -> int:
        """The number of blocks summarised, added over all generations."""
        return sum(self.sees(generation) for generation in range(self.number))
