"""Every causal language model of transformers under MuSe: right, or refused in one line before it gives a number.

A model that is in none of the lists below must attend with MuSe. One that is in the wrong list fails.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from muse_attention.huggingface import ExactAttentionWarning, forward, register, use_attention
from tests.architectures import ARCHITECTURES, VOCABULARY, small_model

NOT_BUILT = {
    "blt": "four models inside each other, whose sizes depend on one another",
    "gemma3n": "needs the package timm",
    "gemma4_assistant": "runs on the KV cache of another model",
    "gemma4_unified_assistant": "runs on the KV cache of another model",
}
_WITHOUT_INTERFACE = {
    "and ask for a mask": "big_bird bloom codegen falcon git got_ocr2 gpt_neo gpt_neox_japanese gptj megatron-bert mpt "
    "mvp rembert roformer trocr xglm",
    "and ask for nothing": "cpmant openai-gpt prophetnet reformer rwkv xlm xlnet",
}
WITHOUT_INTERFACE = {name for names in _WITHOUT_INTERFACE.values() for name in names.split()}
NEVER_ASK = set(_WITHOUT_INTERFACE["and ask for nothing"].split())
OTHER_SOFTMAX = {
    "caps its logits": "gemma2 vaultgemma",
    "adds keys of its own": "deepseek_v4",
    "selects the keys of each query": "axk2 deepseek_v32 glm_moe_dsa hy_v4 minimax_m3_vl_text",
    "MuSe reads no general attention_mask": "doge gemma4_unified qwen4_exp qwen4_exp_text",
}
EXACT = {
    "no attention": "falcon_mamba mamba mamba2 xlstm",
    "a sliding window in every layer": "ministral mistral recurrent_gemma",
    "a bias of its own": "inkling_text",
}
_IS_5_17 = transformers.__version__.startswith("5.17.")
READS_ITS_MASK = {"doge"} if _IS_5_17 else set()
"""Later it asks for a mask that it can read."""
POSITIONS_UNSEEN = {"granitemoehybrid", "moshi"} if _IS_5_17 else {"granitemoehybrid"}
"""They pass position_ids neither to an attention function nor to the maker of a mask, so packing is not seen."""
REFUSED = {name: what for what, names in OTHER_SOFTMAX.items() for name in names.split() if name not in READS_ITS_MASK}
REFUSED |= dict.fromkeys(WITHOUT_INTERFACE, "does not use the attention interface")
NOT_MUSE = {name for names in EXACT.values() for name in names.split()}
SERVED = [name for name in ARCHITECTURES if name not in NOT_BUILT and name not in REFUSED]

LENGTH = 64
CHANGED_FROM = 40
ROUNDING = 3e-4
"""Of the standard deviation of the logits, in float32. What is wrong is wrong by more than 0.1."""


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register("QK4R4SP16B16")  # retrieves every bucket of up to 16 blocks, so it is exact attention to rounding
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExactAttentionWarning)
        yield
    register()


def inputs() -> tuple[Tensor, Tensor]:
    """Token ids, and the same with other ones from `CHANGED_FROM` on."""
    ids, others = torch.randint(3, VOCABULARY, (2, 1, LENGTH), generator=torch.Generator().manual_seed(1))
    return ids, torch.cat([ids[:, :CHANGED_FROM], others[:, CHANGED_FROM:]], 1)


def logits(model: PreTrainedModel, ids: Tensor, **arguments: Any) -> Tensor:
    return model(input_ids=ids, use_cache=False, **arguments).logits


def gradients(model: PreTrainedModel, found: Tensor) -> Tensor:
    """Of the mean square of the logits, for all parameters, in one vector."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    given = torch.autograd.grad(found.square().mean(), parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in given])


