"""`attn_implementation="muse"`: MuSe where a whole sequence attends to itself, exact attention everywhere else."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from transformers import LlamaForCausalLM, PreTrainedModel, StaticCache
from transformers.masking_utils import create_causal_mask

from muse_attention import MuSeConfig, defaults, get_attention, huggingface
from muse_attention.defaults import Default
from muse_attention.huggingface import ExactAttentionWarning, register, use_attention
from tests.models import SIZES, capture, tiny_llama, token_ids
from tests.refusals import one_line_error

COARSE = "QK4R1B64"
EVERYTHING = "QK4R4SP16B64"
"""Retrieves every bucket of up to 16 blocks, so it is exact attention to rounding."""


BERT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register(COARSE)
    yield
    register()


def logits(model: PreTrainedModel, implementation: str, *inputs: Tensor, **arguments: Any) -> Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(*inputs, **arguments).logits


def assert_exact(model: PreTrainedModel, *inputs: Tensor, reason: str, where: Tensor | None = None, **kw: Any) -> None:
    """The logits are those of SDPA (`where` the tokens are real), and one warning says that exact attention runs."""
    expected = logits(model, "sdpa", *inputs, **kw)
    with pytest.warns(ExactAttentionWarning, match=reason) as said:
        found = logits(model, "muse", *inputs, **kw)
    assert len(said) == 1
    real = torch.ones(found.shape[:2], dtype=torch.bool) if where is None else where.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=0)


def attention_output(model: LlamaForCausalLM, run: Callable[[], Any]) -> Tensor:
    """What the first layer's attention gives while `run` runs: its inputs are the same under every attention."""
    outputs: list[Tensor] = []
    hook = model.model.layers[0].self_attn.register_forward_hook(lambda _, __, output: outputs.append(output[0]))
    try:
        run()
    finally:
        hook.remove()
    return outputs[0].detach()


# Where MuSe runs


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_logits_of_sdpa_when_everything_is_retrieved(key_heads: int) -> None:
    model, ids = tiny_llama(num_key_value_heads=key_heads), token_ids(300, batch=2)
    expected = logits(model, "sdpa", ids)
    assert (logits(model, "muse", ids) - expected).abs().max() > 1e-3
    register(EVERYTHING)
    torch.testing.assert_close(logits(model, "muse", ids), expected)


