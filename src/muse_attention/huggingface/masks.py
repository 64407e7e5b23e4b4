"""Masks of transformers, and tensors without keys that stand for them.

transformers asks a registered function for a mask once for each batch, and hands it to all layers. A mask of 64k tokens
has 4 GiB, and MuSe reads none. So where a mask would be plainly causal, or where it would only keep documents and
padding apart, a tensor without keys stands for it, which costs nothing:

- (batch, 1, queries, 0): each query sees its past;
- (batch, 2, queries, 0): the documents of each row, which its attribute holds;
- (batch, 3, queries, 0), where an attention asks for it: each query sees its past, a KV cache of as many tokens as the
  attribute tells and the queries before it.

A layer that reads such a mask itself fails.

Documents in `position_ids` are read where the mask is made, once for all layers, and every mask keeps the tensor that
it was made from: a layer that is handed the same one does not read it again. Reading a tensor on a GPU waits for it.
As in transformers, a mask says what `position_ids` said when it was made.

Where queries continue a KV cache, or padding lies inside a document, the mask is made, marked as one that expresses no
more than that, and read by exact attention. Any other mask is general: MuSe refuses it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
)

from muse_attention.documents.arguments import (
    REFUSAL,
    are_whole_rows,
    documents_in_rows,
    find_documents,
    refuse_packed_documents,
    starts_by_positions,
)
from muse_attention.documents.boundaries import DocumentBoundaries

CAUSAL, DOCUMENTS, CHUNK = 1, 2, 3
"""What a tensor without keys stands for: the length of its second axis."""
_TOLD = "muse_told"
"""Attribute of one that stands for documents or a chunk: what `told_by` returns."""
_LOST = {
    DOCUMENTS: "the documents of the batch: pass it to the attention function unchanged, or put one document in each "
    "row",
    CHUNK: "the place of the chunk: prefill the whole prompt at once",
}
_MADE = "muse_is_plain"
"""Attribute of a mask that was made here: whether it expresses no more than padding and a KV cache."""
_POSITIONS = "muse_position_ids"
"""Attribute of a mask that was made here: the `position_ids` whose documents it keeps apart, or None."""
GENERAL = (
    "MuSe reads no general attention_mask: tell padding by a 2D mask and documents by position_ids or cu_seq_lens_q, "
    "or set attn_implementation='eager' or 'sdpa' (huggingface.use_attention(model, 'exact'))"
)


class Visible(NamedTuple):
    """What queries see."""

    mask: Tensor | None
    """(batch, heads or 1, queries, keys), boolean or added to the logits; None where the rest says all"""
    is_causal: bool
    documents: DocumentBoundaries | None = None
    """in all rows one after another; None if each row is one"""

    def as_mask(self, batch: int, device: torch.device) -> Tensor | None:
        """The same as a mask, for an attention without documents."""
        return self.mask if self.documents is None else self.documents.mask(batch, self.is_causal, device)[:, None]


def visible(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool,
    others: dict[str, Any],
    *,
    has_window: bool = False,
) -> Visible:
    """What queries see by the arguments of an attention function. A ValueError if documents would see each other.

    A mask may lack documents: gpt-oss passes its positions to the attention function alone.
    """
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    others = _unread(attention_mask, others)
    if attention_mask is not None and stands_for(DOCUMENTS, attention_mask):
        told = told_by(attention_mask)
        return told._replace(documents=_cut(told.documents, find_documents(batch, queries, others)))
    if stands_for(CAUSAL, attention_mask):
        attention_mask, is_causal = None, True
    if attention_mask is None and (queries == keys or (is_causal and queries < keys)) and not _is_unreadable(others):
        documents = find_documents(batch, queries, others) if queries > 1 else None
        if documents is not None and others.get("cu_seq_lens_q") is None:
            _refuse_state(getattr(module, "config", None))
        return Visible(None, is_causal, documents)
    if has_window and attention_mask is not None and attention_mask.dtype == torch.bool and not _is_unreadable(others):
        documents = find_documents(batch, queries, others) if queries == keys > 1 else None
        if documents is not None:
            attention_mask = attention_mask & documents.mask(batch, is_causal, query.device)[:, None]
    refuse_packed_documents(batch, queries, attention_mask, others)
    return Visible(attention_mask, is_causal)


@functools.lru_cache(maxsize=64)
def _cut(by_mask: DocumentBoundaries | None, by_arguments: DocumentBoundaries | None) -> DocumentBoundaries | None:
    """Combine documents that are given in two ways. Cached for the layers of a batch."""
    return by_mask if by_mask is None or by_arguments is None else by_mask.cut_at(by_arguments.begins)


def _unread(attention_mask: Tensor | None, others: dict[str, Any]) -> dict[str, Any]:
    """The arguments without the `position_ids` that the mask was made from. The compiler does not see marks."""
    if attention_mask is None or torch.compiler.is_compiling():
        return others
    read = getattr(attention_mask, _POSITIONS, None)
    return {**others, "position_ids": None} if read is not None and others.get("position_ids") is read else others


def told_by(attention_mask: Tensor) -> Any:
    """Documents as `Visible`, by a mask that stands for `DOCUMENTS`; the tokens in the cache before a `CHUNK`."""
    told = getattr(attention_mask, _TOLD, None)
    if told is None:
        raise ValueError(f"the layer copied its mask, which loses {_LOST[attention_mask.shape[1]]}")
    return told


def is_general(attention_mask: Tensor) -> bool:
    """Whether a mask may express more than padding and a KV cache: it was not made here, or not from these alone.

    The compiler does not see marks. There, `guard_masks` refuses the masks that users pass.
    """
    return not torch.compiler.is_compiling() and not getattr(attention_mask, _MADE, False)


def stands_for(kind: int, attention_mask: Tensor | None) -> bool:
    """Whether it stands for a mask that is `CAUSAL`, that keeps `DOCUMENTS` and padding apart, or that of a `CHUNK`."""
    return attention_mask is not None and attention_mask.shape[-1] == 0 and attention_mask.shape[1] == kind


_ATTENTION_LAYERS = (
    "attention",
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "moe",
    "mlp",
)
"""Kinds of layers that carry nothing from token to token but by attention."""


def _refuse_state(config: PreTrainedConfig | None) -> None:
    """Refuse linear attention, convolutions and recurrent layers: their state crosses documents."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    if any(kind not in _ATTENTION_LAYERS for kind in kinds):
        raise ValueError(REFUSAL)