@pytest.mark.parametrize("name", SERVED)
def test_a_model_is_causal_and_agrees_with_eager_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    attention = forward.muse_attention
    monkeypatch.setattr(forward, "muse_attention", lambda *a, **k: (calls.append(a), attention(*a, **k))[1])
    model = small_model(name, "muse")
    ids, others = inputs()
    if name in READS_ITS_MASK:
        with pytest.raises(RuntimeError, match="size of tensor"):
            logits(model, ids)
        return
    found = logits(model, ids)
    found_gradients = gradients(model, found)
    assert bool(calls) == (name not in NOT_MUSE)
    with torch.no_grad():
        after_change = logits(model, others)
    model.set_attn_implementation("eager")
    expected = logits(model, ids, attention_mask=torch.ones_like(ids))  # without it, Moshi is not causal in 5.17
    scale = expected.std().item()
    assert (after_change - found)[:, CHANGED_FROM:].abs().max() > 0.1 * scale
    assert (after_change - found)[:, :CHANGED_FROM].abs().max() < ROUNDING * scale
    assert (found - expected).abs().max() < ROUNDING * scale
    expected_gradients = gradients(model, expected)
    assert expected_gradients.norm() > 0
    assert (found_gradients - expected_gradients).norm() < 1e-3 * expected_gradients.norm()


@pytest.mark.parametrize(
    "name", [name for name in SERVED if name not in POSITIONS_UNSEEN and name not in READS_ITS_MASK]
)
def test_packed_documents_are_refused_or_kept_apart(name: str) -> None:
    model, (ids, others) = small_model(name, "muse"), inputs()
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return
    positions = torch.cat([torch.arange(CHANGED_FROM), torch.arange(LENGTH - CHANGED_FROM)])[None]
    try:
        with torch.no_grad():
            found = model(input_ids=ids, position_ids=positions, use_cache=True).logits
            others = torch.cat([others.flip(1)[:, :CHANGED_FROM], ids[:, CHANGED_FROM:]], 1)
            after_change = model(input_ids=others, position_ids=positions, use_cache=True).logits
    except ValueError as error:
        assert "packed documents would see each other" in str(error)  # noqa: PT017 - one of two right outcomes
        return
    assert (after_change - found)[:, CHANGED_FROM:].abs().max() < ROUNDING * found.std()


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name in REFUSED])
def test_a_model_that_cannot_be_served_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]) as raised:
        logits(small_model(name, "muse"), inputs()[0])
    assert "\n" not in str(raised.value)
    assert "attn_implementation='eager'" in str(raised.value)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name in WITHOUT_INTERFACE])
def test_a_model_without_the_attention_interface_is_refused_whoever_asks(name: str) -> None:
    model = small_model(name, "eager")
    refused = f"{ARCHITECTURES[name]} does not use the attention interface"
    with pytest.raises(ValueError, match=refused):
        model.set_attn_implementation("muse")
    for attention in ("muse", "exact", "block_diagonal:16"):
        with pytest.raises(ValueError, match=refused), use_attention(model, attention):
            pass
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name in WITHOUT_INTERFACE - {"got_ocr2"}])
def test_a_config_changed_behind_the_model_is_refused_or_changes_nothing(name: str) -> None:
    """Where a model asks for a mask it is refused. Some never ask: they attend as they did."""
    model, (ids, _) = small_model(name, "eager"), inputs()
    expected = logits(model, ids) if name in NEVER_ASK else None
    model.config._attn_implementation = "muse"
    if expected is None:
        with pytest.raises(ValueError, match="does not use the attention interface"):
            logits(model, ids)
    else:
        torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=0)


def test_the_part_of_a_model_that_uses_the_interface_can_be_set_alone() -> None:
    model, (ids, _) = small_model("got_ocr2", "eager"), inputs()
    expected = logits(model, ids)
    model.set_attn_implementation({"text_config": "muse"})
    found = logits(model, ids)
    assert model.config.text_config._attn_implementation == "muse"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    model = small_model("git", "eager")
    with pytest.raises(ValueError, match="does not use the attention interface"):
        model.set_attn_implementation({"": "muse", "vision_config": "eager"})


@pytest.mark.parametrize("name", ["bloom", "falcon", "gptj", "gpt_neo", "mpt", "xglm"])
def test_from_config_and_from_pretrained_refuse_too(name: str, tmp_path: Path) -> None:
    model = small_model(name, "eager")
    refused = f"{type(model).__name__} does not use the attention interface"
    with pytest.raises(ValueError, match=refused):
        AutoModelForCausalLM.from_config(model.config, attn_implementation="muse")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=refused):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="muse")


def test_every_model_is_in_one_list() -> None:
    lists = [set(NOT_BUILT), set(REFUSED), NOT_MUSE]
    assert sum(map(len, lists)) == len(set.union(*lists))
    assert len(ARCHITECTURES) > 150
