"""The paper's decoder, as a model of transformers: pairs of a layer with a sliding window and a global layer.

    from muse_lab.pretraining.model.configuration import DecoderConfig
    from muse_lab.pretraining.model.decoder import DecoderForCausalLM

    model = DecoderForCausalLM(DecoderConfig.scale(3, attention="muse:Q128K128R8SP1B8k"))
    loss = model(input_ids, labels=input_ids).loss
    model.set_attention("exact")

Pre-norm LayerNorm, RoPE, ReLU, tied embeddings, no biases. The global layers attend through transformers' attention
interface: by `config.attention`, unless an `attn_implementation` is given, and in `huggingface.use_attention` by any
other attention. The layers with a window keep it under every attention, and need masks only for padding and a KV cache.

After `model.share_sequences(mesh)` a model takes whole sequences, and computes this rank's part of each: outputs are of
that part. Global layers exchange parts of all heads for whole sequences of some heads (`distributed.ulysses`), so
documents and the clusters of MuSe are those of one process. Layers with a window need the keys and values of one window
from the rank before, which is far less, unless a part is shorter than a window; then they exchange as global layers do.

The paper does not describe initialisation. Here it is GPT-2's: normal with a deviation of 0.02, except in projections
that add to the residual stream, where it is 0.02 / sqrt(2 layers).

Modules are named as in Llama. Importing this file registers the decoder with transformers' Auto classes.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad, relu, scaled_dot_product_attention
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from muse_attention.core.precision import compute_dtype
from muse_attention.distributed import ulysses
from muse_attention.distributed.all_to_all import from_rank_before
from muse_attention.documents.boundaries import DocumentBoundaries
from muse_attention.documents.rows import attend_to_windows
from muse_attention.huggingface.masks import CAUSAL, DOCUMENTS, stands_for, told_by
from muse_attention.huggingface.registration import BY_NAME, register_attention
from muse_lab.pretraining.model.chunked_loss import IGNORED, chunked_cross_entropy
from muse_lab.pretraining.model.configuration import GLOBAL, SLIDING, DecoderConfig
from muse_lab.pretraining.model.sequence_parts import own_part
from muse_lab.pretraining.model.sliding_window import sliding_window_attention


class ResidualProjection(nn.Linear):
    """A projection whose output is added to the residual stream."""


class SelfAttention(nn.Module):
    num_key_value_groups = 1
    is_causal = True

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        self.layer_type = config.layer_types[layer_idx]
        self.sliding_window = config.sliding_window if self.layer_type == SLIDING else None
        self.replaced: tuple[str, str] | None = None
        """an implementation of attention, and the one that this layer uses in its place"""
        self.sequence_mesh: DeviceMesh | None = None
        """ranks that share each sequence"""
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = ResidualProjection(width, width, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        rotation: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, rotation), rotate(key, rotation)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        if self.sequence_mesh is None:
            out, weights = self._attend(query, key, value, attention_mask, others)
            return self.o_proj(out.flatten(2)), weights

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._attend(query, key, value, attention_mask, others)[0].transpose(1, 2)

        if self.sliding_window is not None and self.sliding_window <= query.shape[2]:
            out = _attend_in_window_of_part(query, key, value, attention_mask, self.sliding_window, self.sequence_mesh)
        else:
            out = ulysses(attend, query, key, value, self.sequence_mesh)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, others: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """(batch, length, heads, head_dim), and weights if the attention returns them."""
        if self.sliding_window is not None:
            out = _attend_in_window(query, key, value, attention_mask, self.sliding_window)
            return out.transpose(1, 2), None
        name = self.config._attn_implementation
        if self.replaced is not None and self.replaced[0] == name:
            name = self.replaced[1]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        attended: tuple[Tensor, Tensor | None] = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, **others
        )
        return attended


class FeedForward(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = ResidualProjection(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.down_proj(relu(self.up_proj(hidden_states)))
        return out


class DecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = _layer_norm(config)
        self.self_attn = SelfAttention(config, layer_idx)
        self.post_attention_layernorm = _layer_norm(config)
        self.mlp = FeedForward(config)

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **arguments)
        hidden_states = hidden_states + attended
        out: Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return out


class DecoderPreTrainedModel(PreTrainedModel):
    config_class = DecoderConfig
    config: DecoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012 - read by transformers
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": DecoderLayer, "attentions": SelfAttention}  # noqa: RUF012

    def __init__(self, config: DecoderConfig, *inputs: Any, **others: Any) -> None:
        if (config._attn_implementation or BY_NAME).startswith(BY_NAME):
            config._attn_implementation = register_attention(config.attention)
        super().__init__(config, *inputs, **others)

    def set_attention(self, attention: str) -> None:
        """Use this attention in the global layers from now on, in place of any `attn_implementation`.

        `save_pretrained` keeps it.
        """
        self.set_attn_implementation(register_attention(attention))
        self.config.attention = attention

    def replace_attention(self, attention: str, by_layer: dict[int, str]) -> None:
        """Use the attentions of `by_layer` wherever the model uses `attention`; reset all other layers.

        `save_pretrained` does not keep it.
        """
        for index, layer in enumerate(self.base_model.layers):
            own = by_layer.get(index)
            layer.self_attn.replaced = own and (register_attention(attention), register_attention(own))

    def share_sequences(self, mesh: DeviceMesh | None) -> None:
        """Compute this rank's part of each sequence from now on, with the other ranks of a mesh of one dimension.

        Inputs stay whole, and are the same on all of its ranks, whose number must divide the heads and the length.
        Hidden states, logits and the loss are of the part. Padding and a KV cache are not supported. None undoes it.
        """
        self.base_model.sequence_mesh = mesh
        for layer in self.base_model.layers:
            layer.self_attn.sequence_mesh = mesh

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ResidualProjection):
            deviation = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            init.normal_(module.weight, mean=0.0, std=deviation)


class Decoder(DecoderPreTrainedModel):
    """Token ids to the hidden states behind the last LayerNorm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = _layer_norm(config)
        self.gradient_checkpointing = False
        self.sequence_mesh: DeviceMesh | None = None
        """ranks that share each sequence; inputs are whole, and hidden states of this rank's part"""
        self._exact_config = copy.copy(config)
        """Makes boolean masks under any attention of the global layers, and tells where a plain causal one suffices."""
        self._exact_config._attn_implementation = register_attention("exact")
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """The arguments are those of Llama, but there is no cache in training unless `use_cache` is True."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.sequence_mesh is not None and (use_cache or past_key_values is not None):
            raise ValueError("ranks that share sequences have no KV cache; pass use_cache=False")
        if self.sequence_mesh is not None and attention_mask is not None:
            raise ValueError("ranks that share sequences have no attention_mask; leave it out, and pack what is short")
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        assert inputs is not None
        batch, length = inputs.shape[:2]
        own = own_part(inputs, self.sequence_mesh)
        hidden_states: Tensor = self.embed_tokens(own) if inputs_embeds is None else own
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(length, device=hidden_states.device)[None] + seen
        if isinstance(attention_mask, dict):  # `generate` makes the masks itself where it compiles
            masks = attention_mask
        else:
            full_states = hidden_states  # masks have their sizes
            if self.sequence_mesh is not None:
                full_states = hidden_states.new_empty(1).expand(batch, length, hidden_states.shape[2])
            masks = self._masks(full_states, attention_mask, past_key_values, position_ids)
        own_positions = own_part(position_ids, self.sequence_mesh)
        rotation = rotation_at(own_positions, self.config, compute_dtype(hidden_states.dtype))
        for kind, layer in zip(self.config.layer_types, self.layers, strict=True):
            hidden_states = layer(
                hidden_states,
                rotation=rotation,
                attention_mask=masks[kind],
                past_key_values=past_key_values,
                **others,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)

    def _masks(
        self, hidden_states: Tensor, attention_mask: Tensor | None, past: Cache | None, position_ids: Tensor
    ) -> dict[str, Tensor | None]:
        """Masks by kind of layer. Layers with a window have None if whole sequences attend to themselves."""
        arguments = {
            "inputs_embeds": hidden_states,
            "attention_mask": attention_mask,
            "past_key_values": past,
            "position_ids": position_ids,
        }
        causal = create_causal_mask(config=self.config, **arguments)
        masks = {GLOBAL: causal, SLIDING: None}
        from_start = hidden_states.shape[1] > 1 and (past is None or past.get_seq_length() == 0)
        if not (stands_for(DOCUMENTS, causal) or stands_for(CAUSAL, causal)):
            causal = create_causal_mask(config=self._exact_config, **arguments)
        if from_start and stands_for(DOCUMENTS, causal):
            masks[SLIDING] = causal
        elif not (from_start and stands_for(CAUSAL, causal)):
            masks[SLIDING] = create_sliding_window_causal_mask(config=self._exact_config, **arguments)
        return masks


class DecoderForCausalLM(DecoderPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - read by transformers

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor | None = None,
        *,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, or the loss in nats without them, because all logits of a long sequence are large.

        Args:
            labels: (batch, length), the input ids themselves, or -100 where a token does not count
            logits_to_keep: number of last positions, 0 for all, or their indices; None is all, but none with labels
            shift_labels: (batch, length), the token after each position, in place of `labels`
            num_items_in_batch: divisor of the summed loss; None is the number of tokens that count

        Where ranks share sequences (`share_sequences`), labels are of whole sequences, and loss, logits and
        `logits_to_keep` of this rank's part.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **others,
        )
        hidden_states: Tensor = outputs.last_hidden_state
        if shift_labels is None and labels is not None:
            shift_labels = pad(labels[:, 1:], (0, 1), value=IGNORED)
        loss = logits = None
        if shift_labels is not None:
            shift_labels = own_part(shift_labels, self.model.sequence_mesh)
            loss = chunked_cross_entropy(
                hidden_states.flatten(0, 1),
                self.lm_head.weight,
                shift_labels.flatten().to(hidden_states.device),
                reduction="mean" if num_items_in_batch is None else "sum",
            )
            if num_items_in_batch is not None:
                loss = loss / num_items_in_batch
        if shift_labels is None or logits_to_keep is not None:
            kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-(logits_to_keep or 0), None)
            logits = self.lm_head(hidden_states[:, kept])
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def rotation_at(position_ids: Tensor, config: DecoderConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """RoPE's cosines and sines, (batch or 1, 1, length, head_dim / 2), in `dtype`."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=dtype, device=position_ids.device) / config.head_dim
    angle = position_ids[:, None, :, None].to(dtype) * config.rope_theta**-exponent
    return angle.cos(), angle.sin()