def _is_unreadable(others: dict[str, Any]) -> bool:
    told = [others.get(name) for name in ("position_ids", "cu_seq_lens_q")]
    return torch.compiler.is_compiling() or (
        torch.cuda.is_available()
        and any(isinstance(tensor, Tensor) and tensor.is_cuda for tensor in told)
        and torch.cuda.is_current_stream_capturing()
    )


def make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    reads_masks: bool = False,
    chunks: bool = False,
    **others: Any,
) -> Tensor | None:
    """transformers' mask for SDPA, (batch, 1, queries, keys), or what stands for it; None if nothing is masked.

    Under `torch.compile` transformers makes a mask always: it cannot see whether anything is padded or packed. Here
    there is none if no padding mask was given, and the compiled graph checks that nothing was packed. A general mask is
    refused here then, unless the attention `reads_masks`; elsewhere the attention function refuses it. An attention
    that serves `chunks` gets what stands for the mask of one that continues a KV cache without padding.
    """
    compiling = torch.compiler.is_compiling()
    is_usual = mask_function is causal_mask_function or mask_function is bidirectional_mask_function
    may_be_general = compiling and not reads_masks and local_size is None and q_length > 1
    if may_be_general and (use_vmap or (attention_mask is not None and not is_usual)):
        raise ValueError(GENERAL)
    documents, positions = (None, None) if compiling else _take_documents(batch_size, q_length)

    def stand_in(kind: int, told: object = None) -> Tensor:
        mark = torch.empty(batch_size, kind, q_length, 0, dtype=torch.bool, device=device)
        if not compiling:
            setattr(mark, _TOLD, told)
            setattr(mark, _POSITIONS, positions)
        return mark

    if compiling and attention_mask is None and local_size is None and not use_vmap:
        if allow_is_bidirectional_skip:
            return None
        if q_length == kv_length and (allow_is_causal_skip or mask_function is not causal_mask_function):
            if not allow_is_causal_skip:
                _assert_one_sequence(mask_function, batch_size, q_length, device)
            return stand_in(CAUSAL)
    if documents is not None:
        is_causal = allow_is_causal_skip and mask_function is causal_mask_function
        is_full = allow_is_bidirectional_skip and mask_function is bidirectional_mask_function
        if (is_causal or is_full) and local_size is None and not use_vmap:
            return stand_in(DOCUMENTS, Visible(None, is_causal, documents))
        if len(documents.lengths) > batch_size:
            if q_length != kv_length:
                raise ValueError(REFUSAL)
            of_documents = packed_sequence_mask_function(documents.numbers().view(batch_size, -1).to(device))
            mask_function, allow_is_causal_skip = and_masks(mask_function, of_documents), False
    if chunks and not compiling and q_length > 1 and mask_function is causal_mask_function:
        offset = int(others.get("q_offset", 0))
        is_plain = local_size is None and not use_vmap and (attention_mask is None or bool(attention_mask.all()))
        if is_plain and offset > 0:
            return stand_in(CHUNK, offset)
    mask = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        use_vmap=use_vmap,
        device=device,
        **others,
    )
    if mask is None:
        # A single query sees every key without a mask.
        return stand_in(CAUSAL) if allow_is_causal_skip and q_length > 1 else None
    if not compiling:
        setattr(mask, _MADE, is_usual and local_size is None and not use_vmap)
        setattr(mask, _POSITIONS, positions)
    return mask


