"""Long prompts in chunks: each chunk has the attention of one call with everything before it.

`generate(prefill_chunk_size=...)` of transformers hands a model its prompt in chunks, with the keys and values of
earlier chunks in a cache. MuSe also needs their queries, from which it finds its query clusters: a `Prefill` keeps
those of every layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from transformers import PreTrainedModel

from muse_attention.chunked import attend_since, resolve_chunked
from muse_attention.config import MuSeConfig
from muse_attention.core.sinks import with_sinks
from muse_attention.huggingface.fallbacks import (
    attends_to_everything,
    is_exact_only,
    refuse_other_softmax,
    warn_once,
)
from muse_attention.huggingface.forward import exact_forward
from muse_attention.huggingface.masks import CHUNK, stands_for, told_by, visible
from muse_attention.huggingface.registration import BY_NAME, implementation, register_function

_NAME = f"{BY_NAME}chunked_prefill"
_active: ContextVar[tuple[Prefill, ...]] = ContextVar("prefill", default=())


@contextlib.contextmanager
def chunked_prefill(model: PreTrainedModel, config: MuSeConfig | str) -> Iterator[None]:
    """Run a model under MuSe attention to a prompt that comes in chunks, inside the `with` block.

        with huggingface.chunked_prefill(model, MuSeConfig.for_length(prompt.shape[1])):
            model.generate(prompt, prefill_chunk_size=8192, max_new_tokens=100)

    Single tokens, as in decoding, attend exactly to all before them. So do padded and packed rows, with a warning, and
    layers that see less or more than their past.

    Args:
        config: with a tolerance and a block size, as for `ChunkedAttention`. Chunks of whole blocks are best
    """
    prefill = Prefill(resolve_chunked(config), model)
    register_function(_NAME, _forward, reads_masks=False, chunks=True)
    token = _active.set((*_active.get(), prefill))
    try:
        with implementation(model, _NAME):
            yield
    finally:
        _active.reset(token)


class _Seen(NamedTuple):
    """What a layer has attended to so far."""

    queries: list[Tensor]
    last_key: Tensor
    """(batch, key heads, D), which identifies the cache"""

    @property
    def length(self) -> int:
        return sum(queries.shape[2] for queries in self.queries)


class Prefill:
    """The queries that the layers of a model have had so far."""

    def __init__(self, config: MuSeConfig, model: torch.nn.Module) -> None:
        self.config = config
        self.layers = frozenset(model.modules())
        self._seen: dict[torch.nn.Module, _Seen] = {}

    def add_token(self, layer: torch.nn.Module, query: Tensor, key: Tensor) -> None:
        """Record a single token, which attends by itself."""
        seen = self._seen.pop(layer, None) if key.shape[2] > 1 else _Seen([], key[:, :, 0])
        if seen is not None and seen.length < key.shape[2]:  # else a chunk after it is refused
            self._seen[layer] = _Seen([*seen.queries, query.detach()], key[:, :, seen.length].clone())

    def attend(
        self, layer: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, offset: int, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Output and lse of the queries of a chunk, which begins at `offset`; keys and values are those of a cache."""
        earlier = self._seen.get(layer) if offset > 0 else None
        seen = 0 if earlier is None else earlier.length
        if seen != offset or (earlier is not None and not torch.equal(key[:, :, offset - 1], earlier.last_key)):
            raise ValueError(
                f"chunked_prefill: a chunk continues a cache of {offset} tokens that were not attended to in this "
                "block; pass the model one whole prompt at a time, starting with its first chunk"
            )
        queries = query if earlier is None else torch.cat([*earlier.queries, query], 2)
        length = queries.shape[2]  # a static cache has room for more
        self._seen[layer] = _Seen([queries.detach()], key[:, :, length - 1].clone())
        rows = (queries, key[:, :, :length], value[:, :, :length])
        merged = attend_since(offset, *rows, self.config, scale=scale, backend="auto")
        return merged.out, merged.lse


@_disable_dynamo
def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    prefill = next((active for active in reversed(_active.get()) if module in active.layers), None)
    if prefill is None:
        raise ValueError("chunked_prefill: the model runs in another thread; enter the block in the one that runs it")
    offset = None
    if query.shape[2] == 1:
        prefill.add_token(module, query, key)
    else:
        offset = _offset(module, query, key, attention_mask, is_causal, others)
    if offset is None:
        return exact_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others)
    refuse_other_softmax(module, others)
    if is_exact_only(dropout, others):
        raise ValueError(
            "chunked_prefill: attention dropout, and layers that add a bias to their logits, are not supported; call "
            "model.eval(), or leave the block"
        )
    out, lse = prefill.attend(module, query, key, value, offset, scaling)
    if others.get("s_aux") is not None:
        out = with_sinks(out, lse, others["s_aux"])
    return out.transpose(1, 2).contiguous(), None


def _offset(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    others: dict[str, Any],
) -> int | None:
    """Tokens before those of a chunk. None if the rows are no chunk of a causal sequence."""
    if attention_mask is not None and stands_for(CHUNK, attention_mask):
        return told_by(attention_mask)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal or not attends_to_everything(module, others):
        return None
    seen = visible(module, query, key, attention_mask, is_causal, others)
    if seen.is_causal and seen.mask is None and seen.documents is None:
        return 0
    warn_once("chunked_prefill", "rows are padded or packed")
    return None