@pytest.mark.parametrize("name", ["muse:QK4R1B64", "muse", "block_diagonal:64", "moba:L64B16R2", "exact"])
def test_a_layer_attends_as_the_attention_of_that_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And as nothing else: what is registered, and what the model says, is not heeded."""
    monkeypatch.setattr(defaults, "DEFAULTS", (Default(None, "QK8R1B32"),))
    model, ids = tiny_llama(muse="QK2R0B128"), token_ids(300)
    query, key, value, scale = capture(model, ids)[0]
    out = get_attention(name)(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    expected = model.model.layers[0].self_attn.o_proj(out.transpose(1, 2).flatten(2)).detach()
    with use_attention(model, name):
        torch.testing.assert_close(attention_output(model, lambda: model(ids)), expected)


@pytest.mark.parametrize("padding", [0, 100])
def test_an_encoder_attends_both_ways(padding: int) -> None:
    config = transformers.BertConfig(**BERT)
    model, ids = transformers.BertForMaskedLM(config).double().eval(), token_ids(300, batch=2)
    real = torch.ones_like(ids)
    real[1, 300 - padding :] = 0
    expected = logits(model, "sdpa", ids, attention_mask=real)
    assert (logits(model, "muse", ids, attention_mask=real) - expected)[real.bool()].abs().max() > 1e-3
    register(EVERYTHING)
    torch.testing.assert_close(logits(model, "muse", ids, attention_mask=real)[real.bool()], expected[real.bool()])


def test_a_static_cache_is_prefilled_by_muse() -> None:
    model, ids = tiny_llama(), token_ids(300)
    expected = logits(model, "muse", ids)
    cache = StaticCache(config=model.config, max_cache_len=400)
    torch.testing.assert_close(logits(model, "muse", ids, past_key_values=cache), expected)


def test_autocast_costs_what_it_costs_sdpa() -> None:
    register(EVERYTHING)
    model, ids = tiny_llama().float(), token_ids(300)
    exact = logits(model, "sdpa", ids)
    with torch.autocast("cpu", torch.bfloat16):
        by_sdpa, by_muse = (logits(model, implementation, ids) for implementation in ("sdpa", "muse"))
    assert (by_muse - exact).square().mean() < 2 * (by_sdpa - exact).square().mean()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant: bool) -> None:
    model, ids = tiny_llama(), token_ids(200)
    model.set_attn_implementation("muse")
    model.train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.long
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_into_one_graph_that_runs_muse(compiler: str, use_cache: bool) -> None:
    model, ids = tiny_llama(num_hidden_layers=1).float(), token_ids(200)
    model.set_attn_implementation("muse")
    results = []
    torch.compiler.reset()
    for function in (model, torch.compile(model, fullgraph=True, backend=compiler)):
        model.zero_grad()
        out = function(ids, labels=ids, use_cache=use_cache)
        out.loss.backward()
        results.append((out.logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_compiled_layers_share_one_graph() -> None:
    """More layers than the compiler makes graphs of one function: a graph for each would leave the rest uncompiled."""
    model, ids, graphs = tiny_llama(num_hidden_layers=10).float().train(), token_ids(200), []
    model.set_attn_implementation("muse")

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    expected = model(ids, use_cache=False).logits
    for layer in model.model.layers:
        layer.compile(backend=count)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-3, atol=1e-4)
    assert len(graphs) == 1


# Where exact attention runs


def test_an_input_of_one_block() -> None:
    assert_exact(tiny_llama(), token_ids(64), reason="no longer than one block")


def assert_encoder_and_decoder_agree_with_sdpa(model: PreTrainedModel, reason: str) -> None:
    inputs = {"input_ids": token_ids(200), "decoder_input_ids": token_ids(150)}
    expected = logits(model, "sdpa", **inputs)
    warned = pytest.warns(ExactAttentionWarning, match=reason)
    with use_attention(model, f"muse:{EVERYTHING}"), torch.no_grad(), warned:
        found = model(**inputs).logits
    torch.testing.assert_close(found, expected)


def test_cross_attention() -> None:
    config = transformers.BartConfig(
        vocab_size=97,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        init_std=0.2,
    )
    model = transformers.BartForConditionalGeneration(config).double().eval()
    assert_encoder_and_decoder_agree_with_sdpa(model, reason="another sequence")


def test_a_bias_of_the_logits() -> None:
    config = transformers.T5Config(vocab_size=97, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    assert_encoder_and_decoder_agree_with_sdpa(model, reason="a bias to its logits")


def test_attention_dropout() -> None:
    model, ids = tiny_llama(attention_dropout=0.3).train(), token_ids(200)
    torch.manual_seed(1)
    expected = logits(model, "sdpa", ids)
    torch.manual_seed(1)
    with pytest.warns(ExactAttentionWarning, match="attention dropout"):
        found = logits(model, "muse", ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_prompt_in_chunks() -> None:
    register(EVERYTHING)
    model, ids = tiny_llama(), token_ids(300)
    expected = logits(model, "sdpa", ids)[:, 200:]
    model.set_attn_implementation("muse")
    with torch.no_grad():
        cache = model(ids[:, :200], use_cache=True).past_key_values
        with pytest.warns(ExactAttentionWarning, match="continues a KV cache"):
            found = model(ids[:, 200:], past_key_values=cache).logits
    torch.testing.assert_close(found, expected)


def test_generates_the_tokens_of_sdpa_when_everything_is_retrieved() -> None:
    """(In padded batches, and with a static cache: test_families.py.)"""
    register(EVERYTHING)
    model, ids = tiny_llama(), token_ids(150, batch=2)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    model.set_attn_implementation("muse")
    with pytest.warns(ExactAttentionWarning, match="decoding") as said:
        found = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert len(said) == 1
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("length", [40, 200])
def test_a_sliding_window_stays(length: int) -> None:
    """Also where it is longer than the input, and no mask shows it."""
    register("QK4R1B16")
    config = transformers.MistralConfig(**{**SIZES, "sliding_window": 50})
    model = transformers.MistralForCausalLM(config).double().eval()
    assert_exact(model, token_ids(length), reason="sliding window")


@pytest.mark.long
def test_compiled_models_honour_padding() -> None:
    model, ids = tiny_llama(num_hidden_layers=1), token_ids(200, batch=2)
    real = torch.ones_like(ids)
    real[1, :30] = 0
    expected = logits(model, "sdpa", ids, attention_mask=real)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.set_attn_implementation("muse")
    with pytest.warns(ExactAttentionWarning, match="padded in a compiled model"), torch.no_grad():
        found = compiled(ids, attention_mask=real).logits
    torch.testing.assert_close(found[real.bool()], expected[real.bool()])


@pytest.mark.long
def test_compiled_layers_honour_packing_and_a_compiled_model_refuses_it() -> None:
    model, ids = tiny_llama(num_hidden_layers=1), token_ids(200)
    packed = {"position_ids": torch.cat([torch.arange(80), torch.arange(120)])[None], "use_cache": False}
    expected = logits(model, "muse", ids, **packed)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with (
        pytest.raises(RuntimeError, match="packed position_ids in a compiled model: compile its layers"),
        torch.no_grad(),
    ):
        compiled(ids, **packed)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    torch.testing.assert_close(logits(model, "muse", ids, **packed), expected)
    padding = torch.ones_like(ids)
    padding[:, :50] = 0
    found = logits(model, "muse", ids, attention_mask=padding)
    alone = logits(model, "muse", ids[:, 50:], position_ids=torch.arange(50, 200)[None])
    torch.testing.assert_close(found[:, 50:], alone)


# Configurations


def test_the_config_of_the_model_is_heeded_first_and_saved_with_it(tmp_path: Path) -> None:
    model, ids = tiny_llama(), token_ids(300)
    coarse = logits(model, "muse", ids)
    register(EVERYTHING)
    model.config.muse = COARSE
    torch.testing.assert_close(logits(model, "muse", ids), coarse)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="muse", dtype=torch.float64)
    assert loaded.config.muse == COARSE
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, coarse)


def test_registrations_stand_side_by_side() -> None:
    model, ids = tiny_llama(), token_ids(300)
    register(MuSeConfig.parse(EVERYTHING), name="fine")
    expected = logits(model, "sdpa", ids)
    torch.testing.assert_close(logits(model, "fine", ids), expected)
    assert (logits(model, "muse", ids) - expected).abs().max() > 1e-3


def test_the_papers_method_is_that_of_each_input() -> None:
    model = tiny_llama()
    register("paper", name="papers")
    for length in (300, 600):
        ids = token_ids(length)
        register(MuSeConfig.paper(length), name="of-the-length")
        torch.testing.assert_close(logits(model, "papers", ids), logits(model, "of-the-length", ids), rtol=0, atol=0)
    with pytest.raises(ValueError, match="cannot read"):
        register("paper,QK4", name="papers")


def test_a_reason_is_given_once_and_again_after_registration() -> None:
    model, ids = tiny_llama(), token_ids(32)
    model.set_attn_implementation("muse")
    with pytest.warns(ExactAttentionWarning, match="one block") as said:
        model(ids)
    assert len(said) == 1
    model(ids)  # a warning would be an error
    register(COARSE)
    with pytest.warns(ExactAttentionWarning, match="one block"):
        model(ids)


def test_exact_attention_by_name_says_nothing() -> None:
    model = tiny_llama()
    with use_attention(model, "exact"):
        model(token_ids(20))


def test_the_implementation_is_put_back_also_after_an_error() -> None:
    model = tiny_llama()
    model.set_attn_implementation("eager")
    with use_attention(model, "moba:L64B16R2"):
        assert model.config._attn_implementation != "eager"
    assert model.config._attn_implementation == "eager"
    with pytest.raises(RuntimeError, match="stop"), use_attention(model, "moba:L64B16R2"):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == "eager"


# Mistakes


@pytest.mark.parametrize("name", ["sdpa", "my-sdpa", "flash", "org/muse", "", None])
def test_names_that_mean_something_else_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="means something else to transformers"):
        register(name=name)


def test_configs_are_checked() -> None:
    with pytest.raises(ValueError, match="cannot read 'X1'"):
        register("X1")
    with pytest.raises(ValueError, match="must be a MuSeConfig"):
        register(32)  # type: ignore[arg-type]
    model = tiny_llama()
    model.set_attn_implementation("muse")
    model.config.muse = 32
    with pytest.raises(ValueError, match=r"model.config.muse=32 must be a string like"):
        model(token_ids(20))
    with pytest.raises(ValueError, match="unknown attention 'sparse'"), use_attention(model, "sparse"):
        pass


def test_a_model_without_source_is_given_its_attention_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is defined in a notebook: transformers sets no attention whose use it cannot read."""
    monkeypatch.setitem(sys.modules, "notebook", types.ModuleType("notebook"))
    own = {"__module__": "notebook", "_can_set_attn_implementation_cached_value": None}  # not what is known of Llama
    model_class = type("NotebookModel", (LlamaForCausalLM,), own)
    ids = token_ids(300)
    config = transformers.LlamaConfig(**SIZES, attn_implementation="muse")
    made = model_class(config).double().eval()
    expected = LlamaForCausalLM(config).double().eval()
    made.load_state_dict(expected.state_dict())
    torch.testing.assert_close(made(ids).logits, expected(ids).logits)
    model = model_class(transformers.LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match=r"source of NotebookModel, .* pass attn_implementation when"):
        model.set_attn_implementation("muse")
    with pytest.raises(ValueError, match="cannot read the source of NotebookModel"), use_attention(model, "exact"):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_a_causal_mask_left_out_cannot_be_read_as_no_mask() -> None:
    """By a layer that adds the mask to its logits itself, say. None would mean to it that nothing is masked."""
    config = transformers.LlamaConfig(**SIZES, attn_implementation="muse")
    mask = create_causal_mask(config, torch.zeros(1, 100, 64), attention_mask=None, past_key_values=None)
    assert mask.numel() == 0  # and costs nothing
    with pytest.raises(RuntimeError, match="size of tensor"):
        torch.zeros(1, 4, 100, 100) + mask
    with pytest.raises(RuntimeError, match="size of tensor"):
        torch.zeros(1, 4, 100, 100).masked_fill(~mask, -1e9)


def test_without_transformers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [name for name in sys.modules if name.startswith(huggingface.__name__)]:
        monkeypatch.delitem(sys.modules, name)
    with one_line_error(r"pip install 'muse-attention\[huggingface\]'", ImportError):
        importlib.import_module(huggingface.__name__)