def rotate(states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE of (batch, heads, length, head_dim), in the precision of the rotation: pairs are head_dim / 2 apart."""
    cosine, sine = rotation
    first, second = states.to(cosine.dtype).chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(states.dtype)


def register_auto_classes() -> None:
    """Register the decoder with transformers' Auto classes; calling it again is harmless."""
    AutoConfig.register(DecoderConfig.model_type, DecoderConfig, exist_ok=True)
    AutoModel.register(DecoderConfig, Decoder, exist_ok=True)
    AutoModelForCausalLM.register(DecoderConfig, DecoderForCausalLM, exist_ok=True)


def _attend_in_window_of_part(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, window: int, mesh: DeviceMesh
) -> Tensor:
    """Attention in a part of each sequence, (batch, heads, length / ranks, head_dim), at least as long as the window.

    The keys and values that the first tokens see in the part before come first. They get queries of zeros, so that all
    lengths agree; the outputs of these queries are dropped.
    """
    rank, length, before = mesh.get_local_rank(), query.shape[2], window - 1
    part = (rank * length, (rank + 1) * length)
    if before:
        received = from_rank_before(torch.stack([tensor[:, :, length - before :] for tensor in (key, value)]), mesh)
        key, value = (torch.cat([theirs, own], 2) for theirs, own in zip(received, (key, value), strict=True))
    if rank == 0:  # no part is before it: what it received is cut off again, because its gradient must be sent back
        key, value = key[:, :, before:], value[:, :, before:]
        return _attend_in_window(query, key, value, attention_mask, window, part)
    part = (part[0] - before, part[1])
    return _attend_in_window(pad(query, (0, 0, before, 0)), key, value, attention_mask, window, part)[:, :, before:]


def _attend_in_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    window: int,
    part: tuple[int, int] | None = None,
) -> Tensor:
    """Attention in the window. Without a mask, one token attends to all keys, and several are a whole sequence.

    Queries and keys are tokens `part[0]` to `part[1]` of each row; None is the whole row. The mask is of whole rows.
    """
    length = query.shape[2]
    if stands_for(CAUSAL, attention_mask):
        attention_mask = None
    if attention_mask is not None and stands_for(DOCUMENTS, attention_mask):
        return _attend_in_windows_of_documents(query, key, value, attention_mask, window, part)
    if attention_mask is not None or length == 1:
        return scaled_dot_product_attention(query, key, value, attention_mask)
    key, value = key[:, :, :length], value[:, :, :length]  # a static cache has room for more, which no query sees yet
    return sliding_window_attention(query, key, value, window=window)


@_disable_dynamo
def _attend_in_windows_of_documents(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, window: int, part: tuple[int, int] | None
) -> Tensor:
    """`mask` stands for the documents of the batch, which the compiler cannot know."""
    documents = told_by(mask).documents
    assert documents is not None
    batch, _, length, head_dim = query.shape
    if part is not None:
        documents = _documents_of_part(documents, batch, *part)
    attend = functools.partial(sliding_window_attention, window=window)
    query, key, value = (tensor[:, :, :length].transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    out = attend_to_windows(query, key, value, documents, attend, window=window, scale=head_dim**-0.5)
    return out.unflatten(0, (batch, length)).transpose(1, 2)


_documents_of_part = functools.lru_cache(maxsize=64)(DocumentBoundaries.in_columns)
"""Cached because all layers of a batch need them."""


def _layer_norm(config: DecoderConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=False)


register_auto_classes()
