"""Long prompts in chunks: each chunk has the attention that the whole prompt would have in one call.

`generate(prefill_chunk_size=...)` of transformers hands a model its prompt in chunks, with the keys and values of
earlier chunks in a cache. MuSe also needs their queries, from which it finds its query clusters: a `Prefill` keeps
those of every layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from transformers import PreTrainedModel

from muse_attention.chunked import attend_since, resolve_chunked
from muse_attention.config import MuSeConfig
from muse_attention.core.sinks import with_sinks
from muse_attention.huggingface.fallbacks import attends_to_everything, is_exact_only, refuse_other_softmax
from muse_attention.huggingface.forward import exact_forward, muse_forward
from muse_attention.huggingface.masks import offset_of_chunk, stands_for_chunk, visible
from muse_attention.huggingface.registration import BY_NAME, implementation, register_function

_NAME = f"{BY_NAME}chunked_prefill"
_active: ContextVar[Prefill | None] = ContextVar("prefill", default=None)


@contextlib.contextmanager
def chunked_prefill(model: PreTrainedModel, config: MuSeConfig | str) -> Iterator[None]:
    """Run a model under MuSe attention to a prompt that comes in chunks, inside the `with` block.

        with huggingface.chunked_prefill(model, MuSeConfig.for_length(prompt.shape[1])):
            model.generate(prompt, prefill_chunk_size=8192, max_new_tokens=100)

    Single tokens, as in decoding, attend exactly to all before them. So do chunks of padded batches, with a warning.

    Args:
        config: with a tolerance and a block size, as for `ChunkedAttention`. Chunks of whole blocks are best
    """
    prefill = Prefill(resolve_chunked(config))
    register_function(_NAME, _forward, reads_masks=False, chunks=True)
    before = _active.set(prefill)
    try:
        with implementation(model, _NAME):
            yield
    finally:
        _active.reset(before)


class Prefill:
    """The queries that the layers of a model have had so far."""

    def __init__(self, config: MuSeConfig) -> None:
        self.config = config
        self._queries: dict[torch.nn.Module, list[Tensor]] = {}

    def add_token(self, layer: torch.nn.Module, query: Tensor) -> None:
        if layer in self._queries:
            self._queries[layer].append(query.detach())

    def attend(
        self, layer: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, offset: int, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Output and lse of the queries of a chunk, which begins at `offset`; keys and values are those of a cache."""
        earlier = self._queries.get(layer, []) if offset > 0 else []
        seen = sum(some.shape[2] for some in earlier)
        if seen != offset:
            raise ValueError(
                f"chunked_prefill: the cache has {offset} tokens, of which {seen} were attended to in this block; hand "
                "it the whole prompt, from its first chunk on"
            )
        if earlier and earlier[0].shape[:2] != query.shape[:2]:
            raise ValueError(
                f"chunked_prefill: this chunk has {query.shape[0]} sequences, earlier ones {earlier[0].shape[0]}; "
                "begin with the first chunk again"
            )
        queries = torch.cat([*earlier, query.detach()], 2)
        self._queries[layer] = [queries]
        queries = queries if not query.requires_grad else torch.cat([*earlier, query], 2)
        length = queries.shape[2]  # a static cache has room for more
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
    **others: Any,
) -> tuple[Tensor, None]:
    prefill = _active.get()
    if prefill is None:
        raise ValueError("chunked_prefill: the model runs in another thread; enter the block in the one that runs it")
    if query.shape[2] == 1:
        prefill.add_token(module, query)
        return exact_forward(module, query, key, value, attention_mask, dropout, scaling, **others)
    offset = _offset(module, query, key, attention_mask, others)
    if offset is None:
        settings = prefill.config.text
        return muse_forward(
            module, query, key, value, attention_mask, dropout, scaling=scaling, settings=settings, heed_model=False,
            **others,
        )  # fmt: skip
    refuse_other_softmax(module, others)
    if is_exact_only(dropout, others):
        raise ValueError(
            "chunked_prefill: attention dropout, and layers that add a bias to their logits, are not served; call "
            "model.eval(), or leave the block"
        )
    out, lse = prefill.attend(module, query, key, value, offset, scaling)
    if others.get("s_aux") is not None:
        out = with_sinks(out, lse, others["s_aux"])
    return out.transpose(1, 2).contiguous(), None


def _offset(
    module: torch.nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, others: dict[str, Any]
) -> int | None:
    """Tokens before those of a chunk; None of what is no chunk: padded or packed rows, and layers with a window."""
    if attention_mask is not None and stands_for_chunk(attention_mask):
        return offset_of_chunk(attention_mask)
    if not attends_to_everything(module, others):
        return None
    seen = visible(module, query, key, attention_mask, getattr(module, "is_causal", True), others)
    return 0 if seen.mask is None and seen.documents is None and seen.is_causal else None
