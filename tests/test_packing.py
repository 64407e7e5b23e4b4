"""Packed documents in a model of transformers: kept apart, or refused. Never do they see each other."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from transformers import PreTrainedModel

from muse_attention.huggingface import ExactAttentionWarning, register, use_attention
from muse_attention.packing import refuse_packed_documents
from tests.models import tiny_llama, token_ids

LENGTHS = (80, 120)
LENGTH = sum(LENGTHS)
PACKED = torch.cat([torch.arange(length) for length in LENGTHS])[None]
ENDS = torch.tensor([0, LENGTHS[0], LENGTH], dtype=torch.int32)
BY_LENGTH = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 120, "max_length_k": 120}
EVERYTHING = "QK4R4SP16B64"
"""Retrieves every bucket of up to 16 blocks, so it is exact attention to rounding."""


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register(EVERYTHING)
    yield
    register()


def logits(model: PreTrainedModel, attention: str, ids: Tensor, **arguments: Any) -> Tensor:
    with use_attention(model, attention), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ExactAttentionWarning)
        return model(ids, **arguments).logits


def assert_refused(attention: str, ids: Tensor, **arguments: Any) -> None:
    with pytest.raises(
        ValueError, match="packed documents would see each other: put one document into a row"
    ) as raised:
        logits(tiny_llama(), attention, ids, **arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "attention", ["muse:QK4R1B64", "muse:QK4R1B512", "exact", "moba:L64B16R2", "block_diagonal:64"]
)
@pytest.mark.parametrize(
    "arguments",
    [
        {"position_ids": PACKED},
        {"position_ids": PACKED, "use_cache": True},
        {"position_ids": PACKED, "use_cache": False, "attention_mask": torch.ones(1, LENGTH)},
        {"position_ids": torch.cat([torch.zeros(1, 1, dtype=torch.long), torch.arange(LENGTH - 1)[None]], 1)},
        BY_LENGTH,
        {**BY_LENGTH, "use_cache": False},
        {**BY_LENGTH, "position_ids": PACKED},
    ],
    ids=["default", "cache", "ones", "one token", "lengths", "lengths without cache", "lengths and positions"],
)
def test_documents_that_would_see_each_other_are_refused(attention: str, arguments: dict[str, Any]) -> None:
    assert_refused(attention, token_ids(LENGTH), **arguments)


def test_attn_implementation_muse_refuses_them_too() -> None:
    model = tiny_llama()
    model.set_attn_implementation("muse")
    with pytest.raises(ValueError, match="packed documents would see each other"):
        model(token_ids(LENGTH), position_ids=PACKED)


def test_a_padding_mask_does_not_separate_documents() -> None:
    """One row is padded, the other packed: there is a mask, but not one of documents."""
    real = torch.ones(2, LENGTH, dtype=torch.long)
    real[0, :50] = 0
    positions = torch.cat([(real[:1].cumsum(1) - 1).clamp(min=0), PACKED])
    assert_refused("exact", token_ids(LENGTH, batch=2), position_ids=positions, attention_mask=real)
    assert_refused("muse", token_ids(LENGTH, batch=2), position_ids=positions, attention_mask=real)


def test_documents_in_a_continued_cache_are_refused() -> None:
    model, ids = tiny_llama(), token_ids(100 + LENGTH)
    with use_attention(model, f"muse:{EVERYTHING}"), torch.no_grad():
        cache = model(ids[:, :100], use_cache=True).past_key_values
        with pytest.raises(ValueError, match="packed documents would see each other"):
            model(ids[:, 100:], past_key_values=cache, position_ids=PACKED + 100)


@pytest.mark.parametrize("attention", [f"muse:{EVERYTHING}", "exact"])
@pytest.mark.parametrize("by", ["transformers", "boolean", "float"])
def test_a_mask_that_separates_documents_is_heeded(attention: str, by: str) -> None:
    model, ids = tiny_llama(), token_ids(LENGTH)
    alone = torch.cat([logits(model, "exact", part) for part in ids.split(LENGTHS, 1)], 1)
    arguments: dict[str, Any] = {"position_ids": PACKED, "use_cache": False}
    if by != "transformers":
        mask = torch.block_diag(*(torch.ones(length, length).tril() for length in LENGTHS)).bool()[None, None]
        if by == "float":
            mask = torch.zeros_like(mask, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
        arguments = {"position_ids": PACKED, "attention_mask": mask, **BY_LENGTH}
    torch.testing.assert_close(logits(model, attention, ids, **arguments), alone)


def padded(side: str) -> Tensor:
    real = torch.ones(2, LENGTH, dtype=torch.long)
    real[0, slice(0, 50) if side == "left" else slice(150, LENGTH)] = 0
    return real


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("filled_with", [0, 1])
@pytest.mark.parametrize("attention", [f"muse:{EVERYTHING}", "exact"])
def test_positions_of_padding_are_no_documents(side: str, filled_with: int, attention: str) -> None:
    real = padded(side)
    positions = (real.cumsum(1) - 1).masked_fill(real == 0, filled_with)
    model, ids = tiny_llama(), token_ids(LENGTH, batch=2)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(ids, attention_mask=real, position_ids=positions).logits
    found = logits(model, attention, ids, attention_mask=real, position_ids=positions)
    torch.testing.assert_close(found[real.bool()], expected[real.bool()])


@pytest.mark.parametrize("positions", [torch.arange(7, 7 + LENGTH), torch.arange(LENGTH) * 2, torch.arange(LENGTH) + 1])
def test_positions_that_go_on_are_one_document(positions: Tensor) -> None:
    model, ids = tiny_llama(), token_ids(LENGTH)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(ids, position_ids=positions[None]).logits
    torch.testing.assert_close(logits(model, f"muse:{EVERYTHING}", ids, position_ids=positions[None]), expected)


def test_one_document_in_each_row_by_length_is_served() -> None:
    model, ids = tiny_llama(), token_ids(LENGTH, batch=3)
    ends = torch.arange(4, dtype=torch.int32) * LENGTH
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": LENGTH, "max_length_k": LENGTH}
    expected = logits(model, f"muse:{EVERYTHING}", ids)
    torch.testing.assert_close(logits(model, f"muse:{EVERYTHING}", ids, **lengths), expected)


def test_positions_in_three_components() -> None:
    """Those of a multimodal RoPE: all tokens of an image are at one time, in rows and columns that begin anew."""
    time = torch.tensor([0, 0, 0, 0, 2, 3, 4, 5])
    row = torch.tensor([0, 0, 1, 1, 2, 3, 4, 5])
    column = torch.tensor([0, 1, 0, 1, 2, 3, 4, 5])
    image = torch.stack([time, row, column])[:, None].expand(3, 2, 8)
    refuse_packed_documents(2, 8, None, {"position_ids": image})
    with pytest.raises(ValueError, match="packed documents"):
        refuse_packed_documents(2, 8, None, {"position_ids": torch.cat([image[..., 4:], image[..., 4:]], -1)})


def test_a_changed_tensor_is_read_again() -> None:
    model, ids, positions = tiny_llama(), token_ids(LENGTH), torch.arange(LENGTH)[None]
    logits(model, "exact", ids, position_ids=positions)
    positions.copy_(PACKED)
    with pytest.raises(ValueError, match="packed documents"):
        logits(model, "exact", ids, position_ids=positions)


def test_inference_mode() -> None:
    model, ids = tiny_llama(), token_ids(LENGTH)
    with torch.inference_mode(), use_attention(model, "exact"):
        model(ids, position_ids=torch.arange(LENGTH)[None])
        with pytest.raises(ValueError, match="packed documents"):
            model(ids, position_ids=PACKED.clone())


class _Reads(TorchDispatchMode):
    """Counts where Python reads a number of a tensor, which on a GPU waits for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_positions_are_read_once_and_not_in_every_layer() -> None:
    counts = []
    for layers in (1, 4):
        model = tiny_llama(num_hidden_layers=layers)
        with use_attention(model, "exact"), torch.no_grad(), _Reads() as reads:
            model(token_ids(LENGTH))
        counts.append(reads.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("attention", [f"muse:{EVERYTHING}", "exact"])
def test_a_compiled_model_refuses_them_where_it_runs(attention: str) -> None:
    model, ids = tiny_llama(), token_ids(LENGTH)
    expected = logits(model, attention, ids)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with use_attention(model, attention), torch.no_grad():
        found = compiled(ids, position_ids=torch.arange(LENGTH)[None], use_cache=True).logits
        torch.testing.assert_close(found, expected)
        with pytest.raises(RuntimeError, match="packed documents would see each other"):
            compiled(ids, position_ids=PACKED, use_cache=True)
