"""The paper's decoder, through the calls that every model of transformers has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

from muse_attention import get_attention
from muse_attention.huggingface import register, use_attention
from muse_attention.huggingface.capture import visit_layers
from muse_lab.evaluation.loss.positions import check_model, position_losses
from muse_lab.pretraining.model.configuration import DecoderConfig
from muse_lab.pretraining.model.decoder import Decoder, DecoderForCausalLM
from tests.closeness import assert_equal_to_rounding
from tests.models import VOCABULARY, capture, token_ids
from tests.refusals import one_line_error

WINDOW = 16
COARSE, EVERYTHING = "muse:QK4R1B32", "muse:QK4R4SP16B32"
"""The second retrieves every bucket, so it is exact attention to rounding."""


def tiny(**changes: Any) -> DecoderForCausalLM:
    """Two pairs of layers of four heads, sharp, float64, in evaluation mode."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "initializer_range": 0.2,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
    }
    return DecoderForCausalLM(DecoderConfig.tiny(**{**sizes, **changes})).double().eval()


def logits(model: DecoderForCausalLM, ids: Tensor, **arguments: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **arguments).logits


def gradients(model: DecoderForCausalLM, run: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    run().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_all_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_equal_to_rounding(one, other)


# Sizes


@pytest.mark.parametrize(
    ("size", "millions", "parameters"),
    [
        (3, 96, 95_960_832),
        (4, 185, 184_574_976),
        (5, 356, 356_558_080),
        (6, 560, 559_996_416),
        (8, 1070, 1_073_825_792),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_parameters_of_the_paper(size: int, millions: int, parameters: int, head_dim: int) -> None:
    with torch.device("meta"):
        model = DecoderForCausalLM(DecoderConfig.scale(size, head_dim=head_dim))
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == parameters
    assert abs(found / 1e6 - millions) < 0.01 * millions
    assert model.config.num_attention_heads * head_dim == 256 * size


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = DecoderForCausalLM(DecoderConfig.tiny())
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert parameter.eq(1).all(), name
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            expected = 0.02 / (8**0.5 if residual else 1)
            assert abs(parameter.std() / expected - 1) < 0.02, name
    assert model.lm_head.weight is model.model.embed_tokens.weight


# What it computes


@pytest.mark.parametrize("attention", ["exact", "block_diagonal:32", "moba:L32B16R1"])
def test_no_gradient_to_the_future(attention: str) -> None:
    model = tiny(attention=attention)
    states = torch.randn(1, 100, 64, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(inputs_embeds=states).logits[0, 60].sum(), states)
    assert gradient[0, 61:].eq(0).all()
    assert gradient[0, :61].ne(0).any(-1).all()


def test_layers_with_a_window_see_no_further() -> None:
    model = tiny(layer_types=["sliding_attention"] * 4)
    states = torch.randn(1, 100, 64, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(inputs_embeds=states).logits[0, 90].sum(), states)
    first = 90 - 4 * (WINDOW - 1)
    assert gradient[0, :first].eq(0).all()
    assert gradient[0, first:91].ne(0).any(-1).all()


def test_positions_are_relative() -> None:
    model, ids = tiny(), token_ids(60)
    shifted = logits(model, ids, position_ids=torch.arange(60)[None] + 500)
    assert_equal_to_rounding(shifted, logits(model, ids))
    swapped = ids[:, [1, 0, *range(2, 60)]]
    assert (logits(model, swapped)[:, -1] - logits(model, ids)[:, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["exact", COARSE, "block_diagonal:32", "moba:L32B16R1"])
def test_global_layers_attend_by_name(name: str) -> None:
    """As the config says, as `set_attention` says, and as `use_attention` says."""
    model, ids = tiny(), token_ids(100)
    query, key, value, scale = capture(model, ids)[0]
    out = get_attention(name)(query, key, value, is_causal=True, scale=scale)
    attention = model.model.layers[1].self_attn
    expected = attention.o_proj(out.transpose(1, 2).flatten(2)).detach()
    found: list[Tensor] = []
    attention.register_forward_hook(lambda _, __, output: found.append(output[0].detach()))
    with use_attention(model, name):
        in_context = logits(model, ids)
    model.set_attention(name)
    assert model.config.attention == name
    assert torch.equal(logits(model, ids), in_context)
    for one in found:
        assert_equal_to_rounding(one, expected)
    other = tiny(attention=name)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, ids), in_context)


def test_windows_are_kept_under_every_attention() -> None:
    model, ids = tiny(), token_ids(100)
    exact = logits(model, ids)
    model.set_attention(EVERYTHING)
    assert_equal_to_rounding(logits(model, ids), exact)
    model.set_attention(COARSE)
    assert (logits(model, ids) - exact).abs().max() > 1e-3


def test_every_implementation_of_transformers() -> None:
    """In float32: with padding, its eager attention overflows in float64."""
    model, ids = tiny().float(), token_ids(50, batch=2)
    real = torch.ones_like(ids)
    real[0, :20] = 0
    for arguments in ({}, {"attention_mask": real}):
        exact = logits(model, ids, **arguments)
        for implementation in ("sdpa", "eager"):
            model.set_attn_implementation(implementation)
            found = logits(model, ids, **arguments)
            torch.testing.assert_close(found[real.bool()], exact[real.bool()], rtol=1e-4, atol=1e-4)
        model.set_attention("exact")


def test_an_attention_that_transformers_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so in its log alone, and goes on with the one before."""
    model = tiny()
    monkeypatch.setattr(DecoderForCausalLM, "_can_set_attn_implementation", lambda *_: False)
    with pytest.raises(ValueError, match="DecoderForCausalLM does not use the attention interface"):
        model.set_attention(COARSE)
    assert model.config.attention == "exact"


class _LargestMask(TorchDispatchMode):
    """The elements of the largest boolean tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.bool:
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("attention", ["exact", COARSE])
@pytest.mark.parametrize("use_cache", [False, True])
def test_whole_sequences_need_no_mask(attention: str, use_cache: bool) -> None:
    model, ids = tiny(attention=attention), token_ids(400)
    with torch.no_grad(), _LargestMask() as largest:
        model(ids, use_cache=use_cache)
    assert largest.elements < 400 * 400


def test_registered_attention() -> None:
    model, ids = tiny(), token_ids(100)
    exact = logits(model, ids)
    register(EVERYTHING.partition(":")[2])
    model.set_attn_implementation("muse")
    found = logits(model, ids)
    register()
    assert_equal_to_rounding(found, exact)


def test_an_implementation_that_was_asked_for_comes_before_the_name(tmp_path: Path) -> None:
    tiny(attention=COARSE).save_pretrained(tmp_path)
    assert DecoderForCausalLM.from_pretrained(tmp_path).config._attn_implementation == f"muse_attention.{COARSE}"
    assert DecoderForCausalLM.from_pretrained(tmp_path, attention="exact").config.attention == "exact"
    loaded = DecoderForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert loaded.config._attn_implementation == "sdpa"


# Masks and caches


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    model, ids = tiny(), token_ids(60)
    padding = token_ids(25)
    real = torch.ones_like(ids)
    parts = [(torch.zeros_like(padding), padding), (real, ids)]
    mask, padded = (torch.cat(tensors, 1) for tensors in zip(*(parts if side == "left" else parts[::-1]), strict=True))
    found = logits(model, padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert found.isfinite().all()
    assert_equal_to_rounding(found[mask.bool()], logits(model, ids)[0])


@pytest.mark.parametrize("attention", ["exact", "muse:QK4R1B16"])
def test_padding_is_left_out_under_every_attention(attention: str) -> None:
    model, ids = tiny(), token_ids(60, batch=2)
    model.set_attention(attention)
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    found = logits(model, ids, attention_mask=mask)
    alone = logits(model, ids[:1, 20:], position_ids=torch.arange(20, 60)[None])
    assert_equal_to_rounding(found[:1, 20:], alone)
    assert_equal_to_rounding(found[1:], logits(model, ids[1:]))


@pytest.mark.parametrize("attention", ["exact", "muse:QK4R1B16"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_sequences_do_not_see_each_other(attention: str, use_cache: bool) -> None:
    model, ids = tiny(), token_ids(70)
    model.set_attention(attention)
    positions = torch.cat([torch.arange(30), torch.arange(40)])[None]
    packed = logits(model, ids, position_ids=positions, use_cache=use_cache)
    assert_equal_to_rounding(packed, torch.cat([logits(model, ids[:, :30]), logits(model, ids[:, 30:])], 1))


@pytest.mark.parametrize("make", [lambda config: DynamicCache(config=config), lambda config: DynamicCache()])
@pytest.mark.parametrize("parts", [[40, 1, 1, 1], [5, 1, 1, 30, 1], [20, 20, 20]])
def test_a_sequence_in_parts(make: Callable[[DecoderConfig], DynamicCache], parts: list[int]) -> None:
    model, ids = tiny(), token_ids(sum(parts), batch=2)
    cache = make(model.config)
    found = [logits(model, part, past_key_values=cache) for part in ids.split(parts, 1)]
    assert_equal_to_rounding(torch.cat(found, 1), logits(model, ids))


@pytest.mark.parametrize("length", [5, 40])
def test_a_static_cache(length: int) -> None:
    model, ids = tiny(), token_ids(length + 3)
    cache = StaticCache(config=model.config, max_cache_len=64)
    found = [logits(model, part, past_key_values=cache) for part in ids.split([length, 1, 1, 1], 1)]
    assert_equal_to_rounding(torch.cat(found, 1), logits(model, ids))


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_equals_recomputation(padding: int, cache: str | None) -> None:
    model, ids = tiny(), token_ids(30, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    found = model.generate(ids, cache_implementation=cache, **options)
    assert torch.equal(found, model.generate(ids, use_cache=False, **options))
    for row in range(2):
        whole = found[row : row + 1, padding if row == 0 else 0 :]
        assert torch.equal(logits(model, whole)[:, -11:-1].argmax(-1), whole[:, -10:])


# Saved and loaded


def test_equals_itself_after_saving_and_loading(tmp_path: Path) -> None:
    model, ids = tiny(attention=COARSE).float(), token_ids(100)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in {name for file in tmp_path.glob("*.safetensors") for name in names_in(file)}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, DecoderForCausalLM)
    assert loaded.config.attention == COARSE
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, DecoderConfig)
    assert config.to_diff_dict() == loaded.config.to_diff_dict()
    assert isinstance(AutoModel.from_pretrained(tmp_path), Decoder)


def names_in(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


# Measurements of the library


def test_layers_without_a_window_are_visited_by_their_number() -> None:
    seen: list[int] = []
    visit_layers(tiny(), token_ids(40), lambda layer, *_: seen.append(layer))
    assert seen == [1, 3]


def test_losses_by_position() -> None:
    model, ids = tiny(), token_ids(100)
    check_model(model, ids)
    expected = cross_entropy(logits(model, ids)[0, :-1], ids[0, 1:], reduction="none")
    assert_equal_to_rounding(position_losses(model, ids[0], EVERYTHING), expected)


# Training


def test_loss_and_gradients_are_those_of_all_logits() -> None:
    model, ids = tiny().train(), token_ids(50, batch=2)
    labels = ids.clone()
    labels[0, :20] = -100

    def plain() -> Tensor:
        return cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    out = model(ids, labels=labels)
    assert out.logits is None
    assert out.past_key_values is None
    assert_equal_to_rounding(out.loss, plain())
    assert_all_equal(gradients(model, lambda: model(ids, labels=labels).loss), gradients(model, plain))
    following = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], 1)
    assert torch.equal(model(ids, shift_labels=following).loss, out.loss)
    counted = int((labels[:, 1:] != -100).sum())
    assert_equal_to_rounding(model(ids, labels=labels, num_items_in_batch=2 * counted).loss, out.loss / 2)


@pytest.mark.parametrize(
    ("keep", "positions"), [(0, range(20)), (3, range(17, 20)), (torch.tensor([2, 5]), [2, 5]), (None, range(20))]
)
def test_logits_of_the_positions_asked_for(keep: Any, positions: Any) -> None:
    model, ids = tiny(), token_ids(20)
    whole = logits(model, ids)
    assert_equal_to_rounding(logits(model, ids, logits_to_keep=keep), whole[:, list(positions)])
    if keep is not None:
        assert_equal_to_rounding(logits(model, ids, logits_to_keep=keep, labels=ids), whole[:, list(positions)])


@pytest.mark.parametrize("attention", ["exact", COARSE])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant: bool, attention: str) -> None:
    model, ids = tiny(attention=attention).train(), token_ids(80)
    expected = gradients(model, lambda: model(ids, labels=ids).loss)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_all_equal(gradients(model, lambda: model(ids, labels=ids).loss), expected)


@pytest.mark.long
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_into_one_graph(compiler: str) -> None:
    model, ids = tiny(attention=COARSE).train(), token_ids(80)
    expected = gradients(model, lambda: model(ids, labels=ids).loss)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    for one, other in zip(gradients(model, lambda: compiled(ids, labels=ids).loss), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.long
def test_layers_compile_into_one_graph_for_each_kind() -> None:
    """However many layers there are: PyTorch gives up on a function after eight graphs."""
    model, ids = tiny(num_hidden_layers=6, attention=COARSE).train(), token_ids(80)
    torch.compiler.reset()
    counter = CompileCounter()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=counter)
    for attention in (COARSE, "exact"):
        model.set_attention(attention)
        model(ids, labels=ids).loss.backward()
    assert counter.frame_count == 3  # with a window, and without one for each attention


def test_autocast_keeps_the_residual_stream_in_float32() -> None:
    model, ids = tiny().float().train(), token_ids(80)
    exact = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        states = model.model(ids).last_hidden_state
        loss = model(ids, labels=ids).loss
    assert states.dtype == loss.dtype == torch.float32
    assert 0 < (loss - exact).abs() < 0.05 * exact


def test_bfloat16_rotates_in_float32() -> None:
    """In bfloat16 positions beyond 256 would be rounded."""
    model, ids = tiny(rope_theta=10.0), token_ids(60)
    far = torch.arange(60)[None] + 900
    exact = logits(model, ids, position_ids=far)
    low = model.bfloat16()
    found, near = logits(low, ids, position_ids=far), logits(low, ids)
    assert (found - exact).square().mean() < 4 * (near - exact).square().mean()


@pytest.mark.long
def test_learns() -> None:
    """The same few tokens, over and over: from a uniform guess to certainty."""
    model = DecoderForCausalLM(DecoderConfig.tiny(vocab_size=VOCABULARY, attention="muse:QK4R1B16", sliding_window=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    ids = token_ids(8).repeat(1, 8)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - torch.tensor(float(VOCABULARY)).log()) < 0.3
    assert losses[-1] < 0.3


# Mistakes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DecoderConfig.scale(7), "there is no model of scale 7: choose 1, 2, 3, 4, 5, 6, 8"),
        (lambda: DecoderConfig(hidden_size=100), "hidden_size=100 is not 1 heads of head_dim=64"),
        (lambda: DecoderConfig(hidden_size=63, head_dim=63), "head_dim=63 must be even"),
        (lambda: DecoderConfig(num_hidden_layers=3), "num_hidden_layers=3 must be even"),
        (lambda: DecoderConfig(sliding_window=0), "sliding_window=0 must be an integer of at least 1"),
        (lambda: DecoderConfig(vocab_size=1.5), "vocab_size=1.5 must be an integer"),
        (lambda: DecoderConfig(layer_types=["full_attention"]), "must name 'sliding_attention' or 'full_attention'"),
        (lambda: DecoderConfig(tie_word_embeddings=False), "the output layer is the embedding; leave it True"),
        (lambda: DecoderConfig(attention="sparse"), "unknown attention 'sparse'"),
        (lambda: tiny().set_attention("sparse"), "unknown attention 'sparse'"),
        (lambda: tiny()(use_cache=False), "give either input_ids or inputs_embeds"),
    ],
)
def test_mistakes(make: Callable[[], Any], message: str) -> None:
    with one_line_error(message):
        make()
