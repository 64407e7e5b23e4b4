"""Short documents in one call, as on CUDA, with plain PyTorch in place of FlashAttention's operators."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from muse_attention import DocumentBoundaries, muse_attn_varlen_func
from muse_attention.backends.torch.backend import TorchBackend
from muse_attention.core.recording import recorded_calls
from muse_attention.documents import exact
from muse_attention.documents.rows import attend_to_windows
from muse_lab.pretraining.model.sliding_window import sliding_window_attention
from tests.closeness import assert_equal_to_rounding, assert_same, gradients
from tests.library.test_packed import CONFIG, loop, packed, row

calls: list[list[int]] = []
"""The ends of the documents of each call."""


def weights(query: Tensor, key: Tensor, ends: Tensor, is_causal: bool, scale: float, window: int | None) -> Tensor:
    """The logits, (heads, tokens, tokens); -inf where a token does not see another."""
    assert query.shape[-1] % 8 == 0
    number = torch.repeat_interleave(ends.diff())
    position = torch.arange(len(number))
    seen = number[:, None] == number
    if is_causal or window is not None:
        seen &= position[:, None] >= position
    if window is not None:
        seen &= position[:, None] - position <= window
    return (torch.einsum("thd,shd->hts", query, key) * scale).masked_fill(~seen, -torch.inf)


def forward(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, of_keys: Tensor, longest: int, of_keys_too: int,
    dropout: float, is_causal: bool, debug: bool, *, scale: float, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    calls.append(ends.tolist())
    assert int(ends.diff().max()) == longest
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    logits = weights(query, key, ends, is_causal, scale, window_size_left)
    nothing = torch.empty(0)
    return torch.einsum("hts,shd->thd", logits.softmax(-1), value), logits.logsumexp(-1), nothing, nothing, nothing


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, ends: Tensor,
    of_keys: Tensor, longest: int, of_keys_too: int, dropout: float, is_causal: bool, state: Tensor, unused: Tensor, *,
    scale: float, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    key_heads = key.shape[1]
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    logits = weights(query, key, ends, is_causal, scale, window_size_left)
    weight = (logits - lse[..., None]).exp()
    delta = (grad_out * out).sum(-1).T
    grad_logits = weight * (torch.einsum("thd,shd->hts", grad_out, value) - delta[..., None]) * scale
    grad_key = torch.einsum("hts,thd->shd", grad_logits, query).unflatten(1, (key_heads, -1)).sum(2)
    grad_value = torch.einsum("hts,thd->shd", weight, grad_out).unflatten(1, (key_heads, -1)).sum(2)
    return torch.einsum("hts,shd->thd", grad_logits, key), grad_key, grad_value


@pytest.fixture(autouse=True)
def _one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(lengths: tuple[int, ...], device: Any) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)

    calls.clear()
    monkeypatch.setattr(exact, "FORWARD", forward)
    monkeypatch.setattr(exact, "BACKWARD", backward)
    monkeypatch.setattr(exact, "serves", lambda query, value: True)
    monkeypatch.setattr(exact, "cumulative_lengths", ends)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(
    ("lengths", "ends"),
    [
        ([1, 16, 40, 3, 16, 40, 17, 5], [0, 1, 17, 20, 36, 41]),
        ([5, 9], [0, 5, 14]),
        ([40, 3], [0, 3]),
    ],
    ids=["mixed", "all short", "one short"],
)
def test_short_documents_share_one_call(lengths: list[int], ends: list[int], key_heads: int, causal: bool) -> None:
    """Output, lse and gradients are those of the loop; the gradient of the lse, too."""
    tensors = row(sum(lengths), heads=4, key_heads=key_heads)
    found = packed(tensors, lengths, causal=causal, return_lse=True)
    assert calls == [ends]
    assert_same(found, loop(tensors, lengths, is_causal=causal), tensors)


@pytest.mark.parametrize("together", [4, 2])
def test_what_documents_cost_does_not_depend_on_their_order(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones share one call, long ones of equal length as many as the grid of the kernels allows."""
    monkeypatch.setattr(TorchBackend, "sequences_at_once", lambda _, heads: 4 * together // heads)
    generator = torch.Generator().manual_seed(5)
    lengths = [40, 40, 1, 16, 40, 17, 3, 40, 40]
    costs = []
    for _ in range(3):
        order = [lengths[index] for index in torch.randperm(len(lengths), generator=generator)]
        tensors = row(sum(order))
        calls.clear()
        with recorded_calls() as long:
            found = packed(tensors, order, return_lse=True)
        (ends,) = calls
        stacked = sorted(tuple(call.query.shape) for call in long)
        costs.append((sorted(end - begin for begin, end in pairwise(ends)), stacked))
        assert_same(found, loop(tensors, order), tensors)
    sizes = [1, 4] if together == 4 else [1, 2, 2]
    assert costs == [([1, 3, 16], sorted([(1, 2, 17, 8), *((size, 2, 40, 8) for size in sizes)]))] * 3


@pytest.mark.long
def test_a_compiled_graph_does_not_attend_to_short_documents_again() -> None:
    lengths = [1, 16, 40, 3, 17]
    tensors = row(sum(lengths))
    torch.compiler.reset()
    compiled = torch.compile(muse_attn_varlen_func, backend="aot_eager", fullgraph=True)
    boundaries = DocumentBoundaries.from_lengths(lengths)
    settings: dict[str, Any] = {"causal": True, "config": CONFIG, "return_lse": True}
    found = compiled(*tensors, boundaries, boundaries, 40, 40, **settings)
    results = (*found, *gradients(found, tensors))
    assert calls == [[0, 1, 17, 20]]
    expected = loop(tensors, lengths)
    for ours, theirs in zip(results, (*expected, *gradients(expected, tensors)), strict=True):
        assert_equal_to_rounding(ours, theirs)


def test_windows_of_documents_share_one_call() -> None:
    tensors = row(60, heads=2)
    boundaries = DocumentBoundaries((5, 45), (40, 50), 60)
    scale = tensors[0].shape[-1] ** -0.5
    found = attend_to_windows(*tensors, boundaries, None, window=7, scale=scale)  # type: ignore[arg-type]
    assert calls == [[0, 35, 40]]
    for begin, end in ((5, 40), (45, 50)):
        one = (tensor[begin:end].transpose(0, 1)[None] for tensor in tensors)
        expected = sliding_window_attention(*one, window=7)
        assert_equal_to_rounding(found[begin:end], expected[0].transpose(0, 1))
