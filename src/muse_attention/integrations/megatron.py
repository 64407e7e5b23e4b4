"""MuSe in Megatron-core 0.16: a core attention, given by a layer spec.

    pretrain_gpt.py --spec muse_attention.integrations.megatron layer_spec --attention-dropout 0 ...

    spec = use_muse(get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True), "QK64R8B1k")

Documents are those of `packed_seq_params`, padded ones too, or of an attention mask as `--reset-attention-mask` makes
it. Softmax offsets (`--softmax-type`) are attention sinks. Tensor parallelism splits the heads, and needs nothing.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from muse_attention.config import MuSeConfig
from muse_attention.core.sinks import with_sinks
from muse_attention.documents.arguments import are_whole_rows, documents_in_rows
from muse_attention.documents.boundaries import DocumentBoundaries, refuse_capture
from muse_attention.integrations.rows import attend_to_rows, check_config


def use_muse(spec: Any, config: MuSeConfig | str | None = None) -> Any:
    """A copy of a spec, with MuSe as the core attention of its layers.

    Args:
        spec: of a transformer layer, as `get_gpt_layer_with_transformer_engine_spec` returns it, or of a block of
            layers, as `get_gpt_decoder_block_spec` does. Layers without a core attention stay as they are
        config: as for `muse_attn_varlen_func`: None attends exactly to documents of up to 8k tokens
    """
    check_config(config)
    core_attention = type(MuSeCoreAttention.__name__, (MuSeCoreAttention,), {"muse_config": config})
    replaced = _with_core_attention(spec, core_attention)
    if replaced == spec:
        raise ValueError("the spec has no layer with a core attention: pass the spec of a transformer layer or block")
    return replaced


class MuSeCoreAttention(MegatronModule):
    """The core attention of a layer. Its one parameter is Megatron's `softmax_offset`, if that is learnable."""

    muse_config: MuSeConfig | str | None = None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **others: Any,
    ) -> None:
        super().__init__(config=config)
        del others  # widths that the tensors have
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        refusals = {
            "attention dropout: set attention_dropout=0 (--attention-dropout 0)": dropout > 0,
            "context parallelism: set context_parallel_size=1, and split heads with tensor_model_parallel_size": (
                config.context_parallel_size > 1
            ),
            "sliding windows: give layers with a window a spec of their own": windowed,
            "the largest logit: set qk_clip and log_max_attention_logit to False": (
                config.qk_clip or config.log_max_attention_logit
            ),
            "cross attention: use MuSe for self attention": attention_type != "self",
        }
        for refusal, is_asked_for in refusals.items():
            if is_asked_for:
                raise ValueError(f"layer {layer_number}: MuSe does not support {refusal}")
        self.softmax_offset: Tensor | None = None
        if config.softmax_type != "vanilla":
            groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
            self.tp_group = groups.tp
            self.softmax_offset = self._new_offset(config, config.num_attention_heads // self.tp_group.size())

    @staticmethod
    def _new_offset(config: TransformerConfig, heads: int) -> Tensor:
        """A logit for each head of this rank: 0, or learnt and made as Megatron makes it."""
        place = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        if config.softmax_type == "off-by-one":
            return torch.zeros(heads, **place)
        if config.softmax_type != "learnable":
            raise ValueError(f"MuSe does not support softmax_type={config.softmax_type!r}: use off-by-one or learnable")
        offset = torch.nn.Parameter(torch.empty(heads, **place))
        if config.perform_initialization:
            config.init_method(offset)
        return offset

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention of (length, batch, heads, head_dim) tensors, or of packed (tokens, heads, head_dim) ones.

        Returns:
            (length, batch, heads * value_dim), or (tokens, heads * value_dim).
        """
        if attention_bias is not None:
            raise ValueError("MuSe does not support attention_bias: use another core attention, or other positions")
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if packed_seq_params is not None:
            query, key, value = (tensor[None] for tensor in (query, key, value))
            documents: DocumentBoundaries | None = _packed_documents(packed_seq_params)
            is_causal = _is_causal(mask_type, packed=True)
        else:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
            is_causal = _is_causal(mask_type, packed=False)
            documents = _documents_in_mask(attention_mask, *query.shape[:2]) if is_causal else None
        out, lse = attend_to_rows(
            query, key, value, documents, self.muse_config, is_causal=is_causal, scale=self.softmax_scale
        )
        if self.softmax_offset is not None:
            out = with_sinks(out.transpose(1, 2), lse, self.softmax_offset).transpose(1, 2)
        out = out.flatten(2)
        return out.squeeze(0) if packed_seq_params is not None else out.transpose(0, 1).contiguous()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """The learnable offsets, under the names and in the parts of Megatron's own core attention."""
        if self.config.softmax_type != "learnable":
            return {}
        if metadata is None or "dp_cp_group" not in metadata:
            raise ValueError("sharded_state_dict needs metadata['dp_cp_group'], as Megatron's checkpointing passes it")
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def _with_core_attention(spec: Any, core_attention: type) -> Any:
    if isinstance(spec, TransformerBlockSubmodules):
        layers = [_with_core_attention(layer, core_attention) for layer in spec.layer_specs or []]
        return dataclasses.replace(spec, layer_specs=layers)
    if not isinstance(spec, ModuleSpec):
        return spec
    submodules = spec.submodules
    if isinstance(submodules, TransformerBlockSubmodules):
        submodules = _with_core_attention(submodules, core_attention)
    elif hasattr(submodules, "core_attention"):
        submodules = dataclasses.replace(submodules, core_attention=core_attention)
    elif hasattr(submodules, "self_attention"):
        attention = _with_core_attention(submodules.self_attention, core_attention)
        submodules = dataclasses.replace(submodules, self_attention=attention)
    return dataclasses.replace(spec, submodules=submodules)


def _is_causal(mask_type: AttnMaskType, packed: bool) -> bool:
    if mask_type == AttnMaskType.causal or (packed and mask_type == AttnMaskType.padding_causal):
        return True
    if mask_type == AttnMaskType.no_mask or (packed and mask_type == AttnMaskType.padding):
        return False
    raise ValueError(
        f"MuSe does not support attn_mask_type={mask_type.name}: use causal, no_mask, or packed_seq_params for padding"
    )


def _packed_documents(params: PackedSeqParams) -> DocumentBoundaries:
    """The documents of a packed row. Where they are padded, Megatron passes both kinds of boundaries."""
    if params.qkv_format != "thd" or params.cu_seqlens_q is None:
        raise ValueError(
            f"packed_seq_params has qkv_format={params.qkv_format!r}; MuSe takes 'thd' with cu_seqlens_q, or None"
        )
    refuse_capture(params.cu_seqlens_q, "cu_seqlens_q")
    ends = params.cu_seqlens_q.tolist()
    same = params.cu_seqlens_kv is None or params.cu_seqlens_kv is params.cu_seqlens_q
    if not same and params.cu_seqlens_kv.tolist() != ends:
        raise ValueError("cu_seqlens_q and cu_seqlens_kv differ: documents attend to themselves; pass the same")
    places = ends if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded.tolist()
    documents = [
        (begin, begin + end - start)
        for begin, (start, end) in zip(places, pairwise(ends), strict=False)
        if end > start  # the batch's last boundaries may repeat
    ]
    return DocumentBoundaries(tuple(begin for begin, _ in documents), tuple(end for _, end in documents), places[-1])


def _documents_in_mask(mask: Tensor | None, batch: int, length: int) -> DocumentBoundaries | None:
    """The documents that a mask of causal attention, (batch or 1, 1, length, length), True where hidden, separates."""
    if mask is None:
        return None
    if mask.shape[1:] != (1, length, length) or mask.shape[0] not in (1, batch):
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}, not {(batch, 1, length, length)}")
    refuse_capture(mask, "attention_mask")
    hidden = mask[:, 0].bool()
    starts = hidden.diagonal(-1, 1, 2)
    documents: DocumentBoundaries = documents_in_rows(starts.expand(batch, -1), None, None)
    if bool((documents.mask(batch, True, mask.device) == hidden).any()):
        raise ValueError(
            "attention_mask is neither causal nor causal inside documents: pass None, and documents as "
            "packed_seq_params"
        )
    return None if are_whole_rows(documents, batch) else documents


layer_spec: ModuleSpec = use_muse(
    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    if gpt_layer_specs.HAVE_TE
    else gpt_layer_specs.get_gpt_layer_local_spec()
)
"""A layer of a GPT or Llama with MuSe, for `--spec`; of Transformer Engine's modules where it is installed."""
