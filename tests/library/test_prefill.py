"""`chunked_prefill`: a model reads a prompt in chunks as it reads the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DynamicCache, PreTrainedModel, StaticCache

from muse_attention import MuSeConfig
from muse_attention.huggingface import ExactAttentionWarning, chunked_prefill, use_attention
from tests.models import tiny_llama, token_ids
from tests.refusals import one_line_error

CONFIG = "Q2K3T0.2B16"


def read_in_chunks(model: PreTrainedModel, ids: Tensor, cuts: list[int], cache: object) -> Tensor:
    parts = [
        model(ids[:, begin:end], past_key_values=cache, use_cache=True).logits
        for begin, end in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True)
    ]
    return torch.cat(parts, 1)


def logits_of(model: PreTrainedModel, ids: Tensor, attention: str, **arguments: Any) -> Tensor:
    with use_attention(model, attention):
        return model(ids, use_cache=False, **arguments).logits


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[32, 64], [40], [5, 80]], ids=str)
@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_chunks_have_the_logits_of_the_whole(cuts: list[int], is_static: bool) -> None:
    model, ids = tiny_llama(), token_ids(100, batch=2)
    expected = logits_of(model, ids, f"muse:{CONFIG}")
    assert (expected - logits_of(model, ids, "exact")).abs().max() > 1e-3  # or nothing would be shown
    cache = StaticCache(model.config, max_cache_len=120) if is_static else DynamicCache()
    with chunked_prefill(model, CONFIG):
        found = read_in_chunks(model, ids, cuts, cache)
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_a_single_token_attends_exactly_and_is_not_forgotten() -> None:
    """In a model of one layer the tokens after it are as if it had not come alone."""
    model, ids = tiny_llama(num_hidden_layers=1), token_ids(100)
    expected, exact = logits_of(model, ids, f"muse:{CONFIG}"), logits_of(model, ids, "exact")
    for cuts in ([1, 40], [40, 41]):
        with chunked_prefill(model, CONFIG):
            found = read_in_chunks(model, ids, cuts, DynamicCache())
        alone = cuts[0] if cuts[0] > 1 else 0
        torch.testing.assert_close(found[:, alone], exact[:, alone])
        expected[:, alone] = exact[:, alone]
        torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_generate_gives_the_same_tokens() -> None:
    model, ids = tiny_llama(), token_ids(90)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with use_attention(model, f"muse:{CONFIG}"), pytest.warns(ExactAttentionWarning, match="decoding"):
        expected = model.generate(ids, **settings)
    with chunked_prefill(model, CONFIG):
        found = model.generate(ids, prefill_chunk_size=32, **settings)
        again = model.generate(ids, prefill_chunk_size=40, **settings)  # another prompt begins anew
    assert torch.equal(found, expected)
    assert torch.equal(again, expected)


@torch.no_grad()
def test_padded_batches_attend_exactly() -> None:
    model, ids = tiny_llama(), token_ids(60, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :10] = 0
    expected = logits_of(model, ids, "exact", attention_mask=mask)
    cache = DynamicCache()
    with chunked_prefill(model, CONFIG):
        with pytest.warns(ExactAttentionWarning, match="padded"):
            first = model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache).logits
        second = model(ids[:, 40:], attention_mask=mask, past_key_values=cache).logits
    found = torch.cat([first, second], 1)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])


@torch.no_grad()
def test_a_layer_that_is_not_causal_sees_everything() -> None:
    model, ids = tiny_llama(num_hidden_layers=1), token_ids(60)
    attention = model.model.layers[0].self_attn
    attention.is_causal = False
    plain = logits_of(model, ids, "exact", is_causal=False)
    assert (plain - logits_of(model, ids, "exact", is_causal=True)).abs().max() > 1e-3
    with chunked_prefill(model, CONFIG):
        torch.testing.assert_close(model(ids, use_cache=False, is_causal=False).logits, plain)


@torch.no_grad()
def test_two_models_have_a_block_each() -> None:
    ids, models, configs = token_ids(90), [tiny_llama(), tiny_llama()], ["Q2K3T0.2B16", "Q1K2T0.5B8"]
    expected = [logits_of(model, ids, f"muse:{config}") for model, config in zip(models, configs, strict=True)]
    with chunked_prefill(models[0], configs[0]), chunked_prefill(models[1], configs[1]):
        found = [read_in_chunks(model, ids, [40], DynamicCache()) for model in models]
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_what_cannot_be_continued() -> None:
    model, ids = tiny_llama(), token_ids(60)
    cache = DynamicCache()
    with use_attention(model, "exact"):
        model(ids[:, :40], past_key_values=cache)
    with (
        chunked_prefill(model, CONFIG),
        one_line_error("continues a cache of 40 tokens that were not attended to in this block"),
    ):
        model(ids[:, 40:], past_key_values=cache)
    caches = [DynamicCache(), DynamicCache()]
    with chunked_prefill(model, CONFIG):
        for number, some in enumerate(caches):
            model(ids[:, number : number + 40], past_key_values=some)
        with one_line_error("continues a cache of 40 tokens that were not attended to in this block"):
            model(ids[:, 40:], past_key_values=caches[0])
    with one_line_error("the paper's method"), chunked_prefill(model, MuSeConfig.paper(1024)):
        pass
