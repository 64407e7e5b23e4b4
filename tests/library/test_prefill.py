"""`chunked_prefill`: a model reads a prompt in chunks as it reads the whole."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from muse_attention import MuSeConfig
from muse_attention.huggingface import ExactAttentionWarning, chunked_prefill, use_attention
from tests.models import tiny_llama, token_ids
from tests.refusals import one_line_error

CONFIG = "Q2K3T0.2B16"


def read_in_chunks(model: torch.nn.Module, ids: torch.Tensor, cuts: list[int], cache: object) -> torch.Tensor:
    parts = [
        model(ids[:, begin:end], past_key_values=cache, use_cache=True).logits
        for begin, end in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True)
    ]
    return torch.cat(parts, 1)


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[32, 64], [40], [5, 6, 80], [99]], ids=str)
@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_chunks_have_the_logits_of_the_whole(cuts: list[int], is_static: bool) -> None:
    model, ids = tiny_llama(), token_ids(100, batch=2)
    with use_attention(model, f"muse:{CONFIG}"):
        expected = model(ids, use_cache=False).logits
    with use_attention(model, "exact"):
        exact = model(ids, use_cache=False).logits
    assert (expected - exact).abs().max() > 1e-3  # or nothing would be shown
    cache = StaticCache(model.config, max_cache_len=120) if is_static else DynamicCache()
    single = [begin for begin, end in zip([0, *cuts], [*cuts, 100], strict=True) if end == begin + 1]
    with chunked_prefill(model, CONFIG):
        found = read_in_chunks(model, ids, cuts, cache)
    if single:  # single tokens attend exactly, and change what comes after them
        torch.testing.assert_close(found[:, : single[0]], expected[:, : single[0]])
        assert found.isfinite().all()
    else:
        torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_generate_gives_the_same_tokens() -> None:
    model, ids = tiny_llama(), token_ids(90)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with use_attention(model, f"muse:{CONFIG}"), pytest.warns(ExactAttentionWarning, match="decoding"):
        expected = model.generate(ids, **settings)
    with chunked_prefill(model, CONFIG):
        found = model.generate(ids, prefill_chunk_size=32, **settings)
        # Another prompt begins anew, and a later turn goes on after what was decoded.
        again = model.generate(ids, prefill_chunk_size=40, return_dict_in_generate=True, **settings)
        longer = torch.cat([again.sequences, token_ids(40)], 1)
        turn = model.generate(longer, past_key_values=again.past_key_values, prefill_chunk_size=32, **settings)
    assert torch.equal(found, expected)
    assert torch.equal(again.sequences, expected)
    assert turn.shape[1] == longer.shape[1] + 8


@torch.no_grad()
def test_padded_batches_attend_exactly() -> None:
    model, ids = tiny_llama(), token_ids(60, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :10] = 0
    cache = DynamicCache()
    with chunked_prefill(model, CONFIG):
        model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
        with pytest.warns(ExactAttentionWarning, match="continues a KV cache"):
            model(ids[:, 40:], attention_mask=mask, past_key_values=cache)


@torch.no_grad()
def test_what_cannot_be_continued() -> None:
    model, ids = tiny_llama(), token_ids(60)
    cache = DynamicCache()
    with use_attention(model, "exact"):
        model(ids[:, :40], past_key_values=cache)
    with chunked_prefill(model, CONFIG), one_line_error("the cache has 40 tokens, of which 0"):
        model(ids[:, 40:], past_key_values=cache)
    with one_line_error("depends on the length"), chunked_prefill(model, "Q2K3T0.2"):
        pass
    with one_line_error("the paper's method"), chunked_prefill(model, MuSeConfig.paper(1024)):
        pass
