"""Causal attention to a sequence in chunks, with the results of a single call."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from muse_attention import ops
from muse_attention.attention import attend_by_reference, clusters_of, resolve_config
from muse_attention.backends.choice import resolve_backend
from muse_attention.config import MuSeConfig, follows_length
from muse_attention.core.arguments import check_arguments
from muse_attention.core.call import Call
from muse_attention.core.structures import Partial


class ChunkedAttention:
    """Causal MuSe attention to a sequence that comes in chunks, of any lengths.

        attention = ChunkedAttention("Q8K32T0.1B2k")
        outs = [attention(query, key, value) for query, key, value in chunks]

    With a tolerance nothing depends on what comes later: a block that is full never changes, and each chunk has the
    output, and the gradients, that it would have in one call. They differ by rounding alone. Each chunk clusters and
    summarises everything before it again. If it begins inside a block, the earlier rows of that block are computed
    again too, so chunks of whole blocks are best.

    Queries, keys and values are kept: keys and values with their graph, where they need a gradient.

    Args:
        config: with a tolerance, and a block size: a `MuSeConfig` or its text. `MuSeConfig.for_length(length)` is the
            default of a sequence whose final length is known
        scale: factor of the logits, 1/sqrt(head_dim) by default
        backend: as in `muse_attention`
    """

    def __init__(self, config: MuSeConfig | str, *, scale: float | None = None, backend: str = "auto") -> None:
        self.config = resolve_chunked(config)
        self.scale, self.backend = scale, backend
        self._rows: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """Tokens so far."""
        return 0 if self._rows is None else self._rows[0].shape[2]

    @overload
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = False) -> Tensor: ...

    @overload
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend to the next chunk: queries, keys and values of the same new tokens, as `muse_attention` takes them.

        Key heads may be fewer than those of queries. Returns the output of the chunk, and its lse if asked to.
        """
        check_arguments(query, key, value, None, 0.0, True, self.scale, True)
        before = self.length
        if self._rows is not None:
            self._check_continues(query, key, value)
            pairs = zip(self._rows, (query, key, value), strict=True)
            query, key, value = (torch.cat(pair, 2) for pair in pairs)
        merged = attend_since(before, query, key, value, self.config, scale=self.scale, backend=self.backend)
        self._rows = query.detach(), key, value
        return (merged.out, merged.lse) if return_lse else merged.out

    def _check_continues(self, *tensors: Tensor) -> None:
        assert self._rows is not None
        for name, old, new in zip(("query", "key", "value"), self._rows, tensors, strict=True):
            for attribute, expected, actual in (
                ("shape", (*old.shape[:2], old.shape[3]), (*new.shape[:2], new.shape[3])),
                ("dtype", old.dtype, new.dtype),
                ("device", old.device, new.device),
            ):
                if actual != expected:
                    raise ValueError(
                        f"ChunkedAttention: {name} has {attribute} {actual} (without the length), that of earlier "
                        f"chunks is {expected}; begin another sequence with another ChunkedAttention"
                    )


def resolve_chunked(config: MuSeConfig | str) -> MuSeConfig:
    """A configuration that serves a sequence whose length is not known yet."""
    if config is None or (isinstance(config, str) and follows_length(config)):
        raise ValueError(
            f"config={config!r} depends on the length, which is not known before the last chunk; name a block size, as "
            "in 'Q8K32T0.1B2k', or pass MuSeConfig.for_length(final length)"
        )
    resolved = resolve_config(config, 1)
    if resolved.tolerance is None:
        raise ValueError(
            f"config={str(config)!r} is the paper's method, whose clusters depend on the whole sequence; choose one "
            "with a tolerance, as in 'Q8K32T0.1B2k'"
        )
    return resolved


def attend_since(
    row: int, query: Tensor, key: Tensor, value: Tensor, config: MuSeConfig, *, scale: float | None, backend: str
) -> Partial:
    """Output and lse of the queries from `row` on. The tensors hold the causal sequence up to now."""
    query, factor = check_arguments(query, key, value, None, 0.0, True, scale, True)
    chosen = resolve_backend(backend, query, value, config)
    if chosen == "reference":
        merged = attend_by_reference(query, key, value, config, is_causal=True, scale=factor)
    else:
        query, key, value = ops.as_contiguous(query, key, value)
        clusters = clusters_of(query, key, config, is_causal=True, scale=factor, backend=chosen)
        call = Call(query, key, value, clusters, config, True, factor, first_block=row // config.block_size)
        merged, _ = ops.attend(call, chosen)
    return Partial(merged.out[:, :, row:], merged.lse[:, :, row:])
