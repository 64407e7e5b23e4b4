"""MuSe in Megatron-core: loss and gradients of its GPT, and documents, packed, padded, or in a mask."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

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

pytest.importorskip("megatron.core", reason="Megatron-core is not installed: make test-integrations")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that Megatron would like to have
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import import_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from muse_attention.integrations.megatron import MuSeCoreAttention, use_muse

VOCABULARY = 96
OPTIONS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "params_dtype": torch.float64,
}


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron wants process groups, and puts what it makes onto the current CUDA device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(random.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
    file = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def gpt(spec: Any = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return GPTModel(
        config=TransformerConfig(**OPTIONS | options),
        transformer_layer_spec=spec or get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=4096,
        position_embedding_type="rope",
    ).double()


def gpt_with_muse(config: str | None = None, **options: Any) -> nn.Module:
    return gpt(use_muse(get_gpt_layer_local_spec(normalization="RMSNorm"), config), **options)


def causal_mask(length: int) -> Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)


def loss_of(tokens: Tensor, mask: Tensor | None = None, **arguments: Any) -> Callable[[nn.Module], Tensor]:
    """Losses of (batch, length + 1) tokens."""
    positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)

    def losses(model: Any) -> Tensor:
        return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:], **arguments).double()

    return losses


def random_tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length + 1), generator=torch.Generator().manual_seed(1))


def alone(model: nn.Module, tokens: Tensor) -> Any:
    found, at = [], 0
    for length in LENGTHS:
        found.append(train(model, loss_of(tokens[:, at : at + length + 1])))
        at += length
    return sum_of(found)


@pytest.mark.parametrize("mask", [causal_mask(96), None], ids=["causal mask", "no mask"])
def test_short_rows_train_as_with_its_own_attention(mask: Tensor | None) -> None:
    tokens = random_tokens(2, 96)
    expected = train(gpt(), loss_of(tokens, causal_mask(96)))
    assert_same(train(gpt_with_muse(), loss_of(tokens, mask)), expected)


def test_longer_rows_are_approximated() -> None:
    loss = loss_of(random_tokens(1, 1024), causal_mask(1024))
    assert_close_but_not_same(train(gpt_with_muse(CONFIG), loss), train(gpt(), loss))


@pytest.mark.parametrize(("repeated_ends", "softmax"), [(0, "vanilla"), (2, "vanilla"), (0, "learnable")])
def test_packed_documents_train_as_each_alone(repeated_ends: int, softmax: str) -> None:
    model, tokens = gpt_with_muse(CONFIG, softmax_type=softmax), random_tokens(1, sum(LENGTHS))
    ends = torch.tensor([0, *LENGTHS, *[0] * repeated_ends]).cumsum(0).to(torch.int32)
    params = PackedSeqParams("thd", ends, ends, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS))
    assert_same(train(model, loss_of(tokens, packed_seq_params=params)), alone(model, tokens))


def test_padded_documents_train_as_each_alone() -> None:
    """As for kernels that want lengths of a multiple: each document is followed by padding."""
    model, tokens = gpt_with_muse(CONFIG), random_tokens(1, sum(LENGTHS))
    rooms = [-(-length // 16) * 16 for length in LENGTHS]
    ends, places = (torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (LENGTHS, rooms))
    params = PackedSeqParams("thd", ends, ends, places, places, max(rooms), max(rooms))
    inputs, labels = (torch.zeros(1, sum(rooms), dtype=torch.long) for _ in range(2))
    weights = torch.zeros(1, sum(rooms), dtype=torch.float64)
    at = 0
    for place, length in zip(places.tolist(), LENGTHS, strict=False):
        inputs[:, place : place + length] = tokens[:, at : at + length]
        labels[:, place : place + length] = tokens[:, at + 1 : at + length + 1]
        weights[:, place : place + length] = 1
        at += length

    def losses(model: Any) -> Tensor:
        return model(inputs, torch.zeros_like(inputs), None, labels=labels, packed_seq_params=params) * weights

    assert_same(train(model, losses), alone(model, tokens))


def test_a_mask_of_documents_separates_them() -> None:
    """As `--reset-attention-mask` makes it; MuSe reads the documents, Megatron's own attention hides logits."""
    tokens, lengths = random_tokens(2, 96), [[40, 56], [90, 6]]
    mask = causal_mask(96).repeat(2, 1, 1, 1)
    for row, (first, _) in zip(mask, lengths, strict=True):
        row[0, first:, :first] = True
    assert_same(train(gpt_with_muse(), loss_of(tokens, mask)), train(gpt(), loss_of(tokens, mask)))


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_softmax_offsets_train_as_with_its_own_attention(kind: str) -> None:
    loss = loss_of(random_tokens(2, 96), causal_mask(96))
    ours, theirs = gpt_with_muse(softmax_type=kind), gpt(softmax_type=kind)
    ours.load_state_dict(theirs.state_dict())
    found = train(ours, loss)
    assert any(name.endswith("softmax_offset") for name in found.gradients) == (kind == "learnable")
    assert_same(found, train(theirs, loss))
    plain = train(gpt_with_muse(), loss)
    assert abs(float(found.loss / plain.loss) - 1) > 1e-4  # the offsets are not left out
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    saved, own = (model.sharded_state_dict(metadata=metadata) for model in (ours, theirs))
    offsets = [name for name in own if name.endswith("softmax_offset")]
    assert len(offsets) == (2 if kind == "learnable" else 0)
    assert offsets == [name for name in saved if name.endswith("softmax_offset")]


