"""Five families of models in every kind of batch: the logits and tokens of their eager attention.

MuSe retrieves everything here, so it is exact attention to rounding. Gemma 3 and gpt-oss have layers with a sliding
window, Mistral in all layers, and gpt-oss has attention sinks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import PreTrainedModel

from muse_attention.core.recording import recorded_calls
from muse_attention.core.sinks import exact_attention_with_sinks, with_sinks
from muse_attention.huggingface import ExactAttentionWarning, register
from tests.architectures import VOCABULARY, small_model
from tests.library.test_architectures import ROUNDING

FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt_oss", "mistral"]
LENGTHS = (40, 1, 16, 43)
LENGTH = sum(LENGTHS)
PACKED = torch.cat([torch.arange(length) for length in LENGTHS])[None]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register("QK4R4SP16B16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExactAttentionWarning)
        yield
    register()


def model_of(family: str) -> PreTrainedModel:
    model = small_model(family, "eager")
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    return model


def token_ids(batch: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, LENGTH))


def run(model: PreTrainedModel, rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """The logits of real tokens, and the gradients of all parameters, of batches one after another."""
    model.zero_grad()
    found = []
    for row in rows:
        logits = model(use_cache=False, **row).logits
        real = row.get("attention_mask", torch.ones(logits.shape[:2])).bool()
        found.append(logits[real])
        found[-1].square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat(found).detach(), torch.cat([gradient.flatten() for gradient in gradients])


def assert_muse_agrees_with_eager(
    model: PreTrainedModel, by_muse: list[dict[str, Any]], by_eager: list[dict[str, Any]]
) -> None:
    expected, expected_gradients = run(model, by_eager)
    model.set_attn_implementation("muse")
    found, gradients = run(model, by_muse)
    assert (found - expected).abs().max() < ROUNDING * expected.std()
    assert (gradients - expected_gradients).norm() < 1e-3 * expected_gradients.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents(family: str) -> None:
    ids = token_ids()
    alone = [
        {"input_ids": part, "position_ids": positions}
        for part, positions in zip(ids.split(LENGTHS, 1), PACKED.split(LENGTHS, 1), strict=True)
    ]
    with recorded_calls() as calls:
        assert_muse_agrees_with_eager(model_of(family), [{"input_ids": ids, "position_ids": PACKED}], alone)
    assert any(call.query.shape[2] == LENGTHS[0] for call in calls) == (family != "mistral")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [slice(0, 30), slice(70, LENGTH), slice(30, 40)], ids=["left", "right", "inside"])
def test_padding(family: str, padded: slice) -> None:
    ids = token_ids(batch=2)
    real = torch.ones_like(ids)
    real[0, padded] = 0
    batch = [{"input_ids": ids, "attention_mask": real}]
    assert_muse_agrees_with_eager(model_of(family), batch, batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_in_a_padded_batch(family: str) -> None:
    """gpt-oss hands its positions to the attention function, and not to the makers of masks."""
    ids, real = token_ids(batch=2), torch.ones(2, LENGTH, dtype=torch.long)
    real[1, :20] = 0
    positions = PACKED.expand(2, -1)
    batch = {"input_ids": ids, "position_ids": positions, "attention_mask": real}
    begins = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
    alone = []
    for row in range(2):
        for begin, length in zip(begins, LENGTHS, strict=True):
            part = (slice(row, row + 1), slice(max(begin, 20 * row), begin + length))
            alone.append({"input_ids": ids[part], "position_ids": positions[part]})
    assert_muse_agrees_with_eager(model_of(family), [batch], alone)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_from_a_padded_batch(family: str, cache: str | None) -> None:
    model, ids = model_of(family), token_ids(batch=2)
    real = torch.ones_like(ids)
    real[0, :30] = 0
    options = {"attention_mask": real, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    tokens = []
    for implementation in ("eager", "muse"):
        model.set_attn_implementation(implementation)
        tokens.append(model.generate(ids, **options, cache_implementation=cache).tolist())
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])  # which SDPA cannot serve
def test_dropout_in_training_is_that_of_sdpa_also_for_packed_documents(family: str) -> None:
    model, ids = model_of(family).train(), token_ids()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    results = []
    for implementation in ("sdpa", "muse"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(1)
        results.append(model(ids, position_ids=PACKED, use_cache=False).logits)
    torch.testing.assert_close(*results)


def test_dropout_with_sinks_keeps_documents_apart() -> None:
    """SDPA has no sinks to compare with. When the first document changes, the others stay as they were."""
    model, ids = model_of("gpt_oss").train(), token_ids()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    model.set_attn_implementation("muse")
    changed = torch.cat([token_ids()[:, : LENGTHS[0]], ids[:, LENGTHS[0] :]], 1)
    results = []
    for row, seed in ((ids, 1), (changed, 1), (ids, 2)):
        torch.manual_seed(seed)
        results.append(model(row, position_ids=PACKED, use_cache=False).logits[:, LENGTHS[0] :])
    torch.testing.assert_close(results[0], results[1])
    assert (results[0] - results[2]).abs().max() > 0.1 * results[0].std()


def test_a_sink_is_one_more_logit() -> None:
    query, key, value = (torch.randn(2, heads, 20, 8, dtype=torch.float64) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64)
    repeated = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    logits = (0.3 * query @ repeated[0].mT).masked_fill(~torch.ones(20, 20).tril().bool(), -torch.inf)
    weights = torch.cat([logits, sinks[:, None, None].expand(2, 4, 20, 1)], -1).softmax(-1)[..., :-1]
    expected = weights @ repeated[1]
    found = exact_attention_with_sinks(query, key, value, sinks, None, is_causal=True, scale=0.3, dropout=0.0)
    torch.testing.assert_close(found, expected)
    out, lse = logits.softmax(-1) @ repeated[1], logits.logsumexp(-1)
    torch.testing.assert_close(with_sinks(out, lse, sinks), expected)
    draws = [
        exact_attention_with_sinks(query, key, value, sinks, None, is_causal=True, scale=0.3, dropout=0.5)
        for _ in range(400)
    ]
    mean, spread = torch.stack(draws).mean(0), torch.stack(draws).std(0)
    assert ((mean - expected).abs() < 6 * spread / 400**0.5 + 1e-9).all()
