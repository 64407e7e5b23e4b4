"""MuSe in OLMo-core: loss and gradients of its Llama, documents in a batch, and its Ulysses on two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("olmo_core", reason="OLMo-core is not installed: make test-integrations")

from olmo_core.nn.attention import (
    AttentionBackendName,
    RingContextParallelStyle,
    SlidingWindowAttentionConfig,
    UlyssesContextParallelStyle,
)
from olmo_core.nn.transformer import TransformerConfig

from muse_attention.integrations.olmo_core import MuSeAttentionBackend, use_muse
from tests.closeness import assert_equal_to_rounding
from tests.trainer_checks import (
    CONFIG,
    LENGTHS,
    assert_close_but_not_same,
    assert_same,
    documented_code,
    on_two_processes,
    sum_of,
    train,
)

VOCABULARY = 97


def llama(*, key_heads: int = 2, has_rope: bool = True, **of_attention: Any) -> Any:
    torch.manual_seed(0)
    config = TransformerConfig.llama_like(
        d_model=64,
        vocab_size=VOCABULARY,
        n_layers=2,
        n_heads=4,
        n_kv_heads=key_heads,
        attn_backend=AttentionBackendName.torch,
    )
    config.block.sequence_mixer = config.block.sequence_mixer.replace(**of_attention)
    # OLMo-core would compute these in float32, whose rounding depends on the shapes.
    for in_float32 in (config.block.layer_norm, config.lm_head.layer_norm, config.block.sequence_mixer.rope):
        in_float32.full_precision = False
    if not has_rope:
        config.block.sequence_mixer.rope = None
    model = config.build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"))
    return model.double()


def with_muse(model: Any, config: str | None = None) -> Any:
    use_muse(model, config)
    return model


def loss_of(tokens: Tensor, lengths: list[list[int]] | None = None) -> Callable[[nn.Module], Tensor]:
    """Losses of (batch, length + 1) tokens; each row has documents of these lengths, 0 for none."""

    def losses(model: Any) -> Tensor:
        documents: dict[str, Any] = {}
        if lengths is not None:
            documents = {"doc_lens": torch.tensor(lengths), "max_doc_lens": [max(row) for row in lengths]}
        logits = model(tokens[:, :-1], **documents)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")

    return losses


def random_tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length + 1), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sinks", [False, True])
def test_short_rows_train_as_with_its_own_attention(sinks: bool) -> None:
    loss = loss_of(random_tokens(2, 96))
    found = train(with_muse(llama(attention_sinks=sinks)), loss)
    assert any(name.endswith("sinks") for name in found.gradients) == sinks
    assert_same(found, train(llama(attention_sinks=sinks), loss))


def test_longer_rows_are_approximated() -> None:
    loss = loss_of(random_tokens(1, 1024))
    assert_close_but_not_same(train(with_muse(llama(), CONFIG), loss), train(llama(), loss))


def test_documents_train_as_each_alone() -> None:
    model = with_muse(llama(), CONFIG)
    tokens = random_tokens(2, sum(LENGTHS))
    lengths = [[*LENGTHS, 0], [0, *reversed(LENGTHS)]]
    alone = []
    for row, documents in zip(tokens, lengths, strict=True):
        at = 0
        for length in filter(None, documents):
            alone.append(train(model, loss_of(row[None, at : at + length + 1])))
            at += length
    assert_same(train(model, loss_of(tokens, lengths)), sum_of(alone))


def test_the_documented_code() -> None:
    config = TransformerConfig.llama_like(
        d_model=64, vocab_size=VOCABULARY, n_layers=2, n_heads=4, attn_backend=AttentionBackendName.torch
    )
    names = {"model_config": config}
    exec(documented_code("OLMo-core"), names)
    backends = [block.attention.backend for block in names["model"].blocks.values()]
    assert all(isinstance(backend, MuSeAttentionBackend) for backend in backends)


def test_layers_with_a_window_keep_their_backend() -> None:
    windows = SlidingWindowAttentionConfig(pattern=[16, -1], force_full_attention_on_first_layer=False)
    model = llama(sliding_window=windows)
    assert use_muse(model) == ["blocks.1.attention"]
    assert not isinstance(model.blocks["0"].attention.backend, MuSeAttentionBackend)
    loss = loss_of(random_tokens(1, 40))
    assert_same(train(model, loss), train(llama(sliding_window=windows), loss))


def test_a_compiled_block_is_not_compiled_again_for_other_documents() -> None:
    tokens = random_tokens(1, 40)
    eager, compiled = with_muse(llama()), with_muse(llama())
    for block in compiled.blocks.values():
        block.compile(backend="eager")
    # The first batches fill caches of OLMo-core, and show the compiler which sizes change.
    for lengths in ([30, 10], [28, 12], [12, 13, 15]):
        train(compiled, loss_of(tokens, [lengths]))
    for lengths in ([8, 8, 24], [4, 4, 25, 7], [35, 5]):
        loss = loss_of(tokens, [lengths])
        with torch.compiler.set_stance("fail_on_recompile"):
            found = train(compiled, loss)
        assert_same(found, train(eager, loss))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no attention layer of OLMo-core"):
        use_muse(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="QK"):
        use_muse(llama(), "nonsense")
    model = with_muse(llama())
    attention = model.blocks["0"].attention
    with pytest.raises(ValueError, match="exact attention"):
        attention.init_kv_cache_manager(1, 8)
    with pytest.raises(ValueError, match="use Ulysses"):
        attention.backend.apply_cp(None, ring=RingContextParallelStyle())
    attention.backend.cp_enabled = True
    with pytest.raises(ValueError, match="before it is applied"):
        use_muse(model)


def test_its_ulysses_with_fewer_key_heads_than_ranks() -> None:
    on_two_processes(_check_ulysses)


def _check_ulysses(rank: int) -> None:
    """Documents in two parts of a row against the whole row in one process."""
    tokens = random_tokens(1, 256)[:, :-1]
    documents = {"doc_lens": torch.tensor([[190, 66]]), "max_doc_lens": [190]}
    whole, model = (with_muse(llama(key_heads=1, has_rope=False), "QK4R1B32") for _ in range(2))
    expected = whole(tokens, **documents)
    expected.square().sum().backward()
    model.apply_cp(init_device_mesh("cpu", (2,)), uly=UlyssesContextParallelStyle())
    found = model(tokens, **documents)
    assert_equal_to_rounding(found, expected.chunk(2, 1)[rank], "logits")
    found.square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        size = other.grad.abs().max()
        assert_equal_to_rounding(parameter.grad / size, other.grad / size, name)
