"""Every causal language model of transformers, as small as its configuration allows."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 97
ARCHITECTURES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The class of each model type."""

_SIZES = {
    97: "vocab_size src_vocab_size vocab_size_per_layer_input",
    64: "hidden_size d_model n_embd embedding_size emb_dim input_embedding_size output_embedding_size "
    "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff ffn_hidden_size d_inner",
    256: "max_position_embeddings n_positions max_seq_len max_target_positions",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "top_k linear_num_key_heads index_n_heads index_topk_blocks",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_experts n_routed_experts num_local_experts "
    "moe_num_experts linear_num_value_heads patch_size",
    16: "head_dim global_head_dim kv_channels attention_head_size qk_rope_head_dim qk_nope_head_dim v_head_dim "
    "rotary_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_chunk_size chunk_size "
    "index_head_dim image_size",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
    "q_lora_rank kv_lora_rank",
    8: "mamba_n_heads mamba_num_heads n_mamba_heads mamba_d_state state_size index_topk index_block_size "
    "hidden_size_per_layer_input word_shape_embed_dim",
    128: "mamba_d_ssm",
    24: "sliding_window attention_chunk_size",
    1: "n_group topk_group n_shared_experts moe_num_shared_experts index_local_blocks bos_token_id num_codebooks",
    0: "pad_token_id",
}
SMALL: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()}
SMALL |= {"initializer_range": 0.2, "init_std": 0.2, "attention_dropout": 0.0}
_ALSO_IF_NONE = {"head_dim", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok", "n_shared_experts"}

_INDEXED: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "qwen4_exp": _INDEXED,
    "qwen4_exp_text": _INDEXED,
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"]},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 24},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a model type needs beside `SMALL`."""


def small_config(config_class: type[PreTrainedConfig], changes: dict[str, Any]) -> PreTrainedConfig:
    """Its default with the sizes of `SMALL`, in all parts, and a layer of full attention where layers are of kinds."""
    default = config_class()
    known = {name: value for name, value in default.to_dict().items() if not isinstance(value, list | dict)}
    chosen = {
        name: size
        for name, size in SMALL.items()
        if name in known and (known[name] is not None or name in _ALSO_IF_NONE)
    }
    if "kv_lora_rank" in known:
        chosen["num_key_value_heads"] = SMALL["num_attention_heads"]
    for part in config_class.sub_configs:
        if (config := getattr(default, part, None)) is not None:
            chosen[part] = small_config(type(config), {})
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or []))
    if "full_attention" in kinds and config_class.__name__ != "JambaConfig":
        others = [kind for kind in kinds if kind != "full_attention"]
        chosen["layer_types"] = [*others[:1], "full_attention", "full_attention"][:2]
    return config_class(**(chosen | changes))


def small_model(model_type: str, implementation: str) -> PreTrainedModel:
    """A model of random weights from one seed, in evaluation mode."""
    model_class = getattr(transformers, ARCHITECTURES[model_type])
    config = small_config(model_class.config_class, CHANGES.get(model_type, {}))
    config.is_decoder = True
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return model_class(config).eval()