def _assert_one_sequence(
    mask_function: Callable[..., Tensor], batch_size: int, length: int, device: torch.device | str
) -> None:
    """Every token sees the first one, and none sees the next: true of a causal mask, false of packed or blockwise."""
    batch = torch.arange(batch_size, device=device)[:, None]
    head = torch.zeros((), dtype=torch.long, device=device)
    position = torch.arange(length, device=device)[None]
    sees_first = mask_function(batch, head, position, torch.zeros_like(position))
    sees_next = mask_function(batch, head, position[:, :-1], position[:, 1:])
    torch._assert_async(
        sees_first.all() & ~sees_next.any(),
        "packed position_ids in a compiled model: compile its layers instead",
    )


_asked = threading.local()
"""Between the preparation of a mask and its making: the documents of the batch, and the `position_ids` read."""


def _take_documents(batch: int, queries: int) -> tuple[DocumentBoundaries | None, Tensor | None]:
    documents: DocumentBoundaries | None
    documents, positions = getattr(_asked, "told", (None, None))
    _asked.told = (None, None)
    return documents if documents is not None and documents.tokens == batch * queries else None, positions


def guard_masks(is_registered: Callable[[str | None], bool], reads_masks: Callable[[str | None], bool]) -> None:
    """Look for documents wherever transformers is about to make a mask for one of our implementations.

    Some models pass their `position_ids` to the makers of masks alone, and only they see a padding mask. A mask that
    the user made is refused here, unless the implementation `reads_masks`.
    """
    prepare = masking_utils._preprocess_mask_arguments

    @functools.wraps(prepare)
    def guarded_prepare(
        config: PreTrainedConfig,
        inputs_embeds: Tensor,
        attention_mask: Any,
        past_key_values: Any,
        position_ids: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        prepared = prepare(config, inputs_embeds, attention_mask, past_key_values, position_ids, *args, **kwargs)
        if not is_registered(config._attn_implementation):
            return prepared
        padding = attention_mask if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 else None
        batch, queries = inputs_embeds.shape[:2]
        if queries > 1 and _is_from_user(attention_mask) and not reads_masks(config._attn_implementation):
            raise ValueError(GENERAL)
        if torch.compiler.is_compiling():
            if padding is not None or (attention_mask is None and past_key_values is not None):
                _refuse_packed(padding, batch, queries, position_ids)
            return prepared
        _asked.told = (None, None)
        does_exit, _, packed, *_ = prepared
        if does_exit or queries == 1 or (attention_mask is not None and padding is None):
            return prepared
        # (Cross-attention gets the states of an encoder.)
        attends_to_itself = not any(isinstance(argument, Tensor) for argument in (*args, *kwargs.values()))
        is_own = attends_to_itself and (past_key_values is None or not int(past_key_values.get_seq_length()))
        if is_own and (padding is None or padding.shape[1] == queries):
            documents = _documents(batch, queries, padding, position_ids, packed)
            if documents is not None:
                if packed is None and len(documents.lengths) > batch:
                    _refuse_state(config)
                _asked.told = (None if are_whole_rows(documents, batch) else documents, position_ids)
                return (*prepared[:2], None, *prepared[3:])
        _refuse_packed(padding, batch, queries, position_ids)
        _asked.told = (None, position_ids)
        return prepared

    masking_utils._preprocess_mask_arguments = guarded_prepare


def _is_from_user(attention_mask: Any) -> bool:
    """Whether a mask has all axes and was not made here. (`generate` passes those that were.)"""
    if attention_mask is None or len(attention_mask.shape) != 4 or attention_mask.shape[-1] == 0:
        return False
    return not hasattr(attention_mask, _MADE)


def _refuse_packed(padding: Tensor | None, batch: int, queries: int, position_ids: Tensor | None) -> None:
    mask = None if padding is None else padding[:, None, None].bool()
    refuse_packed_documents(batch, queries, mask, {"position_ids": position_ids})


def _documents(
    batch: int, queries: int, padding: Tensor | None, position_ids: Tensor | None, packed: Tensor | None
) -> DocumentBoundaries | None:
    """Documents by a padding mask, (batch, queries), and by `position_ids` or transformers' version of them (`packed`).

    None if a document has padding inside: only a mask can express that.
    """
    if padding is None and packed is None:
        one_per_row = DocumentBoundaries.from_lengths([queries] * batch)
        return find_documents(batch, queries, {"position_ids": position_ids}) or one_per_row
    device = packed.device if padding is None else padding.device  # type: ignore[union-attr]
    starts, positions = torch.zeros(batch, queries - 1, dtype=torch.bool, device=device), None
    if packed is not None:
        starts = packed[:, 1:] != packed[:, :-1]
    elif isinstance(position_ids, Tensor) and position_ids.shape[-1] == queries:
        told = position_ids.to(device)
        starts = starts_by_positions(told).expand(batch, -1)
        positions = (told[0] if told.dim() == 3 else told).expand(batch, -1)
    is_real = None if padding is None else padding.bool()
    documents: DocumentBoundaries | None = documents_in_rows(starts, is_real, positions)
    return documents
