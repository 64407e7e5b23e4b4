"""Packed documents in a model of transformers: kept apart, or refused. Never do they see each other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from muse_attention import DocumentBoundaries, MuSeConfig
from muse_attention.core.recording import recorded_calls
from muse_attention.documents.arguments import refuse_packed_documents
from muse_attention.huggingface import ExactAttentionWarning, register, use_attention
from tests.models import tiny_llama, token_ids
from tests.refusals import one_line_error

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


def alone(model: PreTrainedModel, attention: str, ids: Tensor, lengths: tuple[int, ...], positions: Tensor) -> Tensor:
    """The logits of each document by itself."""
    parts = zip(ids.split(lengths, 1), positions.split(lengths, 1), strict=True)
    return torch.cat([logits(model, attention, part, position_ids=told) for part, told in parts], 1)


ON = torch.arange(LENGTH)[None]
FIRST = torch.cat([torch.zeros(1, 1, dtype=torch.long), torch.arange(LENGTH - 1)[None]], 1)


@pytest.mark.parametrize(
    "attention", ["muse:QK4R1B64", "muse:QK4R1B512", "exact", "moba:L64B16R2", "block_diagonal:64"]
)
@pytest.mark.parametrize(
    ("arguments", "lengths", "positions"),
    [
        ({"position_ids": PACKED}, LENGTHS, PACKED),
        ({"position_ids": PACKED, "use_cache": True}, LENGTHS, PACKED),
        ({"position_ids": PACKED, "use_cache": False}, LENGTHS, PACKED),
        ({"position_ids": PACKED, "use_cache": False, "attention_mask": torch.ones(1, LENGTH)}, LENGTHS, PACKED),
        ({"position_ids": FIRST}, (1, LENGTH - 1), FIRST),
        (BY_LENGTH, LENGTHS, ON),
        ({**BY_LENGTH, "use_cache": False}, LENGTHS, ON),
        ({**BY_LENGTH, "position_ids": PACKED}, LENGTHS, PACKED),
        ({"cu_seq_lens_q": DocumentBoundaries.from_lengths(LENGTHS)}, LENGTHS, ON),
    ],
    ids=["default", "cache", "no cache", "ones", "one token", "lengths", "lengths without cache", "both", "boundaries"],
)
def test_a_packed_batch_gives_what_each_document_gives_alone(
    attention: str, arguments: dict[str, Any], lengths: tuple[int, ...], positions: Tensor
) -> None:
    model, ids = tiny_llama(), token_ids(LENGTH)
    expected = alone(model, attention, ids, lengths, positions)
    torch.testing.assert_close(logits(model, attention, ids, **arguments), expected)


def test_packed_documents_run_muse() -> None:
    model, ids = tiny_llama(), token_ids(LENGTH)
    model.set_attn_implementation("muse")
    with recorded_calls() as calls:
        model(ids, position_ids=PACKED, use_cache=False)
    assert [call.query.shape[2] for call in calls] == [*LENGTHS] * model.config.num_hidden_layers
    assert all(str(call.config) == str(MuSeConfig.parse(EVERYTHING)) for call in calls)


def test_gradients_of_a_packed_batch_are_those_of_its_documents() -> None:
    model, ids = tiny_llama(), token_ids(LENGTH)
    found = []
    with use_attention(model, "muse:QK4R1B64"):
        for rows in (
            [(ids, PACKED)],
            zip(ids.split(LENGTHS, 1), PACKED.split(LENGTHS, 1), strict=True),
        ):
            model.zero_grad()
            for row, positions in rows:
                model(row, position_ids=positions, use_cache=False).logits.square().sum().backward()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*found)


class _Layer(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize("arguments", [{"position_ids": PACKED}, BY_LENGTH], ids=["positions", "lengths"])
def test_the_attention_function_leaks_nothing_without_a_mask(arguments: dict[str, Any]) -> None:
    """As DeepSpeed's Ulysses calls it, which drops every mask."""
    attend = ALL_ATTENTION_FUNCTIONS["muse"]
    tensors = [torch.randn(1, heads, LENGTH, 16, dtype=torch.float64) for heads in (4, 2, 2)]
    before, _ = attend(_Layer(), *tensors, None, scaling=0.25, **arguments)
    for tensor in tensors:
        tensor[:, :, : LENGTHS[0]] += 1
    after, _ = attend(_Layer(), *tensors, None, scaling=0.25, **arguments)
    assert torch.equal(before[:, LENGTHS[0] :], after[:, LENGTHS[0] :])
    assert (before - after)[:, : LENGTHS[0]].abs().min(dim=-1).values.max() > 0