def test_a_reused_tensor_is_read_in_every_call() -> None:
    """Whether or not it counts the write as a change of its own."""
    attention = MuSeCoreAttention(TransformerConfig(**OPTIONS), 1, AttnMaskType.causal, "self")
    query, ends, mask = torch.randn(8, 4, 16), torch.tensor([0, 3, 8], dtype=torch.int32), causal_mask(8)
    for end in (3, 5):
        ends.numpy()[1] = end
        mask.numpy()[:] = causal_mask(8).numpy()
        mask.numpy()[0, 0, end:, :end] = True
        expected = torch.cat([attention(*[part[:, None]] * 3, None) for part in query.split([end, 8 - end])])
        packed = attention(*[query] * 3, None, packed_seq_params=PackedSeqParams("thd", ends, ends))
        masked = attention(*[query[:, None]] * 3, mask)
        for found in (packed[:, None], masked):
            torch.testing.assert_close(found, expected)


def test_recomputed_attention_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_get_cuda_rng_state", lambda **_: None)
    monkeypatch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)
    loss = loss_of(random_tokens(1, 300), causal_mask(300))
    again = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    assert_same(train(gpt_with_muse(CONFIG, **again), loss), train(gpt_with_muse(CONFIG), loss))


def test_the_spec_of_the_command_line() -> None:
    """`--spec muse_attention.integrations.megatron layer_spec`."""
    model = gpt(import_module(("muse_attention.integrations.megatron", "layer_spec")))
    assert sum(isinstance(module, MuSeCoreAttention) for module in model.modules()) == 2
    loss = loss_of(random_tokens(1, 40), causal_mask(40))
    assert_same(train(model, loss), train(gpt(), loss))
    assert not [name for name in model.state_dict() if "core_attention" in name and "_extra_state" not in name]


def test_the_documented_code() -> None:
    names: dict[str, Any] = {}
    exec(documented_code("Megatron-core"), names)
    found = [module for module in gpt(names["layer_spec"]).modules() if isinstance(module, MuSeCoreAttention)]
    assert [module.muse_config for module in found] == ["QK64R8B1k"] * 2


def test_the_spec_of_a_block() -> None:
    config = TransformerConfig(**OPTIONS)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = gpt(use_muse(spec, "QK4R1B32"))
    found = [module for module in model.modules() if isinstance(module, MuSeCoreAttention)]
    assert [module.muse_config for module in found] == ["QK4R1B32"] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_dropout": 0.1}, "attention-dropout 0"),
        ({"window_size": (16, 0)}, "spec of their own"),
        ({"log_max_attention_logit": True}, "log_max_attention_logit"),
    ],
)
def test_a_model_that_muse_cannot_serve_is_not_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpt_with_muse(**options)


def test_context_parallelism_is_refused() -> None:
    config = TransformerConfig(**OPTIONS)
    config.context_parallel_size = 2
    with pytest.raises(ValueError, match="split heads with tensor_model_parallel_size"):
        MuSeCoreAttention(config, 1, AttnMaskType.causal, "self")


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="no layer with a core attention"):
        use_muse(object())
    with pytest.raises(ValueError, match="QK"):
        use_muse(get_gpt_layer_local_spec(), "nonsense")
    attention = MuSeCoreAttention(TransformerConfig(**OPTIONS), 1, AttnMaskType.causal, "self")
    query = torch.randn(8, 1, 4, 16)
    with pytest.raises(ValueError, match="neither causal nor causal inside documents"):
        attention(query, query, query, torch.rand(1, 1, 8, 8) > 0.5)
    with pytest.raises(ValueError, match="attn_mask_type=padding"):
        attention(query, query, query, causal_mask(8), attn_mask_type=AttnMaskType.padding)
    with pytest.raises(ValueError, match="attention_bias"):
        attention(query, query, query, None, attention_bias=torch.zeros(1, 4, 8, 8))
    with pytest.raises(ValueError, match="'thd' with cu_seqlens_q"):
        attention(query, query, query, None, packed_seq_params=PackedSeqParams("sbhd"))
    ends, others = torch.tensor([0, 8], dtype=torch.int32), torch.tensor([0, 4, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens_q and cu_seqlens_kv differ"):
        attention(*[query[:, 0]] * 3, None, packed_seq_params=PackedSeqParams("thd", ends, others))


def test_its_tensor_parallelism_splits_the_heads() -> None:
    on_two_processes(_check_tensor_parallelism)


def _check_tensor_parallelism(rank: int) -> None:
    """Documents with the heads of two ranks against those of one."""
    torch.cuda.current_device = lambda: "cpu"
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    params = PackedSeqParams("thd", ends, ends, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS))
    tokens = random_tokens(1, sum(LENGTHS))[:, :-1]

    def losses(model: Any) -> Tensor:
        """Of this rank's part of the vocabulary. (Megatron's cross entropy is computed in float32.)"""
        return model(tokens, torch.arange(sum(LENGTHS))[None], None, packed_seq_params=params).square()

    trained = []
    for ranks in (1, 2):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        trained.append(train(gpt_with_muse(CONFIG, tensor_model_parallel_size=ranks), losses))
        parallel_state.destroy_model_parallel()
    whole, sharded = trained
    for name, gradient in whole.gradients.items():
        found = sharded.gradients[name]
        dim = next((dim for dim in range(found.dim()) if found.shape[dim] != gradient.shape[dim]), None)
        own, size = gradient if dim is None else gradient.chunk(2, dim)[rank], gradient.abs().max()
        assert_equal_to_rounding(found / size, own / size, name)
