"""What the layers of a model attend with, against the same by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from muse_attention import exact_attention
from muse_attention.huggingface.capture import visit_layers
from tests.models import SIZES, capture, tiny_llama, token_ids


def test_the_first_layer_is_that_of_a_computation_by_hand() -> None:
    model, ids = tiny_llama(), token_ids(70, batch=2)
    query, key, value, scale = capture(model, ids)[0]
    layer = model.model.layers[0]
    with torch.no_grad():
        hidden = layer.input_layernorm(model.model.embed_tokens(ids))
        projections = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        by_hand = [projection(hidden).view(2, 70, -1, 16).transpose(1, 2) for projection in projections]
        cosine, sine = model.model.rotary_emb(hidden, torch.arange(70)[None])
        by_hand[:2] = apply_rotary_pos_emb(*by_hand[:2], cosine, sine)
    torch.testing.assert_close((query, key, value), by_hand)
    assert scale == 0.25


def test_the_implementation_is_put_back_after_an_error() -> None:
    model, ids = tiny_llama(), token_ids(20)
    model.set_attn_implementation("eager")

    def stop(*_: object) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        visit_layers(model, ids, stop)
    assert model.config._attn_implementation == "eager"
    assert len(capture(model, ids)) == 2


def test_every_layer_follows_from_exact_attention_in_those_before() -> None:
    model, ids = tiny_llama(), token_ids(70)
    outputs: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda _, __, output: outputs.append(output[0]))
    layers = capture(model, ids)
    assert len(layers) == len(outputs) == 2
    for layer, (query, key, value, scale), expected in zip(model.model.layers, layers, outputs, strict=True):
        assert query.shape == (1, 4, 70, 16)
        assert key.shape == value.shape == (1, 2, 70, 16)
        out = exact_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        torch.testing.assert_close(layer.self_attn.o_proj(out.transpose(1, 2).flatten(2)), expected)


def test_a_layer_with_a_window_is_counted_but_not_visited() -> None:
    model = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, query_pre_attn_scalar=64, attn_logit_softcapping=None)
    )
    seen = []
    visit_layers(model, token_ids(20), lambda layer, query, key, value, scale: seen.append((layer, scale)))
    assert seen == [(1, 0.125)]


@pytest.mark.parametrize("shape", [(20,), (1, 0)])
def test_token_ids_are_checked(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"it must be \(batch, length\)"):
        capture(tiny_llama(), torch.zeros(shape, dtype=torch.long))