def documents_in(real: Tensor, positions: Tensor) -> Iterator[tuple[int, int, int]]:
    """(row, begin, end): tokens that are not padding, up to the next position 0."""
    for row in range(len(real)):
        begin = None
        for at in range(LENGTH + 1):
            goes_on = at < LENGTH and real[row, at] and positions[row, at] != 0
            if begin is not None and not goes_on:
                yield row, begin, at
                begin = None
            if begin is None and at < LENGTH and real[row, at]:
                begin = at


@pytest.mark.parametrize("attention", ["exact", "muse:QK4R1B16", "block_diagonal:16"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_and_packed_rows(attention: str, side: str) -> None:
    """One row is padded, one packed, and one is both."""
    real = padded(side)[[0, 1, 0]]
    positions = torch.cat([(real[:1].cumsum(1) - 1).clamp(min=0), PACKED, PACKED])
    model, ids = tiny_llama(), token_ids(LENGTH, batch=3)
    found = logits(model, attention, ids, position_ids=positions, attention_mask=real)
    documents = list(documents_in(real, positions))
    assert len(documents) == 5
    for row, begin, end in documents:
        part = (slice(row, row + 1), slice(begin, end))
        expected = logits(model, attention, ids[part], position_ids=positions[part])
        torch.testing.assert_close(found[part], expected)


def test_padding_inside_a_document_is_attended_to_exactly_and_refused_where_documents_are_packed() -> None:
    real = torch.ones(1, LENGTH, dtype=torch.long)
    real[0, 20:30] = 0
    model, ids = tiny_llama(), token_ids(LENGTH)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(ids, attention_mask=real).logits
    model.set_attn_implementation("muse")
    with torch.no_grad(), pytest.warns(ExactAttentionWarning, match="padding inside a document"):
        found = model(ids, attention_mask=real).logits
    torch.testing.assert_close(found[real.bool()], expected[real.bool()])
    for told in ({"position_ids": PACKED}, {"cu_seq_lens_q": DocumentBoundaries.from_lengths(LENGTHS)}):
        with one_line_error("packed documents would see each other"):
            logits(model, "muse:QK4R1B16", ids, attention_mask=real, **told)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seq_lens_k": torch.tensor([0, 90, LENGTH], dtype=torch.int32)}, "cu_seq_lens_q and cu_seq_lens_k differ"),
        ({"cu_seq_lens_q": ENDS[:2], "cu_seq_lens_k": ENDS[:2]}, "cu_seq_lens_q ends at 80, the batch has 200 tokens"),
        ({"cu_seq_lens_q": ENDS.long()}, "cu_seq_lens_q has dtype torch.int64"),
    ],
)
def test_bad_lengths_are_refused_in_one_line(change: dict[str, Tensor], message: str) -> None:
    with one_line_error(message):
        logits(tiny_llama(), "exact", token_ids(LENGTH), **(BY_LENGTH | change))


def test_documents_in_a_continued_cache_are_refused() -> None:
    model, ids = tiny_llama(), token_ids(100 + LENGTH)
    with use_attention(model, f"muse:{EVERYTHING}"), torch.no_grad():
        cache = model(ids[:, :100], use_cache=True).past_key_values
        with pytest.raises(ValueError, match="packed documents would see each other"):
            model(ids[:, 100:], past_key_values=cache, position_ids=PACKED + 100)


def general_mask(dtype: torch.dtype) -> Tensor:
    """It separates the documents, as `position_ids` would."""
    seen = torch.block_diag(*(torch.ones(length, length).tril() for length in LENGTHS)).bool()[None, None]
    if dtype == torch.bool:
        return seen
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
def test_a_general_mask_is_heeded_by_exact_attention_and_refused_by_all_others(dtype: torch.dtype) -> None:
    model, ids = tiny_llama(), token_ids(LENGTH)
    mask, shared = general_mask(dtype), {"position_ids": PACKED, **BY_LENGTH}
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = torch.cat([model(part).logits for part in ids.split(LENGTHS, 1)], 1)
    torch.testing.assert_close(logits(model, "exact", ids, attention_mask=mask, **shared), expected)
    for attention in (f"muse:{EVERYTHING}", "block_diagonal:64"):
        with one_line_error("MuSe reads no general attention_mask: tell padding by a 2D mask"):
            logits(model, attention, ids, attention_mask=mask, **shared)


def test_a_general_mask_is_refused_whoever_makes_it() -> None:
    """A caller of the attention function, or a function that changes the causal mask; also in one compiled graph."""
    attend, message = ALL_ATTENTION_FUNCTIONS["muse"], "MuSe reads no general attention_mask"
    tensors = [torch.randn(1, heads, LENGTH, 16, dtype=torch.float64) for heads in (4, 2, 2)]
    with pytest.raises(ValueError, match=message):
        attend(_Layer(), *tensors, general_mask(torch.bool), scaling=0.25)
    model = tiny_llama(num_hidden_layers=1)
    model.set_attn_implementation("muse")
    a_prefix_sees_itself = {"or_mask_function": lambda batch, head, query, key: (query < 9) & (key < 9)}

    def make(attention_mask: Tensor | None, **changes: Any) -> Tensor | None:
        embeddings = torch.zeros(1, LENGTH, 64)
        return create_causal_mask(model.config, embeddings, attention_mask, past_key_values=None, **changes)

    with pytest.raises(ValueError, match=message):
        attend(_Layer(), *tensors, make(None, **a_prefix_sees_itself), scaling=0.25)
    torch.compiler.reset()
    compiled = torch.compile(make, backend="eager", fullgraph=True)
    with pytest.raises(Unsupported, match=message):
        compiled(None, **a_prefix_sees_itself)
    with pytest.raises(Unsupported, match=message):
        compiled(general_mask(torch.bool))


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


@pytest.mark.parametrize(
    "write",
    [Tensor.copy_, lambda told, new: told.data.copy_(new), lambda told, new: np.copyto(told.numpy(), new.numpy())],
    ids=["in place", "data", "numpy"],
)
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("position_ids", ON, PACKED), ("cu_seq_lens_q", torch.tensor([0, 9, LENGTH], dtype=torch.int32), ENDS)],
)
def test_a_reused_tensor_is_read_in_every_forward_pass(
    name: str, before: Tensor, after: Tensor, write: Callable[[Tensor, Tensor], object]
) -> None:
    """Whether or not it counts the write as a change of its own."""
    model, ids, told = tiny_llama(), token_ids(LENGTH), before.clone()
    logits(model, "exact", ids, **{name: told})
    write(told, after)
    found = logits(model, "exact", ids, **{name: told})
    torch.testing.assert_close(found, alone(model, "exact", ids, LENGTHS, PACKED if name == "position_ids" else ON))


def test_inference_mode() -> None:
    model, ids = tiny_llama(), token_ids(LENGTH)
    expected = alone(model, "exact", ids, LENGTHS, PACKED)
    with torch.inference_mode(), use_attention(model, "exact"):
        model(ids, position_ids=torch.arange(LENGTH)[None])
        torch.testing.assert_close(model(ids, position_ids=PACKED.clone()).logits, expected)


class _Reads(TorchDispatchMode):
    """Counts where Python reads a number of a tensor, which on a GPU waits for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "arguments",
    [{}, {"position_ids": PACKED}, {"attention_mask": (torch.arange(LENGTH) > 9)[None].long()}],
    ids=["plain", "packed", "padded"],
)
def test_documents_are_read_once_and_not_in_every_layer(arguments: dict[str, Any]) -> None:
    counts = []
    for layers in (1, 4):
        model = tiny_llama(num_hidden_layers=layers)
        fresh = {name: told.clone() if isinstance(told, Tensor) else told for name, told in arguments.items()}
        with use_attention(model, "exact"), torch.no_grad(), _Reads() as reads:
            model(token_ids(LENGTH), **fresh)
        counts.append(reads.count)
    assert counts[0] == counts[1]


@pytest.mark.long
@pytest.mark.parametrize("attention", [f"muse:{EVERYTHING}", "exact"])
def test_a_compiled_model_refuses_them_where_it_runs(attention: str) -> None:
    model, ids = tiny_llama(num_hidden_layers=1), token_ids(LENGTH)
    expected = logits(model, attention, ids)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with use_attention(model, attention), torch.no_grad():
        found = compiled(ids, position_ids=torch.arange(LENGTH)[None], use_cache=True).logits
        torch.testing.assert_close(found, expected)
        with pytest.raises(RuntimeError, match="packed documents would see each other"):
            compiled(ids, position_ids=PACKED, use_cache=True)
